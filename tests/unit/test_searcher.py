"""Searches in C find what torch finds, whatever a row holds."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftree.core.noise import Noise, gumbel, gumbel_of_few
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.library import Library, library
from draftree.sampling import searcher
from draftree.sampling.controls import build_controls
from draftree.sampling.history import History
from draftree.sampling.laws import LawRows, Laws
from draftree.sampling.params import SamplingParams
from draftree.sampling.search import argmax, leading, log_total


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = list(searcher._searchers)
    yield
    searcher._searchers[:] = before


@pytest.fixture(scope="module")
def native() -> Library:
    try:
        return library()
    except NativeUnavailableError as error:
        pytest.skip(str(error))


def noisy(logits: Tensor, keys: searcher.NoiseKeys) -> Tensor:
    scores = logits.clone()
    for row, key in enumerate(keys):
        if key is not None:
            scores[row] += gumbel([key], torch.arange(logits.shape[-1])[None])[0]
    return scores


@settings(max_examples=60, deadline=None)
@given(
    vocab=st.sampled_from([1, 5, 16, 63, 64, 65, 1000, 5003]),
    rows=st.integers(1, 6),
    scale=st.floats(0.0, 8.0),
    dropped=st.sampled_from([0.0, 0.5, 0.99]),
    seed=st.integers(0, 1000),
)
def test_ranks_scores_and_sums_are_those_of_torch(
    native: Library, vocab: int, rows: int, scale: float, dropped: float, seed: int
) -> None:
    chance = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(rows, vocab, generator=chance)
    logits[torch.rand(rows, vocab, generator=chance) < dropped] = -math.inf
    logits[:, seed % vocab] = 0.5
    keys = [Noise(seed).keys(row) if (row + seed) % 3 else None for row in range(rows)]
    count = min(vocab, 1 + seed % native.max_count)
    tokens, scores, totals = native.search(logits, keys, count, totals=True)
    wanted = noisy(logits, keys)
    _, values = leading(wanted, count)
    torch.testing.assert_close(scores, values, atol=1e-4, rtol=0)
    torch.testing.assert_close(totals[:, None], log_total(wanted), atol=1e-4, rtol=0)
    torch.testing.assert_close(wanted.gather(-1, tokens), scores, atol=1e-4, rtol=0)
    assert all(len(set(row)) == count for row in tokens.tolist()), "no token twice"
    fewer = native.search(logits, keys, 1, totals=False)
    assert fewer[0][:, 0].tolist() == tokens[:, 0].tolist()


def test_of_equals_the_first_comes_first_and_nan_before_all(native: Library) -> None:
    logits = torch.zeros(2, 200)
    logits[1, 150] = math.nan
    tokens, scores, totals = native.search(logits, [None, None], 3, totals=True)
    assert tokens[0].tolist() == [0, 1, 2]
    assert tokens[1, 0] == 150
    assert scores[1, 0].isnan()
    assert totals[1].isnan()
    assert native.search(logits, [(1, 2), (3, 4)], 1, totals=False)[0][1, 0] == 150
    nothing = torch.full((1, 200), -math.inf)
    assert native.search(nothing, [(1, 2)], 2, totals=True)[1].tolist() == [[-math.inf, -math.inf]]


def test_picks_are_decided_in_double_precision(native: Library) -> None:
    """Two tokens are given logits that make their scores equal but for the last bits."""
    key = Noise(7).keys(100)
    searcher.search_with(native)
    first, second = gumbel_of_few(key, [10, 700])
    for nudge in (-4e-6, 4e-6):
        logits = torch.full((1, 1000), -40.0)
        logits[0, 10] = 0.0
        logits[0, 700] = first - second + nudge
        exact = {token: float(logits[0, token]) + noise for token, noise in ((10, first), (700, second))}
        assert searcher.exact_picks(logits, [key]) == [max(exact, key=exact.__getitem__)]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_laws_pick_rank_and_judge_alike_with_and_without(native: Library, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=3)
    logits = 3 * torch.randn(4, 700, generator=torch.Generator().manual_seed(1))
    logits[3, 5] = math.nan

    def laws() -> Laws:
        controls = build_controls(params, vocab_size=700, eos_ids=(), encode=None, seed=3)
        return Laws(logits.clone(), [LawRows(History([1, 2]), controls, [(), (4,), (4, 5), (6,)])])

    searcher._searchers.clear()
    plain = laws()
    ranked = plain.ranked([Noise(3)], 5)
    judged = plain.finite()
    searcher.search_with(native)
    fast = laws()
    assert fast.picks()[:3] == plain.picks()[:3] == argmax(plain.perturbed([Noise(3)]))[:3]
    tokens, shares = fast.ranked([Noise(3)], 5)
    assert tokens[:3].tolist() == ranked[0][:3].tolist()
    torch.testing.assert_close(shares[:3], ranked[1][:3], atol=1e-4, rtol=0)
    assert judged == fast.finite() == [False]
    assert fast.finite([[0, 1, 2]]) == [True]
