"""The message of a process that a launcher ends because another process of the job ended."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from draftree.cli.main import TERMINATED, leave
from draftree.parallel import lifeline, load
from draftree.parallel.lifeline import Lifelines
from draftree.parallel.options import SINGLE
from draftree.parallel.settings import LoadSettings
from draftree.parallel.world import World


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The other end of the connection to rank 1; this process is rank 0."""
    monkeypatch.setattr(lifeline, "GRACE_SECONDS", 3600.0)
    near, far = socket.socketpair()
    with near, far:
        watched = Lifelines(0, {1: near})
        yield far
        watched.drop()
        watched.wait(60)


def test_a_signal_after_the_end_of_a_rank_names_the_rank(
    peer: socket.socket, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifeline, "NOTICE_SECONDS", 60.0)
    peer.close()
    assert leave(SystemExit(TERMINATED)) == 1
    assert capsys.readouterr().err.startswith("error: rank 1 ended without a word; this process ends")


def test_a_signal_while_all_ranks_live_is_a_signal(peer: socket.socket, capsys: pytest.CaptureFixture[str]) -> None:
    assert leave(SystemExit(TERMINATED)) == TERMINATED
    assert capsys.readouterr().err == "terminated\n"


def test_a_signal_after_the_job_is_a_signal(peer: socket.socket, capsys: pytest.CaptureFixture[str]) -> None:
    assert lifeline._current is not None
    lifeline._current.drop()
    assert leave(SystemExit(TERMINATED)) == TERMINATED
    assert capsys.readouterr().err == "terminated\n"


def test_an_error_that_the_end_of_rank_zero_causes_is_no_failure_of_this_rank(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Collective operations fail when a rank leaves them; only other errors are shown with their origin."""

    class LeftError(Exception):
        """Stands for the end of the process."""

    def leave_now() -> None:
        raise LeftError

    def broken(*_: Any) -> None:
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(lifeline, "GRACE_SECONDS", 3600.0)
    monkeypatch.setattr(lifeline, "NOTICE_SECONDS", 60.0)
    monkeypatch.setattr(load, "_leave", leave_now)
    monkeypatch.setattr(load, "load_share", broken)
    near, far = socket.socketpair()
    with near, far, caplog.at_level("INFO", logger=load.logger.name):
        watched = Lifelines(1, {0: near})
        member: Any = SimpleNamespace(lifelines=watched)
        far.close()
        with pytest.raises(LeftError):
            load.attend(World(1, 2, 1, 2, None), member, "name", SINGLE, LoadSettings())
        watched.drop()
        watched.wait(60)
    assert [record.getMessage() for record in caplog.records] == ["rank 0 ended without a word, so rank 1 ends"]
    assert caplog.records[0].exc_info is None
