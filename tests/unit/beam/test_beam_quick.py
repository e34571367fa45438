"""Candidates from the top scores of each row equal those of whole rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from draftree.beam import scoring
from draftree.beam.loop import BeamSearch
from draftree.beam.params import BeamSearchParams
from draftree.beam.result import BeamResult
from draftree.models.table import Table, TableLM, hashed

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
