from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from draftree.sampling import logits as search
from draftree.sampling.logits import argmax, descending, drop_below, largest, leading, log_total
from draftree.sampling.logits_processors import Filter, MinP, TopK, TopP

INF = math.inf
DTYPES = [torch.float32, torch.float64]


@pytest.fixture(autouse=True, params=["numpy", "torch"])
def searched_by(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test runs with the searches of a CPU and with those of other devices."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(search, "_numpy_reads", lambda values: False)
        yield


def kept(keep: Filter, values: list[float], dtype: torch.dtype = torch.float32) -> list[int]:
    logits = torch.tensor([values], dtype=dtype)
    found = keep.apply(logits.clone())
    assert found.dtype == dtype
    stays = ~found[0].isneginf()
    assert torch.equal(found[0][stays], logits[0][stays])
    return stays.nonzero().flatten().tolist()


def log(probs: list[float]) -> list[float]:
    return [math.log(prob) if prob else -INF for prob in probs]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("keep", "values", "expected"),
    [
        (TopK(1), [1.0, 3.0, 2.0], [1]),
        (TopK(2), [1.0, 3.0, 2.0], [1, 2]),
        (TopK(2), [3.0, 1.0, 3.0, 3.0], [0, 2, 3]),
        (TopK(9), [1.0, 3.0], [0, 1]),
        (TopK(2), [-INF, 3.0, -INF], [1]),
        (TopK(1), [0.0, -1e-45, -1.0], [0]),
        (TopP(0.5), log([0.5, 0.3, 0.2]), [0]),
        (TopP(0.51), log([0.5, 0.3, 0.2]), [0, 1]),
        (TopP(0.79), log([0.2, 0.3, 0.5]), [1, 2]),
        (TopP(0.81), log([0.2, 0.3, 0.5]), [0, 1, 2]),
        (TopP(1e-9), log([0.2, 0.3, 0.5]), [2]),
        (TopP(0.3), [0.0, 0.0, 0.0, -1.0], [0, 1, 2]),
        (TopP(0.999999), log([0.2, 0.0, 0.8]), [0, 2]),
        (MinP(0.5), log([0.51, 0.25, 0.24]), [0]),
        (MinP(0.49), log([0.51, 0.25, 0.24]), [0, 1]),
        (MinP(1.0), [2.0, 2.0, 1.0], [0, 1]),
        (MinP(0.01), [2.0, -INF, 1.0], [0, 2]),
    ],
)
def test_keeps(keep: Filter, values: list[float], expected: list[int], dtype: torch.dtype) -> None:
    assert kept(keep, values, dtype) == expected


@pytest.mark.parametrize("keep", [TopK(2), TopP(0.5), MinP(0.1)], ids=lambda keep: type(keep).__name__)
def test_rows_without_a_token_or_with_nan_stay_so(keep: Filter) -> None:
    assert keep.apply(torch.full((1, 3), -INF)).isneginf().all()
    for place in range(0, 70, 3):
        logits = torch.linspace(-3, 3, 140).reshape(2, 70).clone()
        logits[0, place] = math.nan
        found = keep.apply(logits)
        assert found[0].isnan().any()
        assert found[1, -1] == 3.0


def rows(seed: int, count: int, vocab: int, *, spread: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed), dtype=dtype) * spread
    return logits.masked_fill(torch.rand(count, vocab, generator=torch.Generator().manual_seed(seed + 1)) < 0.05, -INF)


def slow_top_p(row: Tensor, mass: float) -> set[int]:
    probs = torch.softmax(row.double(), -1)
    before = (probs * (row > row[:, None])).sum(-1)
    return set(((before < mass) & (probs > 0)).nonzero().flatten().tolist())


@given(st.integers(0, 10**6), st.integers(1, 60), st.floats(0.01, 0.99), st.floats(0.1, 8), st.sampled_from(DTYPES))
def test_top_p_equals_its_definition(seed: int, vocab: int, mass: float, spread: float, dtype: torch.dtype) -> None:
    logits = rows(seed, 3, vocab, spread=spread, dtype=dtype)
    logits[:, 0] = 1.0
    found = TopP(mass).apply(logits.clone())
    for row, left in zip(logits, found, strict=True):
        assert set((~left.isneginf()).nonzero().flatten().tolist()) == slow_top_p(row, mass)


@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0, 6.0])
@pytest.mark.parametrize("mass", [0.1, 0.5, 0.9, 0.99])
def test_top_p_of_wide_rows_equals_its_definition_in_every_batch(mass: float, spread: float) -> None:
    logits = rows(3, 5, 20_000, spread=spread)
    logits[2] *= 40  # one row of another kind: a few tokens have all the mass
    together = TopP(mass).apply(logits.clone())
    for row in range(len(logits)):
        assert torch.equal(together[row], TopP(mass).apply(logits[row : row + 1].clone())[0])
        values = logits[row].double().sort(descending=True).values
        before = torch.softmax(values, -1).cumsum(-1) - torch.softmax(values, -1)
        # float32 may move the border by tokens whose mass is at the rounding error
        near = (before - mass).abs() < 1e-6
        count = int((~together[row].isneginf()).sum())
        assert abs(count - int((before < mass).sum())) <= int(near.sum())


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 700), st.data())
def test_largest_equals_a_sort(seed: int, count: int, vocab: int, data: st.DataObject) -> None:
    wanted = data.draw(st.integers(1, vocab))
    values = rows(seed, count, vocab)
    if data.draw(st.booleans()):
        values = values.round()  # many equal values
    expected = values.sort(dim=-1, descending=True).values
    assert torch.equal(descending(values), expected)
    assert torch.equal(largest(values, wanted), expected[:, :wanted])


def test_searches_count_nan_as_the_largest() -> None:
    values = torch.tensor([[1.0, math.nan, 3.0] + [0.0] * 50])
    assert largest(values, 2).isnan().tolist() == [[True, False]]
    assert argmax(values) == [1]


def test_argmax_takes_the_first_of_equals() -> None:
    assert argmax(torch.tensor([[1.0, 5.0, 5.0], [-INF, -INF, -INF], [0.0, -0.0, 0.0]])) == [1, 0, 0]


@given(st.integers(0, 10**6), st.sampled_from(DTYPES))
def test_drop_below_equals_masked_fill(seed: int, dtype: torch.dtype) -> None:
    values = rows(seed, 4, 40, dtype=dtype).round(decimals=1)
    least = values[:, 3:4].clone()
    expected = values.masked_fill(values < least, -INF)
    assert np.array_equal(drop_below(values, least).numpy(), expected.numpy())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "columns", "count"), [(1, 5, 1), (3, 5, 5), (2, 40, 3), (4, 1003, 32), (2, 1000, 600)]
)
def test_leading_columns_are_the_largest_in_order(rows: int, columns: int, count: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(columns)
    values = torch.randn(rows, columns, generator=generator, dtype=dtype)
    values[:, 2] = -INF
    found, best = leading(values, count)
    expected = values.sort(dim=-1, descending=True)
    assert torch.equal(best, expected.values[:, :count])
    assert torch.equal(values.gather(-1, found), best)
    assert all(len(set(row)) == count for row in found.tolist())


def test_a_nan_leads() -> None:
    _, best = leading(torch.tensor([[1.0, INF, math.nan, 2.0]]), 2)
    assert best[0].isnan().tolist() == [True, False]


@pytest.mark.parametrize("rows", [1, 4, 11])
def test_log_total_is_of_whole_rows(rows: int) -> None:
    scores = torch.randn(rows, 30, generator=torch.Generator().manual_seed(rows))
    assert torch.allclose(log_total(scores), scores.exp().sum(-1, keepdim=True).log())


@pytest.mark.parametrize("mass", [0.02, 0.5, 0.9999])
def test_top_p_after_top_k_searches_no_wider(mass: float) -> None:
    values = torch.cat((torch.tensor([3.0, 2.0, 2.0]), torch.zeros(700), torch.full((300,), -1.0)))[None]
    kept = TopK(20).apply(values.clone())  # hundreds are equal to the smallest
    assert torch.equal(TopP(mass, 20).apply(kept.clone()), TopP(mass).apply(kept))
