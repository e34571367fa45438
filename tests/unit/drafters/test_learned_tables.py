"""Verified texts that are learned: owners, bounds, specs, and files, which are restored or set aside if damaged."""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from draftree import LLM, SamplingParams
from draftree.core.errors import ConfigurationError
from draftree.drafters.learning.store import LearnedFile, LearningStore, Scope, parse_learning
from draftree.drafters.suffix import MAX_OWNERS, TextTables
from draftree.models.table import TableLM, hashed

VOCAB = 50
ORDERS = (1, 8)


def tables(*, memory: int = 1000, by_owner: bool = False) -> TextTables:
    store = LearningStore(parse_learning("key"), "f00d") if by_owner else None
    return TextTables(ORDERS, memory=memory, vocab_size=VOCAB, store=store)


def text(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def followers(learned: TextTables, owner: str | None, tail: Sequence[int]) -> set[int]:
    table = learned.find(owner)
    if table is None:
        return set()
    return {match.followers[0] for match in table.find(text(*tail), depth=1, limit=8)}


def store_in(folder: Path, scope: str = "server", **options: object) -> LearningStore:
    extra = "".join(f",{key}={value}" for key, value in options.items())
    return LearningStore(parse_learning(f"{scope},folder={folder}{extra}"), "f00d")


def learner_of(store: LearningStore, memory: int = 1000) -> TextTables:
    return store.learner("suffix", lambda: TextTables(ORDERS, memory=memory, vocab_size=VOCAB, store=store))


def stored(folder: Path, scope: str = "server") -> Path:
    """The file of a store that has learned one text."""
    store = store_in(folder, scope)
    learner_of(store).add("a", text(1, 2, 3), num_new=2)
    store.close()
    (path,) = folder.glob("*.safetensors")
    return path


def test_texts_of_all_owners_are_one_table_in_scope_server() -> None:
    learned = tables()
    learned.add("a", text(1, 2, 3), num_new=2)
    assert followers(learned, "b", [2]) == {3}


def test_owners_read_their_own_texts_only_in_scope_key() -> None:
    learned = tables(by_owner=True)
    learned.add("a", text(1, 2, 3), num_new=2)
    learned.add("b", text(1, 2, 4), num_new=2)
    assert followers(learned, "a", [2]) == {3}
    assert followers(learned, "b", [2]) == {4}
    assert followers(learned, "c", [2]) == set()


def test_texts_without_an_owner_are_neither_learned_nor_drafted_with() -> None:
    learned = tables()
    learned.add(None, text(1, 2, 3), num_new=2)
    assert learned.stats.texts == 0
    learned.add("", text(1, 2, 3), num_new=2)
    assert followers(learned, None, [2]) == set()


def test_all_tables_together_are_bounded_and_drop_their_oldest_texts() -> None:
    learned, rng = tables(memory=500, by_owner=True), np.random.default_rng(1)
    for round_number in range(100):
        owner = "few" if round_number % 10 == 0 else "many"
        learned.add(owner, rng.integers(0, VOCAB, 20).astype(np.int32), num_new=20)
        assert learned.stats.size <= 500
    few, many = learned.find("few"), learned.find("many")
    assert few is not None
    assert many is not None
    assert len(few) == 10 * 21, "the largest table makes room"
    assert learned.stats.texts == 100
    assert learned.stats.tokens == 2000


def test_the_number_of_owners_is_bounded() -> None:
    learned = tables(memory=100_000, by_owner=True)
    for owner in range(MAX_OWNERS + 3):
        learned.add(str(owner), text(1, 2, 3), num_new=3)
    assert learned.stats.scopes == MAX_OWNERS
    assert learned.find("2") is None
    assert learned.find("3") is not None


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("everyone", "learn is 'everyone'"),
        ("server,folder", "not of the form"),
        ("server,every=0", "above 0"),
        ("server,rank=9", "0 to 8"),
        ("server,size=3", "unknown option 'size'"),
        ("server,share=2", "at most 1"),
        ("server,rate=-1", "0 to 1"),
        ("server,folder=", "empty"),
    ],
)
def test_wrong_specs_are_refused(spec: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_learning(spec)


def test_learning_needs_a_drafter_that_learns() -> None:
    with pytest.raises(ConfigurationError, match="no drafter learns"):
        LLM(TableLM(hashed(VOCAB, seed=1)), "ngram", learn="server")
    with pytest.raises(ConfigurationError, match="no drafter learns"):
        LLM(TableLM(hashed(VOCAB, seed=1)), "suffix,memory=0", learn="server")


def test_files_need_a_model_with_a_fingerprint(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no fingerprint"):
        LLM(TableLM(hashed(VOCAB, seed=1)), "suffix", learn=f"server,folder={tmp_path}")


def test_an_unusable_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot be created"):
        LLM(TableLM(hashed(VOCAB, seed=1)), "suffix", learn=f"server,folder={tmp_path / 'file' / 'below'}")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_those_of_plain_decoding_and_are_learned_over_restarts(tmp_path: Path, temperature: float) -> None:
    model = TableLM(hashed(VOCAB, seed=1))
    model.fingerprint = "f00d"
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=40)
    prompts = [[1, 2, 3], [4, 5, 6]]
    plain = [one.token_ids for one in LLM(model, "none").generate(prompts, params, progress=False)]
    rounds = []
    for _ in range(2):
        llm = LLM(model, ["suffix", "suffix+ngram"], plan="fixed:8", learn=f"server,folder={tmp_path}")
        found = llm.generate(prompts, params, progress=False)
        assert [one.token_ids for one in found] == plain
        rounds.append(sum(one.stats.rounds for one in found))
        assert llm.learned is not None
        (stats,) = llm.learned.stats
        assert (stats.texts, stats.tokens) == (2, 80)
        llm.learned.close()
    assert rounds[1] < rounds[0] / 2, "stored texts are copied from their first token"


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
    stored(tmp_path)
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
    path = stored(tmp_path)
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
    path = stored(tmp_path, "key")
    path.rename(tmp_path / path.name.replace("-key-", "-server-"))
    with caplog.at_level(logging.WARNING):
        assert learner_of(store_in(tmp_path, "server")).stats.size == 0
    assert "its scope is 'key'" in caplog.text


def test_files_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    path = stored(tmp_path / "new")
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
        while not ended.is_set():
            learned.add("", np.full(10, rng.integers(0, VOCAB), np.int32), num_new=10)

    writer = threading.Thread(target=add)
    writer.start()
    for _ in range(50):
        store.save()
    ended.set()
    writer.join()
    store.close()
    table = learner_of(store_in(tmp_path), memory=5000).find("")
    assert table is not None
    texts = np.split(table.tokens, np.flatnonzero(table.tokens == -1) + 1)[:-1]
    assert texts
    assert all(len(one) == 11 and len(set(one[:-1].tolist())) == 1 for one in texts)
