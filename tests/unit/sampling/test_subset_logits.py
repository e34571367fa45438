"""Logits of a part of the vocabulary rank like rows of the whole one with -inf elsewhere."""

from __future__ import annotations

import pytest
import torch

from draftree.core.noise import Noise
from draftree.sampling.logits import RowNoise, SubsetLogits, TensorLogits, TokenSubset

WIDTH = 50
IDS = torch.tensor([0, 3, 4, 11, 12, 29, 30, 31, 48])


def both(seed: int, rows: int = 3) -> tuple[SubsetLogits, TensorLogits]:
    values = torch.randn(rows, len(IDS), generator=torch.Generator().manual_seed(seed))
    found = SubsetLogits(values.clone(), TokenSubset(IDS, WIDTH))
    whole = torch.full((rows, WIDTH), -torch.inf)
    whole[:, IDS] = values
    return found, TensorLogits(whole)


NOISES: dict[str, RowNoise] = {
    "none": [None] * 3,
    "one position": [(Noise(5).keys(7), 1.0)] * 3,
    "several": [(Noise(5).keys(7), 0.8), None, (Noise(6).keys(8), 1.0)],
}


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("count", [1, 4, 9])
@pytest.mark.parametrize("overwrites", [False, True])
def test_ranks_scores_and_totals(noise: str, count: int, *, overwrites: bool) -> None:
    found, whole = both(seed=count)
    top, wanted = found.top(NOISES[noise], count, overwrites=overwrites), whole.top(NOISES[noise], count)
    assert top.tokens == wanted.tokens
    torch.testing.assert_close(torch.tensor(top.scores), torch.tensor(wanted.scores))
    torch.testing.assert_close(torch.tensor(top.totals), torch.tensor(wanted.totals))


def test_more_entries_than_columns_are_those_that_there_are() -> None:
    found, _ = both(seed=1)
    assert [len(row) for row in found.top([None] * 3, 20).tokens] == [len(IDS)] * 3


def test_rows_of_the_whole_vocabulary() -> None:
    found, whole = both(seed=2)
    assert (found.width, found.num_rows) == (WIDTH, 3)
    assert torch.equal(found.tensor(), whole.tensor())
    assert torch.equal(found.rows(1, 3).tensor(), whole.tensor()[1:])
    assert torch.equal(found.narrowed(12).tensor(), whole.tensor()[:, :12])
    assert found.picks(NOISES["several"]) == whole.picks(NOISES["several"])
    assert found.replaced(whole.tensor()).width == WIDTH
