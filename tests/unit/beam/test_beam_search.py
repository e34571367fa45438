"""Beam search on table models: against every text, against plain loops, and its bookkeeping."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from beam_oracles import all_texts, narrow, rescored, search
from draftree.beam.candidates import best
from draftree.beam.loop import BeamSearch
from draftree.beam.params import BeamSearchParams
from draftree.core.errors import GenerationError, InvalidRequestError, NonFiniteLogitsError
from draftree.models.table import TableLM, hashed, listed

PROMPT = [1, 3]
END = 0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("vocab", [3, 4])
def test_wide_beam_finds_the_best_of_all_texts(seed: int, vocab: int) -> None:
    table, limit = hashed(vocab, seed, scale=2.0), 4
    expected = all_texts(table, [1, 2], ends=[END], limit=limit)
    width = vocab ** (limit - 1)
    result = search(
        TableLM(table),
        [1, 2],
        ends=[END],
        beam_width=width,
        num_return_sequences=5,
        max_new_tokens=limit,
        length_penalty=0.0,
        early_stopping="never",
    )
    assert [found.tokens for found in result.hypotheses] == [tokens for tokens, _ in expected[:5]]
    assert [found.score for found in result.hypotheses] == pytest.approx([total for _, total in expected[:5]])


@pytest.mark.parametrize("width", [1, 2, 3, 5])
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("rule", ["fcfs", "never"])
@pytest.mark.parametrize("ends", [[END], [END, 2]])
def test_narrow_beam_equals_plain_loops(width: int, penalty: float, rule: str, ends: list[int]) -> None:
    for seed in range(4):
        table = hashed(7, seed, scale=1.5)
        expected = narrow(table, PROMPT, width, ends=ends, limit=9, penalty=penalty, rule=rule)
        for model in (TableLM(table), TableLM(table, supports_trees=False)):
            result = search(
                model,
                PROMPT,
                ends=ends,
                beam_width=width,
                num_return_sequences=width,
                max_new_tokens=9,
                length_penalty=penalty,
                early_stopping=rule,
            )
            assert [found.tokens for found in result.hypotheses] == [tokens for tokens, _ in expected]
            assert [found.score for found in result.hypotheses] == pytest.approx([score for _, score in expected])


def test_score_is_the_rescored_text_over_its_length() -> None:
    table = hashed(9, 3, scale=1.5)
    result = search(TableLM(table), PROMPT, ends=[END], beam_width=4, num_return_sequences=4, max_new_tokens=12)
    assert len({found.tokens for found in result.hypotheses}) == 4
    for found in result.hypotheses:
        assert found.cumulative_logprob == pytest.approx(rescored(table, PROMPT, found.tokens))
        assert math.fsum(found.token_logprobs) == pytest.approx(found.cumulative_logprob)
        assert found.score == pytest.approx(found.cumulative_logprob / len(found.tokens))
        assert found.finish_reason == ("stop" if found.tokens[-1] == END else "length")
    scores = [found.score for found in result.hypotheses]
    assert scores == sorted(scores, reverse=True)


def test_width_one_is_greedy() -> None:
    table = hashed(9, 5, scale=1.5)
    context = list(PROMPT)
    for _ in range(10):
        context.append(int(table(tuple(context)).argmax()))
    assert search(TableLM(table), PROMPT, beam_width=1, max_new_tokens=10).best.tokens == tuple(context[2:])


def test_batch_mates_do_not_matter_and_have_their_own_parameters() -> None:
    table = hashed(8, 2, scale=1.5)
    prompts = [[1], [2, 3, 4, 5], [6, 7], [1, 1, 1], [3, 2]]
    params = [
        BeamSearchParams(
            beam_width=width, num_return_sequences=1, max_new_tokens=limit, length_penalty=penalty, temperature=warm
        )
        for width, limit, penalty, warm in [(1, 9, 0, 1), (3, 5, 1, 0.7), (5, 12, 2, 1), (2, 1, 1, 1), (4, 7, 0.5, 2)]
    ]
    alone = [
        BeamSearch(TableLM(table), end_ids=[END]).run([one], [two])[0] for one, two in zip(prompts, params, strict=True)
    ]
    for batch_size in (2, 5):
        model = TableLM(table)
        together = BeamSearch(model, end_ids=[END], batch_size=batch_size).run(prompts, params)
        assert together == alone
        assert model.num_open == 0


def test_equal_scores_are_ordered_by_parent_and_token() -> None:
    uniform = TableLM(listed({}, [0.2] * 5))
    result = search(uniform, [1], beam_width=3, num_return_sequences=3, max_new_tokens=2, length_penalty=0.0)
    assert [found.tokens for found in result.hypotheses] == [(0, 0), (0, 1), (0, 2)]


@pytest.mark.parametrize("count", [1, 3, 6, 10])
def test_best_is_stable_on_both_ways(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    for _ in range(50):
        values = torch.randint(-3, 3, (10,), generator=generator).double()
        values[values == -3] = -math.inf
        expected = sorted(range(10), key=lambda place: (-float(values[place]), place))[:count]
        assert best(values, count).tolist() == expected
        distinct = torch.rand(10, generator=generator)
        assert best(distinct, count).tolist() == distinct.argsort(descending=True)[:count].tolist()


def test_fewer_continuations_than_candidates() -> None:
    table = listed({}, [0.5, 0.3, 0.2])
    result = search(TableLM(table), [1], ends=[END], beam_width=8, num_return_sequences=8, max_new_tokens=2)
    assert {found.tokens for found in result.hypotheses} == {(0,), (1, 0), (2, 0), (1, 1), (1, 2), (2, 1), (2, 2)}


def test_end_at_the_first_step() -> None:
    table = listed({}, [0.98, 0.01, 0.01])
    result = search(TableLM(table), [1], ends=[END], beam_width=1, max_new_tokens=5)
    assert result.best.tokens == (0,)
    assert result.best.finish_reason == "stop"
    longer = search(TableLM(table), [1], ends=[END], beam_width=1, max_new_tokens=5, min_new_tokens=2)
    assert longer.best.tokens == (1, 1, 0)


def test_nan_is_an_error_and_closes_all_slots() -> None:
    def table(context: Sequence[int]) -> torch.Tensor:
        row = torch.zeros(4, dtype=torch.float64)
        return row * math.nan if len(context) > 3 else row

    model = TableLM(table)
    with pytest.raises(NonFiniteLogitsError, match="NaN"):
        search(model, [1], beam_width=2, max_new_tokens=9)
    assert model.num_open == 0


def test_nothing_allowed_at_the_beginning_is_an_error() -> None:
    model = TableLM(hashed(3, 0))
    with pytest.raises(GenerationError, match="no token is allowed"):
        search(model, [1], beam_width=2, suppress_tokens=[0, 1, 2])
    assert model.num_open == 0


def test_prompt_that_fills_the_context_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="no room") as caught:
        search(TableLM(hashed(4, 0), max_length=4), [1, 2, 3, 1, 2])
    assert caught.value.param == "prompt"


def test_context_limits_the_length() -> None:
    result = search(TableLM(hashed(4, 0), max_length=6), [1, 2, 3], beam_width=2)
    assert len(result.best.tokens) == 4
    assert result.best.finish_reason == "length"
