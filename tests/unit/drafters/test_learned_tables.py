"""Tables of verified texts: owners, bounds, and specs of `learn`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from draftree import LLM, SamplingParams
from draftree.core.errors import ConfigurationError
from draftree.drafters.learning.settings import parse_learning
from draftree.drafters.learning.tables import MAX_OWNERS
from draftree.models.table import TableLM, hashed
from learned_samples import VOCAB, followers, tables, text


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
    plain = [one.token_ids for one in LLM(model).generate(prompts, params, progress=False)]
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
