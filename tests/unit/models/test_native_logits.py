"""Native searches find what torch finds, in all tokens of a vocabulary or in some, whatever a row holds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftree.core.noise import Noise, gumbel, gumbel_of_few
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.library import Library, RowsAt, library
from draftree.models.native.logits import NativeLogits, NativeSubset, NativeSubsetLogits
from draftree.sampling.controls import build_controls
from draftree.sampling.distributions import DistributionRows, Distributions
from draftree.sampling.history import History
from draftree.sampling.logits import (
    Logits,
    RowNoise,
    SubsetLogits,
    TensorLogits,
    TokenSubset,
    argmax,
    leading,
    log_total,
)
from draftree.sampling.params import SamplingParams

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


def in_c(native: Library, logits: Tensor) -> NativeLogits:
    at = RowsAt(logits.data_ptr(), logits.shape[0], logits.stride(0), logits.shape[1])
    return NativeLogits(native, at, logits, 2)


def noisy(logits: Tensor, noise: RowNoise) -> Tensor:
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
    tokens, scores, totals = (torch.tensor(found) for found in in_c(native, logits).top(noise, count))
    wanted = noisy(logits, noise)
    _, values = leading(wanted, count)
    torch.testing.assert_close(scores, values, atol=1e-4, rtol=0)
    torch.testing.assert_close(totals[:, None], log_total(wanted), atol=1e-4, rtol=0)
    torch.testing.assert_close(wanted.gather(-1, tokens), scores, atol=1e-4, rtol=0)
    assert all(len(set(row)) == count for row in tokens.tolist()), "no token twice"
    fewer = in_c(native, logits).top(noise, 1)
    assert fewer.tokens == tokens[:, :1].tolist()


def test_of_equals_the_first_comes_first_and_nan_before_all(native: Library) -> None:
    logits = torch.zeros(2, 200)
    logits[1, 150] = math.nan
    found = in_c(native, logits).top([None, None], 3)
    assert found.tokens[0] == [0, 1, 2]
    assert found.tokens[1][0] == 150
    assert math.isnan(found.scores[1][0])
    assert math.isnan(found.totals[1])
    noise = [((1, 2), 1.0), ((3, 4), 0.5)]
    assert in_c(native, logits).picks(noise).tokens[1] == TensorLogits(logits).picks(noise).tokens[1] == 150
    assert in_c(native, logits).picks(noise).is_sound == TensorLogits(logits).picks(noise).is_sound == [True, False]
    nothing = torch.full((1, 200), -math.inf)
    assert in_c(native, nothing).top(noise[:1], 2).scores == [[-math.inf, -math.inf]]
    for kind in (in_c(native, nothing), TensorLogits(nothing)):
        assert kind.picks(noise[:1]).is_sound == kind.picks([None]).is_sound == [False]


def close_rows(key: tuple[int, int]) -> list[tuple[Tensor, int]]:
    """Rows of two tokens whose scores are equal but for the last bits, and their picks."""
    rows = []
    first, second = gumbel_of_few(key, [10, 700])
    for nudge in (-4e-6, 4e-6):
        logits = torch.full((1, 1000), -40.0)
        logits[0, 10] = 0.0
        logits[0, 700] = first - second + nudge
        exact = {token: float(logits[0, token]) + noise for token, noise in ((10, first), (700, second))}
        rows.append((logits, max(exact, key=exact.__getitem__)))
    return rows


def test_picks_are_decided_in_double_precision_in_c_and_by_torch(native: Library) -> None:
    picks = set()
    for position in range(40):
        key = Noise(7).keys(position)
        for logits, wanted in close_rows(key):
            picks.add(wanted)
            for kind in (in_c(native, logits), TensorLogits(logits), TensorLogits(logits.double())):
                assert kind.picks([(key, 1.0)]) == ([wanted], [True])
    assert picks == {10, 700}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_distributions_pick_and_rank_alike_in_c_and_by_torch(native: Library, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=3)
    logits = 3 * torch.randn(4, 700, generator=torch.Generator().manual_seed(1))
    logits[3, 5] = math.nan

    def distributions(rows: Logits) -> Distributions:
        controls = build_controls(params, vocab_size=700, eos_ids=(), encode=None, seed=3)
        return Distributions(rows, [DistributionRows(History([1, 2]), controls, [(), (4,), (4, 5), (6,)])])

    plain, fast = distributions(TensorLogits(logits)), distributions(in_c(native, logits))
    assert plain.finite() == fast.finite() == [False]
    plain, fast = distributions(TensorLogits(logits)), distributions(in_c(native, logits))
    ranked = plain.ranked([Noise(3)], 5)
    tokens, shares = fast.ranked([Noise(3)], 5)
    assert fast.picks()[:3] == plain.picks()[:3] == argmax(plain.perturbed([Noise(3)]))[:3]
    assert tokens[:3] == ranked[0][:3]
    assert shares[:3] == [pytest.approx(row, abs=1e-4) for row in ranked[1][:3]]
    assert plain.finite() == fast.finite() == [False]
    assert fast.finite([[0, 1, 2]]) == [True]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_picks_and_ranks_need_no_tensor(native: Library, monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(1))
    controls = build_controls(SamplingParams(temperature=temperature, seed=1), vocab_size=300, seed=1)
    rows = [DistributionRows(History([1]), controls, [(), (2,)])]
    wanted = Distributions(TensorLogits(logits), rows).picks()
    fast = in_c(native, logits)
    tensors: list[int] = []
    monkeypatch.setattr(NativeLogits, "tensor", lambda own: tensors.append(1))
    with Distributions(fast, rows) as distributions:
        assert distributions.picks() == wanted
        assert distributions.finite() == [True]
        assert [row[0] for row in distributions.ranked([Noise(1)], 3)[0]] == wanted
    assert not tensors


def test_more_ranks_than_c_finds_are_found_by_torch(native: Library) -> None:
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(1))
    count = native.max_count + 1
    assert in_c(native, logits).top([None, None], count).tokens == logits.topk(count).indices.tolist()


def test_what_c_does_not_read_is_searched_by_torch(native: Library) -> None:
    rows = in_c(native, torch.zeros(1, 8))
    assert isinstance(rows.replaced(torch.zeros(1, 8)), NativeLogits)
    assert isinstance(rows.replaced(torch.zeros(1, 8, dtype=torch.float64)), TensorLogits)
    assert isinstance(rows.replaced(torch.zeros(8, 2).T), TensorLogits)


@pytest.mark.parametrize("build", ["in C", "replaced", "tensor"])
def test_rows_and_columns_are_views(native: Library, build: str) -> None:
    values = torch.arange(60.0).view(5, 12)[1:, :10]
    whole: Logits = TensorLogits(values) if build == "tensor" else in_c(native, values)
    if build == "replaced":
        whole = in_c(native, torch.zeros(1, 3)).replaced(values)
    part = whole.rows(1, 3).narrowed(4)
    assert (part.num_rows, part.width) == (2, 4)
    assert part.tensor().tolist() == values[1:3, :4].tolist()
    assert part.rows(1, 2).tensor().tolist() == values[2:3, :4].tolist()
    assert part.picks([None, None]).tokens == [3, 3]
    part.tensor()[0, 1] = 1e9
    assert whole.picks([None] * 4).tokens[1] == 1
    assert whole.rows(2, 2).tensor().shape == (0, 10)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_bans_are_in_the_memory_of_the_pass_during_a_search_only(native: Library, temperature: float) -> None:
    vocab = 300
    params = SamplingParams(temperature=temperature, no_repeat_ngram_size=1)
    rows = DistributionRows(History(range(200)), build_controls(params, vocab_size=vocab, seed=5), [[], [200, 201]])
    num_changed = 0
    for seed in range(20):
        logits = 3 * torch.randn(2, vocab, generator=torch.Generator().manual_seed(seed))
        before = logits.clone()
        distributions = Distributions(in_c(native, logits), [rows])
        picks = distributions.picks()
        tokens, _ = distributions.ranked([Noise(2)], 3)
        assert torch.equal(logits, before)
        assert picks == Distributions(TensorLogits(logits), [rows]).picks()
        assert tokens == Distributions(TensorLogits(logits), [rows]).ranked([Noise(2)], 3)[0]
        assert min(picks[0], *tokens[0]) >= 200
        assert min(picks[1], *tokens[1]) >= 202
        num_changed += before.argmax(-1).tolist() != picks
    assert num_changed > 10


def both(native: Library, columns: int, values: Tensor | None = None) -> tuple[NativeSubsetLogits, SubsetLogits]:
    chance = torch.Generator().manual_seed(columns)
    ids = torch.randperm(WIDTH, generator=chance)[:columns].sort().values
    if values is None:
        values = 2 * torch.randn(3, columns, generator=chance)
    subset = TokenSubset(ids, WIDTH)
    return NativeSubsetLogits(in_c(native, values), NativeSubset(subset)), SubsetLogits(values, subset)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("columns", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("count", [1, 5, 64, 70])
def test_ranks_in_a_subset_are_those_of_torch(native: Library, noise: str, columns: int, count: int) -> None:
    found, wanted = (logits.top(NOISES[noise], count) for logits in both(native, columns))
    assert found.tokens == wanted.tokens
    torch.testing.assert_close(torch.tensor(found.scores), torch.tensor(wanted.scores), atol=1e-4, rtol=0)
    torch.testing.assert_close(torch.tensor(found.totals), torch.tensor(wanted.totals), atol=1e-4, rtol=0)


def test_noise_in_a_subset_is_that_of_the_token_and_not_of_the_column(native: Library) -> None:
    found, _ = both(native, 200, torch.zeros(3, 200))
    whole = torch.full((1, WIDTH), -math.inf)
    whole[0, found._subset.tokens.columns] = 0.0
    for seed in range(50):
        noise: RowNoise = [(Noise(seed).keys(3), 1.0)]
        top = found.rows(0, 1).top(noise, 3)
        assert top.tokens[0][0] == found._columns.replaced(whole).picks(noise).tokens[0]


def test_rows_of_a_subset_are_rows_of_the_whole_vocabulary(native: Library) -> None:
    found, wanted = both(native, 100)
    assert (found.width, found.num_rows) == (WIDTH, 3)
    assert torch.equal(found.tensor(), wanted.tensor())
    assert torch.equal(found.rows(1, 3).tensor(), wanted.tensor()[1:])
    assert torch.equal(found.narrowed(12).tensor(), wanted.tensor()[:, :12])
    assert found.picks(NOISES["several"]) == wanted.picks(NOISES["several"])
    assert found.replaced(wanted.tensor()).width == WIDTH


def test_a_row_of_a_subset_with_nan_begins_with_its_token(native: Library) -> None:
    values = torch.zeros(3, 100)
    values[1, 40] = math.nan
    found, wanted = (logits.top([None] * 3, 2) for logits in both(native, 100, values))
    assert found.tokens[1][0] == wanted.tokens[1][0]
    assert math.isnan(found.scores[1][0])
    assert math.isnan(found.totals[1])
