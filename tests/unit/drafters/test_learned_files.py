"""Files of learned texts: restored after a restart, set aside if damaged, and saved by another thread."""

from __future__ import annotations

import logging
import os
import stat
import threading
from pathlib import Path

import numpy as np
import pytest

from draftree.core.errors import ConfigurationError
from draftree.drafters.learning.files import LearnedFile
from draftree.drafters.learning.settings import Scope
from learned_samples import VOCAB, followers, learner_of, store_in, tables, text


@pytest.mark.parametrize("scope", list(Scope))
def test_a_file_restores_every_table(tmp_path: Path, scope: str) -> None:
    store = store_in(tmp_path, scope)
    learned = learner_of(store)
    learned.add("a", text(1, 2, 3), num_new=2)
    learned.add("b", text(1, 2, 4, 5), num_new=3)
    store.close()
    again = learner_of(store_in(tmp_path, scope))
    for owner in ("a", "b"):
        assert followers(again, owner, [2]) == followers(learned, owner, [2])
    assert again.stats.size == learned.stats.size
    assert again.stats.texts == 0
    again.add("a", text(7, 8), num_new=2)
    assert followers(again, "a", [7]) == {8}


def test_scopes_have_files_of_their_own(tmp_path: Path) -> None:
    store = store_in(tmp_path, "server")
    learner_of(store).add("a", text(1, 2, 3), num_new=2)
    store.close()
    assert learner_of(store_in(tmp_path, "key")).stats.size == 0


def test_a_smaller_memory_keeps_the_latest_texts(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    learned = learner_of(store)
    for token in range(40):
        learned.add("", text(token, token, token), num_new=3)
    store.close()
    smaller = learner_of(store_in(tmp_path), memory=40)
    assert 0 < smaller.stats.size <= 40
    assert followers(smaller, "", [39]) == {39, -1}
    assert followers(smaller, "", [0]) == set()


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"\x10\x00\x00\x00\x00\x00\x00\x00" + b'{"a":1}'])
def test_a_damaged_file_is_set_aside(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    store = store_in(tmp_path)
    learner_of(store).add("", text(1, 2, 3), num_new=2)
    store.close()
    (path,) = tmp_path.glob("*.safetensors")
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        learned = learner_of(store_in(tmp_path))
    assert "is damaged" in caplog.text
    assert learned.stats.size == 0
    (aside,) = tmp_path.glob("*.damaged")
    assert aside.read_bytes() == content
    assert not path.exists()


def test_tokens_outside_of_the_vocabulary_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    identity = tables().identity
    LearnedFile(tmp_path, "suffix", scope="server", identity=identity).write({"": {"tokens": text(1, VOCAB, -1)}})
    store = store_in(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert store.learner("suffix", tables).stats.size == 0
    assert "outside of the vocabulary" in caplog.text


def test_a_renamed_file_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = store_in(tmp_path, "key")
    learner_of(store).add("a", text(1, 2, 3), num_new=2)
    store.close()
    (path,) = tmp_path.glob("*.safetensors")
    path.rename(tmp_path / path.name.replace("-key-", "-server-"))
    with caplog.at_level(logging.WARNING):
        assert learner_of(store_in(tmp_path, "server")).stats.size == 0
    assert "its scope is 'key'" in caplog.text


def test_files_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    store = store_in(tmp_path / "new")
    learner_of(store).add("", text(1, 2, 3), num_new=2)
    store.close()
    (path,) = (tmp_path / "new").glob("*.safetensors")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def test_a_second_engine_cannot_use_the_same_file(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    learner_of(store)
    with pytest.raises(ConfigurationError, match="in use by another engine"):
        learner_of(store_in(tmp_path))
    store.close()
    learner_of(store_in(tmp_path))


def test_a_failed_save_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = store_in(tmp_path)
    learned = learner_of(store)
    learned.add("", text(1, 2, 3), num_new=2)
    store.save()
    (path,) = tmp_path.glob("*.safetensors")
    before = path.read_bytes()

    def fails(*paths: object) -> None:
        raise OSError("no space left")

    learned.add("", text(4, 5, 6), num_new=2)
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fails)
        store.save()
    assert "no space left" in caplog.text
    assert path.read_bytes() == before
    store.save()
    assert path.read_bytes() != before, "the next save tries again"


def test_forgetting_removes_the_file(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    learned = learner_of(store)
    learned.add("", text(1, 2, 3), num_new=2)
    store.save()
    store.forget()
    assert learned.stats.size == 0
    assert not list(tmp_path.glob("*.safetensors"))


def test_saves_of_a_thread_are_whole_while_texts_are_added(tmp_path: Path) -> None:
    store = store_in(tmp_path, every=0.001)
    learned, ended = learner_of(store, memory=5000), threading.Event()
    rng = np.random.default_rng(2)

    def add() -> None:
        for _ in range(2000):
            learned.add("", np.full(10, rng.integers(0, VOCAB), np.int32), num_new=10)
        ended.set()

    writer = threading.Thread(target=add)
    writer.start()
    num_read = 0
    while not ended.is_set():
        store.save()
        (path,) = tmp_path.glob("*.safetensors") or [None]
        num_read += path is not None
    writer.join()
    store.close()
    again = learner_of(store_in(tmp_path), memory=5000)
    table = again.find("")
    assert table is not None
    assert num_read
    texts = np.split(table.tokens, np.flatnonzero(table.tokens == -1) + 1)[:-1]
    assert texts
    assert all(len(one) == 11 and len(set(one[:-1].tolist())) == 1 for one in texts)
