from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftree.core import noise as module
from draftree.core.noise import Noise, gumbel

WORD = 1 << 32
SEEDS = st.integers(-(2**63), 2**64 - 1)
POSITIONS = st.integers(0, 10**7)


def high_bits(keys: tuple[int, int], token: int) -> int:
    """The hash in unsigned Python integers: the 31 bits that become the uniform."""
    x = token * 0x9E3779B9 % WORD
    x = (x ^ (x >> 15)) * 0x7FEB352D % WORD
    x = (x + keys[0]) % WORD
    x = (x ^ (x >> 16)) * (keys[1] | 1) % WORD
    x = (x ^ (x >> 15)) * 0x846CA68B % WORD
    return x >> 1


def reference(keys: tuple[int, int], token: int) -> float:
    uniform = (2**31 - high_bits(keys, token) - 0.5) / 2**31
    return -math.log(-math.log1p(-min(uniform, 1 - 2**-24)))


def token_of(keys: tuple[int, int], bits: int) -> int:
    """The token (a signed 32-bit number) whose hash has these 31 bits, and a last bit of 0: `high_bits` undone."""
    x = bits << 1
    x = x * pow(0x846CA68B, -1, WORD) % WORD
    x ^= (x >> 15) ^ (x >> 30)
    x = x * pow(keys[1] | 1, -1, WORD) % WORD
    x ^= x >> 16
    x = (x - keys[0]) * pow(0x7FEB352D, -1, WORD) % WORD
    x ^= (x >> 15) ^ (x >> 30)
    x = x * pow(0x9E3779B9, -1, WORD) % WORD
    return x - WORD if x >= WORD // 2 else x


@given(SEEDS, POSITIONS, st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20))
def test_equals_the_hash_in_plain_integers(seed: int, position: int, tokens: list[int]) -> None:
    noise = Noise(seed)
    expected = [reference(noise.keys(position), token) for token in tokens]
    assert noise.gumbel(position, torch.tensor(tokens)).tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert noise.gumbel_of_few(position, tokens) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("keys", [(0, 0), Noise(3).keys(17), (-(2**31), 2**31 - 1)])
def test_extremes_of_the_hash_give_finite_noise(keys: tuple[int, int]) -> None:
    lowest, highest = token_of(keys, 0), token_of(keys, 2**31 - 1)
    assert high_bits(keys, lowest) == 0
    assert high_bits(keys, highest) == 2**31 - 1
    values = gumbel([keys], torch.tensor([[lowest, highest]]))[0].tolist()
    assert values == pytest.approx([-math.log(24 * math.log(2)), 32 * math.log(2)], rel=1e-6)


@given(
    st.lists(st.tuples(SEEDS, POSITIONS), min_size=1, max_size=9),
    st.integers(1, 300),
    st.integers(0, 2**31 - 400),
    st.randoms(use_true_random=False),
)
def test_same_numbers_for_any_rows_and_tokens_asked_together(
    rows: list[tuple[int, int]], count: int, first: int, random: object
) -> None:
    tokens = torch.arange(first, first + count)
    keys = [Noise(seed).keys(position) for seed, position in rows]
    whole = gumbel(keys, tokens[None])
    assert whole.shape == (len(rows), count)
    chosen = sorted(random.sample(range(count), k=random.randint(1, count)))  # type: ignore[attr-defined]
    for row, (seed, position) in enumerate(rows):
        assert torch.equal(whole[row], Noise(seed).gumbel(position, tokens))
        assert torch.equal(whole[row, chosen], Noise(seed).gumbel(position, tokens[chosen]))
    own = torch.stack([tokens.roll(row) for row in range(len(rows))])
    rolled = torch.stack([whole[row].roll(row) for row in range(len(rows))])
    assert torch.equal(gumbel(keys, own), rolled)


def test_same_numbers_at_the_width_of_a_vocabulary_on_one_thread_and_two() -> None:
    tokens = torch.arange(49_152, dtype=torch.int32)
    keys = [Noise(7).keys(position) for position in range(3)]
    torch.set_num_threads(1)
    one = gumbel(keys, tokens[None])
    torch.set_num_threads(2)
    two = gumbel(keys, tokens[None])
    assert torch.equal(one, two)
    assert torch.equal(one[1:2, 12_345:12_400], gumbel(keys[1:2], tokens[None, 12_345:12_400]))


def test_token_ids_of_any_integer_type_and_shape() -> None:
    noise = Noise(5)
    flat = noise.gumbel(3, torch.arange(12, dtype=torch.int32))
    assert flat.dtype == torch.float32
    assert torch.equal(noise.gumbel(3, torch.arange(12).reshape(3, 4)), flat.reshape(3, 4))


def test_only_the_low_64_bits_of_a_seed_count() -> None:
    assert Noise(-1).keys(4) == Noise(2**64 - 1).keys(4)
    assert Noise(-1).uniform(4) == Noise(2**64 - 1).uniform(4)
    assert Noise(-1).stream("a") == Noise(2**64 - 1).stream("a")


def test_keys_are_signed_32_bit_numbers_and_differ() -> None:
    keys = {Noise(seed).keys(position) for seed in range(50) for position in range(50)}
    assert len(keys) == 2500
    assert all(-(2**31) <= half < 2**31 for pair in keys for half in pair)


def test_streams_are_named_by_all_their_salts() -> None:
    noise = Noise(9)
    salts: list[tuple[int | str, ...]] = [
        (), (0,), ("",), ("0",), (1,), (-1,), (1, 2), (2, 1), (1 + (2 << 64),), ("ab",), ("a", "b"), ("drafter-x",),
        ("drafter-", "x"),
    ]  # fmt: skip
    streams = [noise.stream(*salt) for salt in salts]
    assert len({noise, *streams}) == 1 + len(salts)
    assert streams == [Noise(9).stream(*salt) for salt in salts]
    assert noise.stream(np.int64(3), "x") == noise.stream(3, "x")
    assert noise.stream("a").stream("b") != noise.stream("b").stream("a")


@given(SEEDS, POSITIONS, st.integers(0, 2**20 - 1))
def test_uniforms_lie_inside_the_unit_interval(seed: int, position: int, index: int) -> None:
    assert 0 < Noise(seed).uniform(position, index) < 1


@pytest.mark.parametrize("state", [0, 2**64 - 1])
def test_extreme_uniforms_lie_inside_too(monkeypatch: pytest.MonkeyPatch, state: int) -> None:
    monkeypatch.setattr(module, "_mix64", lambda value: state)
    assert 0 < Noise(1).uniform(0) < 1
