"""The synthetic drafter has its configured acceptance and adds no measurable cost."""

from __future__ import annotations

import math

import pytest

from draftree import LLM, SamplingParams
from draftree.core.errors import GenerationError
from draftree.models.table import TableLM, hashed
from draftree.outputs import Completion
from families import VOCAB_SIZE
from spelling import tokenizer

VOCAB = 50
MODEL = TableLM(hashed(VOCAB, seed=3), order=2)
PROMPTS = [[1, 2, 3], [4, 5], [6]]


def write(
    draft: str | None, *, temperature: float = 0.8, max_tokens: int = 150, verify: str = "coupled"
) -> list[Completion]:
    llm = LLM(MODEL, draft, plan=None if draft is None else "fixed", verify=verify)
    return llm.generate(PROMPTS, SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=5))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_all_guesses_are_right_where_all_are_asked_to_be(temperature: float) -> None:
    for done, plain in zip(
        write("synthetic,accept=1,k=4", temperature=temperature), write(None, temperature=temperature), strict=True
    ):
        assert done.token_ids == plain.token_ids
        assert done.stats.accepted_tokens == done.stats.draft_tokens
        assert done.stats.rounds == 30


def test_no_guess_is_right_where_none_is_asked_to_be_and_nothing_is_written_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes: list[int] = []
    run = TableLM.run
    monkeypatch.setattr(TableLM, "run", lambda model, one: passes.append(len(one.jobs)) or run(model, one))
    done = write("synthetic,accept=0,k=4")
    # a guess at random is right now and then, with 50 tokens
    assert sum(one.stats.accepted_tokens for one in done) <= 0.04 * sum(one.stats.draft_tokens for one in done)
    assert len(passes) == max(one.stats.rounds for one in done)


def test_first_guesses_are_right_as_often_as_asked() -> None:
    stats = [one.stats for one in write("synthetic,accept=0.6,k=1")]
    share = sum(s.accepted_tokens for s in stats) / sum(s.draft_tokens for s in stats)
    # some 250 guesses: a standard deviation is 0.03
    assert share == pytest.approx(0.6, abs=0.1)


def test_a_comb_is_right_where_its_first_guess_is_wrong() -> None:
    narrow, wide = ([one.stats for one in write(f"synthetic,accept=0.5,k=3,width={width}")] for width in (1, 3))
    assert sum(s.acceptance_length for s in wide) > 1.15 * sum(s.acceptance_length for s in narrow)


def test_a_request_and_a_seed_give_the_same_guesses() -> None:
    one, again, other = (
        [done.drafted for done in write(f"synthetic,accept=0.5,seed={seed}", max_tokens=60)] for seed in (1, 1, 2)
    )
    assert one == again
    assert one != other


def test_it_follows_a_text_that_is_not_plain_decodings() -> None:
    done = write("synthetic,accept=1,k=4", verify="typical", max_tokens=40)
    assert sum(one.stats.accepted_tokens for one in done) > 60


def test_a_text_that_fails_on_the_way_fails_alone() -> None:
    """Its grammar requires a token that a bias forbids, so none is left."""
    llm = LLM(TableLM(hashed(VOCAB_SIZE, seed=3), order=2), "synthetic,accept=1,k=4", tokenizer=tokenizer())
    b = llm.prompts.encode("b")[0]
    failing = SamplingParams(max_tokens=6, seed=5, regex="b", stop_token_ids=[9], logit_bias={b: -math.inf})
    with pytest.raises(GenerationError, match="left no token") as caught:
        llm.generate([[4, 5, 6], [7]], [failing, SamplingParams(max_tokens=6, seed=5)])
    assert [len(done.token_ids) for done in caught.value.completions] == [6]
    llm.engine.check_integrity()
