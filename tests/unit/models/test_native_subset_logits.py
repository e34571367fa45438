"""Searches in C among some tokens of a vocabulary find what torch finds, with the noise of the tokens' ids."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from draftree.core.noise import Noise
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.library import Library, library
from draftree.models.native.logit_buffers import RowsAt
from draftree.models.native.logits import NativeLogits
from draftree.models.native.subset_logits import NativeSubset, NativeSubsetLogits
from draftree.sampling.logits import RowNoise
from draftree.sampling.subset_logits import SubsetLogits, TokenSubset

WIDTH = 3000
NOISES: dict[str, RowNoise] = {
    "none": [None] * 3,
    "one position": [(Noise(5).keys(7), 1.0)] * 3,
    "several": [(Noise(5).keys(7), 0.8), None, (Noise(6).keys(8), 1.0)],
}


@pytest.fixture(scope="module")
def native() -> Library:
    try:
        return library()
    except NativeUnavailableError as error:
        pytest.skip(str(error))


def both(native: Library, columns: int, values: Tensor | None = None) -> tuple[NativeSubsetLogits, SubsetLogits]:
    chance = torch.Generator().manual_seed(columns)
    ids = torch.randperm(WIDTH, generator=chance)[:columns].sort().values
    if values is None:
        values = 2 * torch.randn(3, columns, generator=chance)
    subset = TokenSubset(ids, WIDTH)
    at = RowsAt(values.data_ptr(), values.shape[0], values.stride(0), columns)
    return NativeSubsetLogits(NativeLogits(native, at, values, 2), NativeSubset(subset)), SubsetLogits(values, subset)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("columns", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("count", [1, 5, 64, 70])
def test_ranks_scores_and_totals_are_those_of_torch(native: Library, noise: str, columns: int, count: int) -> None:
    found, wanted = (logits.top(NOISES[noise], count) for logits in both(native, columns))
    assert found.tokens == wanted.tokens
    torch.testing.assert_close(torch.tensor(found.scores), torch.tensor(wanted.scores), atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.tensor(found.totals), torch.tensor(wanted.totals), atol=1e-4, rtol=0)


def test_noise_is_that_of_the_token_and_not_of_the_column(native: Library) -> None:
    found, _ = both(native, 200, torch.zeros(3, 200))
    whole = torch.full((1, WIDTH), -math.inf)
    whole[0, found._subset.tokens.columns] = 0.0
    for seed in range(50):
        noise: RowNoise = [(Noise(seed).keys(3), 1.0)]
        top = found.rows(0, 1).top(noise, 3)
        assert top.tokens[0][0] == found._columns.replaced(whole).picks(noise).tokens[0]


def test_rows_of_the_whole_vocabulary(native: Library) -> None:
    found, wanted = both(native, 100)
    assert (found.width, found.num_rows) == (WIDTH, 3)
    assert torch.equal(found.tensor(), wanted.tensor())
    assert torch.equal(found.rows(1, 3).tensor(), wanted.tensor()[1:])
    assert torch.equal(found.narrowed(12).tensor(), wanted.tensor()[:, :12])
    assert found.picks(NOISES["several"]) == wanted.picks(NOISES["several"])
    assert found.replaced(wanted.tensor()).width == WIDTH


def test_a_row_with_nan_begins_with_its_token(native: Library) -> None:
    values = torch.zeros(3, 100)
    values[1, 40] = math.nan
    found, wanted = (logits.top([None] * 3, 2) for logits in both(native, 100, values))
    assert found.tokens[1][0] == wanted.tokens[1][0]
    assert math.isnan(found.scores[1][0])
    assert math.isnan(found.totals[1])
