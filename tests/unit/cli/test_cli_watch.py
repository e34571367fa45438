"""`draftree watch` against a server that reports as `draftree serve` does."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
from rich.console import Console

from draftree.cli.main import run
from draftree.cli.watch import LONGEST_PAUSE_SECONDS, RATES, Address, History, pauses, sparkline, view
from terminals import CTRL_C, terminal
from watched_server import ROUND, STATUS, watched_server

Watch = Callable[..., tuple[int, str, str]]
ENTERS, LEAVES = "\x1b[?1049h", "\x1b[?1049l"


@pytest.fixture
def watching(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Runs `draftree watch`: exit status, standard output, standard error."""
    monkeypatch.delenv("DRAFTREE_API_KEY", raising=False)

    def call(*arguments: str) -> tuple[int, str, str]:
        status = run(["watch", *arguments])
        captured = capfd.readouterr()
        return status, captured.out, captured.err

    return call


def drawn(history: History, *, width: int = 140, height: int = 30) -> str:
    console = Console(width=width, highlight=False, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(view("http://x:1", history, width=width, height=height))
        return console.export_text()


def history_of(status: dict[str, Any], *rounds: dict[str, Any]) -> History:
    history = History()
    history.add_status(status)
    history.rounds.extend(rounds)
    return history


def test_a_snapshot_shows_models_rounds_and_phases(watching: Watch) -> None:
    with watched_server() as server:
        status, out, err = watching(server.url, "--once", "--interval", "0.3")
        assert set(server.asked) == {"/draftree/status", "/draftree/rounds"}
    assert (status, err) == (0, "")
    assert "draftree 1.2.3, up 1:02:05\nrequests: running 3, waiting 1 of 256, places 4 of 32\n" in out
    words = out.split()
    assert {"tiny", "ngram,", "suffix", "123.4", "2.25", "62%"} <= set(words)
    assert "planner: a draft costs little: on" in out
    assert "plan 10%  draft 10%  score 60%  verify 10%  commit 10%" in drawn(history_of(STATUS, ROUND))
    assert "10.5 ms     5 tokens  ███░ ·" in out


def test_a_snapshot_for_programs(watching: Watch) -> None:
    with watched_server() as server:
        status, out, _ = watching(f"{server.url}/v1/", "--once", "--json", "--interval", "0.3")
    found = json.loads(out)
    assert status == 0
    assert found["url"] == server.url
    assert found["status"] == STATUS
    assert found["rounds"]
    assert all(one == ROUND for one in found["rounds"])


def test_keys_come_from_the_option_or_the_environment(watching: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    short = ("--once", "--json", "--interval", "0.1")
    with watched_server(key="secret") as server:
        status, _, err = watching(server.url, *short)
        assert (status, err.count("\n")) == (1, 1)
        assert "requires an API key: give the right one with DRAFTREE_API_KEY or --key" in err
        status, _, err = watching(server.url, *short, "--key", "wrong")
        assert status == 1
        assert "refuses this API key" in err
        assert "wrong" not in err
        assert watching(server.url, *short, "--key", "secret")[0] == 0
        monkeypatch.setenv("DRAFTREE_API_KEY", "secret")
        assert watching(server.url, *short)[0] == 0
        assert watching(server.url, *short, "--key", "a\nb")[0] == 1


def test_an_address_where_nothing_listens(watching: Watch) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        status, out, err = watching(url, "--once")
    assert (status, out) == (1, "")
    assert err == (f"error: nothing listens at {url}: check host and port, or start 'draftree serve MODEL'\n")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("localhost:8000", "does not begin with http:// or https://"),
        ("ftp://localhost", "does not begin with http:// or https://"),
        ("http://", "names no host"),
        ("http://localhost:port", "is not a URL"),
        ("http://localhost:8000/?a=b", "is not the root of a server"),
        ("http://me:secret@localhost", "contains a user or a password"),
    ],
)
def test_wrong_addresses(watching: Watch, url: str, message: str) -> None:
    status, _, err = watching(url, "--once")
    assert (status, err.count("\n")) == (1, 1)
    assert message in err
    assert "secret" not in err


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://localhost:8000", "http://localhost:8000"),
        ("https://example.org/models/v1/", "https://example.org:443/models"),
        ("http://[::1]:80/", "http://[::1]:80"),
    ],
)
def test_addresses(url: str, expected: str) -> None:
    assert str(Address.parse(url)) == expected


@pytest.mark.parametrize(
    ("code", "status", "message"),
    [
        (404, STATUS, "status 404, so it is not a Draftree server"),
        (503, STATUS, "answers with status 503: try again later"),
        (200, ["a list"], "does not answer as a Draftree server does"),
    ],
)
def test_other_servers(watching: Watch, code: int, status: Any, message: str) -> None:
    with watched_server() as server:
        server.code, server.status = code, status
        assert watching(server.url, "--once")[0] == 1
        assert message in watching(server.url, "--once")[2]


def test_wrong_options(watching: Watch) -> None:
    url = "http://127.0.0.1:9"
    assert "--interval is 0.0: it must be from 0.1" in watching(url, "--once", "--interval", "0")[2]
    assert "add --once" in watching(url, "--json")[2]
    status, _, err = watching(url)
    assert status == 2
    assert "standard output is not a terminal: add --once" in err


def test_odd_reports_are_shown_without_harm() -> None:
    odd = {
        "models": [{"name": "\x1b[2J[bold]x", "running": -3, "acceptance_rate": "much", "drafts": 4}, None],
        "queue": 7,
    }
    shown = drawn(history_of(odd, {"seconds": None, "sequences": [None, {"num_drafted": 900, "num_accepted": 1e9}]}))
    assert "\\x1b[2J[bold]x" in shown
    assert "\x1b" not in shown
    assert max(map(len, shown.splitlines())) <= 140


def test_a_low_or_narrow_terminal_is_not_exceeded() -> None:
    history = history_of(STATUS, *[ROUND] * 50)
    for _ in range(100):
        history.add_status(STATUS | {"models": [STATUS["models"][0] | {"explain": "word " * 60}] * 2})
    history.trouble = "nothing listens here"
    assert len(drawn(history, width=80, height=24).splitlines()) <= 24
    assert max(map(len, drawn(history, width=60).splitlines())) <= 60


def test_sparklines_are_to_scale() -> None:
    assert sparkline([0, 1, 2, 4, 8], 10) == "▁▂▃▅█"
    assert sparkline([1, 8], 1) == "█"
    assert sparkline([0, 0], 5) == "▁▁"
    assert sparkline([], 5) == ""


def test_history_is_bounded_and_forgets_models() -> None:
    history = history_of(STATUS)
    for _ in range(2 * RATES):
        history.add_status(STATUS)
    assert len(history.rates["tiny"]) == RATES
    history.trouble = "gone"
    assert "gone" in drawn(history)
    history.add_status({"models": []})
    assert history.rates == {}
    assert history.trouble == ""
    assert "no rounds yet" in drawn(history)


def test_attempts_become_rarer() -> None:
    seconds = list(islice(pauses(), 10))
    assert seconds == sorted(seconds)
    assert seconds[0] < seconds[1] <= seconds[-1] == LONGEST_PAUSE_SECONDS


def test_a_live_view_survives_a_restart_and_leaves_the_terminal_as_it_was() -> None:
    with watched_server() as server:
        port, url = server.server_address[1], server.url
        with terminal(["watch", url, "--interval", "0.2"]) as screen:
            before = screen.settings()
            screen.wait_for("123.4")
            screen.wait_for("███░")
            server.ended.set()
            server.shutdown()
            server.server_close()
            screen.wait_for("nothing listens at")
            screen.wait_for("next attempt in")
            with watched_server(port=port) as again:
                again.status = STATUS | {"version": "1.2.4"}
                screen.wait_for("draftree 1.2.4")
                assert "/draftree/rounds" in wait_until_asked(again.asked)
                screen.type(CTRL_C)
                assert screen.end() == 130
            assert screen.screen.count(ENTERS) == screen.screen.count(LEAVES) == 1
            assert screen.screen.rfind("\x1b[?25h") > screen.screen.rfind("\x1b[?25l")
            assert screen.screen.rstrip().endswith("interrupted")
            assert screen.settings() == before


def wait_until_asked(asked: list[str]) -> list[str]:
    deadline = time.monotonic() + 600
    while "/draftree/rounds" not in asked and time.monotonic() < deadline:
        time.sleep(0.05)
    return asked


def test_a_key_that_becomes_wrong_ends_the_view() -> None:
    with watched_server() as server, terminal(["watch", server.url, "--interval", "0.2"]) as screen:
        screen.wait_for("123.4")
        server.key = "new"
        assert screen.end() == 1
        assert "requires an API key" in screen.screen[screen.screen.rfind(LEAVES) :]


def test_a_termination_leaves_the_terminal_as_it_was() -> None:
    with watched_server() as server, terminal(["watch", server.url]) as screen:
        before = screen.settings()
        screen.wait_for("123.4")
        screen.process.terminate()
        assert screen.end() == 143
        assert screen.screen.rstrip().endswith(f"{LEAVES}terminated")
        assert screen.settings() == before


def test_watch_imports_no_torch() -> None:
    code = (
        "import sys; from draftree.cli.main import run\n"
        "assert run(['watch', sys.argv[1], '--once', '--interval', '0.1']) == 0\n"
        "assert not {'torch', 'transformers', 'fastapi', 'numpy'} & set(sys.modules), sorted(sys.modules)\n"
    )
    with watched_server() as server:
        done = subprocess.run([sys.executable, "-c", code, server.url], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
