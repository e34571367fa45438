"""The loop of beam search: exactness, order, errors, batches, and texts as `generate` writes them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from beam_oracles import all_texts, narrow, search
from draftree import LLM, AsyncLLM, SamplingParams
from draftree.beam import scoring
from draftree.beam.params import BeamSearchParams
from draftree.beam.result import BeamResult
from draftree.beam.search import BeamSearch
from draftree.beam.sequence import SequenceSearch
from draftree.beam.strategies import best
from draftree.core.errors import GenerationError, InvalidRequestError, NonFiniteLogitsError
from draftree.models.table import Table, TableLM, hashed, listed
from text_backends import byte_fallback, metaspace, words

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


PROMPTS = [[1, 2], [2], [1, 1, 2]]


def both_ways(
    monkeypatch: pytest.MonkeyPatch, table: Table, ends: Sequence[int], given: dict[str, Any]
) -> tuple[list[BeamResult], list[BeamResult]]:
    def run() -> list[BeamResult]:
        params = [BeamSearchParams(**given)] * len(PROMPTS)
        return BeamSearch(TableLM(table), end_ids=ends).run(PROMPTS, params)

    counted = []
    real = scoring.quick_columns
    monkeypatch.setattr(scoring, "quick_columns", lambda *args: counted.append(1) or real(*args))
    quick = run()
    assert counted, "the quick way was taken"
    monkeypatch.setattr(scoring, "is_quick", lambda text: False)
    return quick, run()


@pytest.mark.parametrize("vocab", [3, 7, 40])
@pytest.mark.parametrize("ends", [[], [0], [0, 2]])
@pytest.mark.parametrize(
    "given",
    [
        {"beam_width": 1},
        {"beam_width": 4, "num_return_sequences": 4},
        {"beam_width": 9, "num_return_sequences": 9, "early_stopping": "never"},
        {"beam_width": 3, "eos_rule": "any", "early_stopping": "never"},
        {"beam_width": 3, "eos_rule": "walk"},
        {"beam_width": 3, "min_new_tokens": 3},
    ],
    ids=str,
)
def test_both_ways_give_the_same_texts(
    monkeypatch: pytest.MonkeyPatch, vocab: int, ends: list[int], given: dict[str, Any]
) -> None:
    table = hashed(vocab, 5, scale=1.3)
    quick, whole = both_ways(monkeypatch, table, ends, {"max_new_tokens": 8, **given})
    for one, two in zip(quick, whole, strict=True):
        assert [found.tokens for found in one.hypotheses] == [found.tokens for found in two.hypotheses]
        assert [found.score for found in one.hypotheses] == pytest.approx([found.score for found in two.hypotheses])


def test_equal_scores_are_ordered_by_rank_and_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def even(context: tuple[int, ...]) -> Tensor:
        return torch.zeros(6, dtype=torch.float64)

    quick, whole = both_ways(monkeypatch, even, [], {"beam_width": 4, "num_return_sequences": 4, "max_new_tokens": 3})
    assert [found.tokens for found in quick[0].hypotheses] == [found.tokens for found in whole[0].hypotheses]
    assert quick[0].best.tokens == (0, 0, 0)


TABLE = hashed(7, 3, scale=1.5)
WIDTHS = {"beam_width": 3, "num_return_sequences": 3, "max_new_tokens": 8}
PARAMS = BeamSearchParams(**WIDTHS)


def alone(prompt: list[int]) -> BeamResult:
    return search(TableLM(TABLE), prompt, ends=[END], **WIDTHS)


def ended(beams: BeamSearch) -> list[SequenceSearch]:
    found = []
    while not beams.is_idle:
        found += beams.step()
    return found


@pytest.mark.parametrize("late", [1, 3])
def test_a_search_that_joins_later_equals_one_alone(late: int) -> None:
    model = TableLM(TABLE)
    beams = BeamSearch(model, end_ids=[END])
    first = beams.add([1, 3], PARAMS)
    for _ in range(late):
        assert beams.step() == []
    second = beams.add([2], PARAMS)
    assert (beams.num_running, beams.num_waiting) == (1, 1)
    assert set(ended(beams)) == {first, second}
    for text, prompt in ((first, [1, 3]), (second, [2])):
        assert text.result() == alone(prompt)
    assert model.num_open == 0


def test_a_cancelled_search_frees_its_slots_and_disturbs_no_other() -> None:
    model = TableLM(TABLE)
    beams = BeamSearch(model, end_ids=[END])
    kept, dropped = beams.add([1, 3], PARAMS), beams.add([2], PARAMS)
    beams.step()
    beams.cancel(dropped)
    assert model.num_open == 1
    waiting = beams.add([4], PARAMS)
    beams.cancel(waiting)
    assert beams.num_waiting == 0
    assert ended(beams) == [kept]
    beams.cancel(kept)
    assert kept.result() == alone([1, 3])
    assert model.num_open == 0


@pytest.mark.parametrize("error", [NonFiniteLogitsError, GenerationError])
def test_a_search_with_nan_or_without_an_allowed_token_fails_alone(error: type[Exception]) -> None:
    def table(tokens: tuple[int, ...]) -> Tensor:
        return TABLE(tokens) * (math.nan if tokens[-1:] == (6,) else 1.0)

    model = TableLM(table)
    beams = BeamSearch(model, end_ids=[END])
    suppressed = list(range(7)) if error is GenerationError else []
    failing = beams.add([1, 6] if error is NonFiniteLogitsError else [1], BeamSearchParams(suppress_tokens=suppressed))
    other = beams.add([2], BeamSearchParams(beam_width=1, max_new_tokens=1))
    assert set(ended(beams)) == {failing, other}
    assert isinstance(failing.error, error)
    assert other.error is None
    assert len(other.result().hypotheses) == 1
    assert model.num_open == 0


def test_prompts_are_read_in_chunks() -> None:
    model, prompt = TableLM(TABLE), [1, 2, 3, 4, 5, 6, 1, 2, 3]
    beams = BeamSearch(model, end_ids=[END])
    beams.chunk_size = 4
    text = beams.add(prompt, PARAMS)
    for rows in (4, 8, 9):
        assert beams.step() == []
        assert beams.stats.num_rows == rows
    assert ended(beams) == [text]
    assert text.result() == alone(prompt)


def test_wrong_parameters_are_refused_before_anything_runs() -> None:
    beams = BeamSearch(TableLM(TABLE))
    with pytest.raises(InvalidRequestError, match="force_eos"):
        beams.add([1], BeamSearchParams(force_eos="model_score"))
    assert beams.is_idle


GREEDY = BeamSearchParams(beam_width=1, max_new_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("backend", [metaspace, byte_fallback, words])
def test_texts_are_those_of_generate_with_and_without_asyncio(backend: object) -> None:
    tokenizer = backend()  # type: ignore[operator]
    spaces = 0
    for seed in range(8):
        model = TableLM(hashed(len(tokenizer), seed))
        llm, prompt = LLM(model, "none", tokenizer=tokenizer), [5, 7]
        greedy = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))[0]
        found = llm.beam_search([prompt], GREEDY)[0].best
        assert found.tokens == greedy.token_ids
        assert found.text == greedy.text

        async def search() -> str | None:
            async with AsyncLLM(TableLM(hashed(len(tokenizer), seed)), "none", tokenizer=tokenizer) as other:  # noqa: B023
                return (await other.beam_search(prompt, GREEDY)).best.text  # noqa: B023

        assert asyncio.run(search()) == greedy.text
        spaces += greedy.text.startswith(" ")
    assert spaces or backend is not byte_fallback


def test_lookahead_drafts_from_the_texts_of_the_beams() -> None:
    model = TableLM(hashed(5, 3), order=1)
    params = BeamSearchParams(beam_width=2, max_new_tokens=40)
    plain = LLM(model, "none").beam_search([[1, 2]], params)[0]
    drafted = LLM(model, "none").beam_search([[1, 2]], params, draft="lookahead")[0]
    assert drafted.hypotheses == plain.hypotheses
    assert drafted.num_used > 0
