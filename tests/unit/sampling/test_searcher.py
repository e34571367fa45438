"""Native searches equal torch's, for all kinds of rows."""

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
from draftree.sampling.distributions import DistributionRows, Distributions
from draftree.sampling.history import History
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


def at(logits: Tensor) -> searcher.RowsAt:
    found = searcher.rows_at(logits)
    assert found is not None
    return found


def noisy(logits: Tensor, noise: searcher.RowNoise) -> Tensor:
    scores = logits.clone()
    for row, entry in enumerate(noise):
        if entry is not None:
            scores[row] = scores[row] / entry[1] + gumbel([entry[0]], torch.arange(logits.shape[-1])[None])[0]
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
    noise = [(Noise(seed).keys(row), (0.7, 1.0)[row % 2]) if (row + seed) % 3 else None for row in range(rows)]
    count = min(vocab, 1 + seed % native.max_count)
    tokens, scores, totals = (torch.tensor(found) for found in native.search(at(logits), noise, count, totals=True))
    wanted = noisy(logits, noise)
    _, values = leading(wanted, count)
    torch.testing.assert_close(scores, values, atol=1e-4, rtol=0)
    torch.testing.assert_close(totals[:, None], log_total(wanted), atol=1e-4, rtol=0)
    torch.testing.assert_close(wanted.gather(-1, tokens), scores, atol=1e-4, rtol=0)
    assert all(len(set(row)) == count for row in tokens.tolist()), "no token twice"
    fewer = native.search(at(logits), noise, 1, totals=False)
    assert fewer.tokens == tokens[:, :1].tolist()


def test_of_equals_the_first_comes_first_and_nan_before_all(native: Library) -> None:
    logits = torch.zeros(2, 200)
    logits[1, 150] = math.nan
    found = native.search(at(logits), [None, None], 3, totals=True)
    assert found.tokens[0] == [0, 1, 2]
    assert found.tokens[1][0] == 150
    assert math.isnan(found.scores[1][0])
    assert math.isnan(found.totals[1])
    assert native.search(at(logits), [((1, 2), 1.0), ((3, 4), 0.5)], 1, totals=False).tokens[1] == [150]
    nothing = torch.full((1, 200), -math.inf)
    assert native.search(at(nothing), [((1, 2), 1.0)], 2, totals=True).scores == [[-math.inf, -math.inf]]
    searcher.search_with(native)
    assert searcher.exact_picks(at(nothing), [((1, 2), 1.0)], lambda: nothing)[1] == [False]


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
        picks = searcher.exact_picks(at(logits), [(key, 1.0)], lambda: logits)  # noqa: B023
        assert picks == ([max(exact, key=exact.__getitem__)], [True])


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_distributions_pick_rank_and_judge_alike_with_and_without(native: Library, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=3)
    logits = 3 * torch.randn(4, 700, generator=torch.Generator().manual_seed(1))
    logits[3, 5] = math.nan

    def distributions() -> Distributions:
        controls = build_controls(params, vocab_size=700, eos_ids=(), encode=None, seed=3)
        return Distributions(logits.clone(), [DistributionRows(History([1, 2]), controls, [(), (4,), (4, 5), (6,)])])

    searcher._searchers.clear()
    plain = distributions()
    ranked = plain.ranked([Noise(3)], 5)
    judged = plain.finite()
    searcher.search_with(native)
    fast = distributions()
    assert fast.picks()[:3] == plain.picks()[:3] == argmax(plain.perturbed([Noise(3)]))[:3]
    tokens, shares = distributions().ranked([Noise(3)], 5)
    assert tokens[:3] == ranked[0][:3]
    assert shares[:3] == [pytest.approx(row, abs=1e-4) for row in ranked[1][:3]]
    assert judged == fast.finite() == [False]
    assert fast.finite([[0, 1, 2]]) == [True]


def test_the_owner_of_the_rows_gives_their_address_without_torch(
    native: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    searcher.search_with(native)
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(1))
    controls = build_controls(SamplingParams(temperature=0), vocab_size=300, seed=1)
    rows = [DistributionRows(History([1]), controls, [(), (2,)])]
    asked: list[Tensor] = []
    monkeypatch.setattr("draftree.sampling.distributions.rows_at", lambda found: asked.append(found) or at(found))
    told = Distributions(logits, rows, at=at(logits)).picks()
    assert not asked
    assert told == Distributions(logits, rows).picks() == logits.argmax(-1).tolist()
    assert len(asked) == 1
