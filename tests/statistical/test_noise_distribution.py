"""The noise follows its distribution and has no pattern across tokens, positions, seeds and streams.

Seeds are fixed, so a test passes always or never. LEVEL is the chance that one of a test's checks would refuse true
noise of other seeds (shared out over its checks). Each test also refuses a twin with a known fault; where the
fault is a small bias the power against it is computed and asserted.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats

from draftree.core.noise import Noise, gumbel

LEVEL = 1e-3
POWER = 0.999
TOKENS = torch.arange(20_000, dtype=torch.int32)


def rows(noises: list[Noise], positions: list[int], tokens: torch.Tensor = TOKENS) -> np.ndarray:
    keys = [noise.keys(position) for noise, position in zip(noises, positions, strict=True)]
    return gumbel(keys, tokens[None]).double().numpy()


def gumbel_p(values: np.ndarray) -> float:
    return stats.kstest(values.ravel(), "gumbel_r").pvalue


def uniforms(values: np.ndarray) -> np.ndarray:
    return stats.gumbel_r.cdf(values)


def pair_p(first: np.ndarray, second: np.ndarray, *, bins: int = 16) -> float:
    """Smaller p-value of correlation and of independence of joint bins, times two; arguments are uniforms."""
    first, second = first.ravel(), second.ravel()
    correlation = float(np.corrcoef(first, second)[0, 1]) * np.sqrt(len(first))
    cells = np.histogram2d(first, second, bins=bins, range=((0, 1), (0, 1)))[0]
    joint = stats.chisquare(cells.ravel()).pvalue
    return min(1.0, 2 * min(2 * stats.norm.sf(abs(correlation)), joint))


def test_each_row_follows_the_gumbel_distribution() -> None:
    seeds, positions = [0, 1, 2, -1, 2**40, 123_456_789], [0, 1, 2, 1000, 10**6]
    found = [gumbel_p(rows([Noise(seed)], [position])) for seed in seeds for position in positions]
    assert min(found) > LEVEL / len(found)
    assert gumbel_p(1.1 * rows([Noise(0)], [0])) < LEVEL / len(found)


def test_one_token_follows_the_gumbel_distribution_over_positions_seeds_and_streams() -> None:
    count, token = 20_000, torch.tensor([11], dtype=torch.int32)
    found = [
        gumbel_p(rows([Noise(3)] * count, list(range(count)), token)),
        gumbel_p(rows([Noise(seed) for seed in range(count)], [5] * count, token)),
        gumbel_p(rows([Noise(3).stream("draft", index) for index in range(count)], [5] * count, token)),
    ]
    assert min(found) > LEVEL / len(found)
    assert gumbel_p(0.05 + rows([Noise(3)] * count, list(range(count)), token)) < LEVEL / len(found)


def test_the_largest_values_follow_their_distribution() -> None:
    # They decide the argmax. The largest of `width` values is Gumbel again, moved by log(width).
    count, width = 4000, 2000
    tops = rows([Noise(8)] * count, list(range(count)), TOKENS[:width]).max(axis=1)
    assert gumbel_p(tops - np.log(width)) > LEVEL
    # the variant: the small uniforms of these values keep 12 bits only
    coarse = (np.floor(-np.expm1(-np.exp(-tops)) * 2**12) + 0.5) / 2**12
    assert gumbel_p(-np.log(-np.log1p(-coarse)) - np.log(width)) < LEVEL


Pairs = Callable[[], tuple[np.ndarray, np.ndarray]]
NOISE = Noise(42)
POSITIONS = list(range(10))


def grid(noise: Noise = NOISE, shift: int = 0) -> np.ndarray:
    return uniforms(rows([noise] * len(POSITIONS), [position + shift for position in POSITIONS]))


def by_token(distance: int) -> tuple[np.ndarray, np.ndarray]:
    values = grid()
    return values[:, :-distance], values[:, distance:]


def uniform_grid(noise: Noise = NOISE, *, shift: int = 0, index: int = 0) -> np.ndarray:
    return np.array([noise.uniform(position + shift, index) for position in range(100_000)])


PAIRS: dict[str, Pairs] = {
    **{f"tokens {distance} apart": lambda distance=distance: by_token(distance) for distance in (1, 2, 3, 64, 4096)},
    **{f"positions {step} apart": lambda step=step: (grid(), grid(shift=step)) for step in (1, 2, 1024)},
    **{
        f"seeds 42 and {seed}": lambda seed=seed: (grid(), grid(Noise(seed)))
        for seed in (43, 44, -42, 42 + 2**32, 42 ^ 2**63)
    },
    "noise and its stream": lambda: (grid(), grid(NOISE.stream("draft", 0))),
    "two streams": lambda: (grid(NOISE.stream("draft", 0)), grid(NOISE.stream("draft", 1))),
    "uniforms of two positions": lambda: (uniform_grid(), uniform_grid(shift=1)),
    "uniforms of two indices": lambda: (uniform_grid(), uniform_grid(index=1)),
    "uniforms of two seeds": lambda: (uniform_grid(), uniform_grid(Noise(43))),
    "uniforms and noise": lambda: (
        uniform_grid()[:20_000],
        uniforms(rows([NOISE] * 20_000, list(range(20_000)), TOKENS[:1])),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_neighbours_are_independent(name: str) -> None:
    first, second = PAIRS[name]()
    assert pair_p(first, second) > LEVEL / len(PAIRS)


def test_tokens_of_close_hashes_are_independent_over_positions() -> None:
    # What the hash makes of a token before the row's keys come in; pairs that differ by one bit there are the hardest.
    undone = [token_before(12345 ^ bit) for bit in (0, *(1 << place for place in range(32)))]
    values = uniforms(rows([NOISE] * 20_000, list(range(20_000)), torch.tensor(undone)))
    found = [pair_p(values[:, 0], values[:, column]) for column in range(1, 33)]
    assert min(found) > LEVEL / len(found)


def token_before(mixed: int) -> int:
    token = mixed * pow(0x7FEB352D, -1, 2**32) % 2**32
    token ^= (token >> 15) ^ (token >> 30)
    token = token * pow(0x9E3779B9, -1, 2**32) % 2**32
    return token - 2**32 if token >= 2**31 else token


def test_dependence_would_be_detected() -> None:
    # twins: one value in twenty shared; and no correlation, but a joint pattern
    values, other = grid(), grid(Noise(43))
    shared = np.where(grid(Noise(44)) < 0.05, values, other)
    assert pair_p(values, shared) < LEVEL / len(PAIRS)
    folded = np.where(values < 0.5, 2 * values, 2 - 2 * values)
    assert pair_p(values, folded) < LEVEL / len(PAIRS)


def test_no_row_is_another_row_shifted() -> None:
    # Two neighbouring values of one row are never adjacent in another (by chance: 1e-7 pairs expected).
    noises = [Noise(seed) for seed in range(20) for _ in range(20)]
    positions = [position for _ in range(20) for position in range(20)]
    bits = gumbel([noise.keys(p) for noise, p in zip(noises, positions, strict=True)], TOKENS[None, :2000])
    words = bits.numpy().view(np.uint32).astype(np.uint64)

    def repeats(table: np.ndarray) -> int:
        pairs = (table[:, :-1] << np.uint64(32)) | table[:, 1:]
        return pairs.size - len(np.unique(pairs))

    # float32 leaves fewer different values than the hash has, so that a few pairs meet by chance
    assert repeats(words) <= 3
    shifted = words.copy()
    shifted[7, 100:] = words[3, :-100]
    assert repeats(shifted) > 1000


def distribution_of_fifty() -> np.ndarray:
    weights = np.arange(1, 51, dtype=np.float64) ** -1.2
    return np.random.default_rng(0).permutation(weights / weights.sum())


def counts_of_picks(distribution: np.ndarray, noise: np.ndarray) -> np.ndarray:
    return np.bincount((np.log(distribution) + noise).argmax(axis=1), minlength=len(distribution))


def power_against(distribution: np.ndarray, twin: np.ndarray, draws: int, level: float) -> float:
    freedom = len(distribution) - 1
    return float(
        stats.ncx2.sf(
            stats.chi2.isf(level, freedom), freedom, draws * ((twin - distribution) ** 2 / distribution).sum()
        )
    )


def test_picks_follow_the_softmax_distribution() -> None:
    distribution, draws = distribution_of_fifty(), 200_000
    # the twin: 6 per cent of the likeliest token's mass moved to the others, a total variation of 0.012
    twin = distribution.copy()
    twin[distribution.argmax()] *= 0.94
    twin /= twin.sum()
    level = LEVEL / 2
    assert np.abs(twin - distribution).sum() / 2 < 0.013
    assert power_against(distribution, twin, draws, level) > POWER
    axes = {
        "positions": ([Noise(1)] * draws, list(range(draws))),
        "seeds": ([Noise(seed) for seed in range(draws)], [77] * draws),
    }
    for noises, positions in axes.values():
        noise = rows(noises, positions, TOKENS[: len(distribution)])
        assert stats.chisquare(counts_of_picks(distribution, noise), distribution * draws).pvalue > level
        assert stats.chisquare(counts_of_picks(twin, noise), distribution * draws).pvalue < level


def test_uniforms_follow_the_uniform_distribution() -> None:
    count = 50_000
    found = [
        np.array([Noise(1).uniform(position) for position in range(count)]),
        np.array([Noise(seed).uniform(9) for seed in range(count)]),
        np.array([Noise(1).uniform(9, index) for index in range(count)]),
        np.array([Noise(1).stream("verify", index).uniform(9) for index in range(count)]),
    ]
    for values in found:
        assert stats.kstest(values, "uniform").pvalue > LEVEL / len(found)
        assert stats.kstest(values**1.03, "uniform").pvalue < LEVEL / len(found)
