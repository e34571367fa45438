"""Searches that are added, stepped and cancelled one at a time, as a server does."""

from __future__ import annotations

import math

import pytest
from torch import Tensor

from beam_oracles import search
from draftree.beam.loop import BeamSearch
from draftree.beam.params import BeamSearchParams
from draftree.beam.state import TextSearch
from draftree.core.errors import GenerationError, InvalidRequestError, NonFiniteLogitsError
from draftree.models.table import TableLM, hashed

END = 0
TABLE = hashed(7, 3, scale=1.5)
PARAMS = BeamSearchParams(beam_width=3, num_return_sequences=3, max_new_tokens=8)


def ended(beams: BeamSearch) -> list[TextSearch]:
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
        alone = search(TableLM(TABLE), prompt, ends=[END], beam_width=3, num_return_sequences=3, max_new_tokens=8)
        assert text.result() == alone
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
    assert kept.result() == search(
        TableLM(TABLE), [1, 3], ends=[END], beam_width=3, num_return_sequences=3, max_new_tokens=8
    )
    assert model.num_open == 0


def with_nan_after(token: int) -> TableLM:
    def table(tokens: tuple[int, ...]) -> Tensor:
        row = TABLE(tokens)
        return row * math.nan if tokens[-1:] == (token,) else row

    return TableLM(table)


def test_nan_ends_its_own_search_only() -> None:
    model = with_nan_after(6)
    beams = BeamSearch(model, end_ids=[END])
    failing, other = beams.add([1, 6], PARAMS), beams.add([2], BeamSearchParams(beam_width=1, max_new_tokens=1))
    assert set(ended(beams)) == {failing, other}
    assert isinstance(failing.error, NonFiniteLogitsError)
    assert other.error is None
    assert len(other.result().hypotheses) == 1
    assert model.num_open == 0


def test_a_search_without_an_allowed_token_fails_alone() -> None:
    model = TableLM(TABLE)
    beams = BeamSearch(model, end_ids=[END])
    failing, other = beams.add([1], BeamSearchParams(suppress_tokens=list(range(7)))), beams.add([1], PARAMS)
    ended(beams)
    assert isinstance(failing.error, GenerationError)
    assert other.error is None


def test_prompts_are_read_in_chunks() -> None:
    model, prompt = TableLM(TABLE), [1, 2, 3, 4, 5, 6, 1, 2, 3]
    beams = BeamSearch(model, end_ids=[END])
    beams.chunk_size = 4
    text = beams.add(prompt, PARAMS)
    for rows in (4, 8, 9):
        assert beams.step() == []
        assert beams.stats.num_rows == rows
    assert ended(beams) == [text]
    assert text.result() == search(
        TableLM(TABLE), prompt, ends=[END], beam_width=3, num_return_sequences=3, max_new_tokens=8
    )


def test_wrong_parameters_are_refused_before_anything_runs() -> None:
    beams = BeamSearch(TableLM(TABLE))
    with pytest.raises(InvalidRequestError, match="force_eos"):
        beams.add([1], BeamSearchParams(force_eos="model_score"))
    assert beams.is_idle
