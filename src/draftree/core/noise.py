"""Every request's own noise: a hash of (seed, position, token), and of nothing else.

The same numbers come out on every device and in every batch, whatever was drafted, so the target's pick at
a position is a plain function of its logits. Rules that need uniforms or residual draws take them from other
streams: sharing the noise that drafted would bias the law.

Integers are hashed in 32 bits (a multiply and xor-shift finaliser, twice, keyed by row), 31 of which become
a uniform; -log1p(-v) keeps full precision for the small values that decide who wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1
_SIGN32 = 1 << 31


def _mix64(value: int) -> int:
    """splitmix64's finaliser: a bijection of 64-bit integers with good avalanche."""
    value &= _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def _signed32(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value & _SIGN32 else value


@dataclass(frozen=True, slots=True)
class Noise:
    """A request's noise. Immutable; two equal seeds are one noise.

    Args:
        seed: any integer; only its low 64 bits count.
    """

    seed: int

    def stream(self, *salts: int | str) -> Noise:
        """Another noise, independent of this one for all purposes, named by its salts."""
        state = _mix64(self.seed ^ 0x5851F42D4C957F2D)
        for salt in salts:
            if isinstance(salt, str):
                salt = int.from_bytes(salt.encode(), "little")
            while True:
                state = _mix64((state + 0x9E3779B97F4A7C15) ^ (salt & _MASK64))
                salt >>= 64
                if salt in (0, -1):
                    break
        return Noise(state)

    def keys(self, position: int) -> tuple[int, int]:
        """Two signed 32-bit keys for the noise at a position."""
        state = _mix64(_mix64(self.seed) + _mix64(position + 0x632BE59BD9B4E019))
        return _signed32(state), _signed32(state >> 32)

    def uniform(self, position: int, index: int = 0) -> float:
        """A number in (0, 1) with 52 bits, for a position and an index at it."""
        state = _mix64(_mix64(self.seed ^ 0xD1342543DE82EF95) + _mix64((position << 20) ^ index))
        # a 53rd bit would leave no room for the half, and the largest number would round up to 1
        return ((state >> 12) + 0.5) * 2.0**-52

    def gumbel(self, position: int, token_ids: Tensor) -> Tensor:
        """Standard Gumbel noise of some tokens at a position; float32, shape of `token_ids`."""
        return gumbel([self.keys(position)], token_ids.reshape(1, -1)).reshape(token_ids.shape)


def gumbel(keys: Sequence[tuple[int, int]], token_ids: Tensor) -> Tensor:
    """Standard Gumbel noise for rows of tokens.

    Args:
        keys: one pair of keys a row, from `Noise.keys`.
        token_ids: integers of shape (rows or 1, tokens), on the device where the noise is wanted.

    Returns:
        float32 of shape (rows, tokens).
    """
    key = torch.tensor(keys, dtype=torch.int32, device=token_ids.device)
    x = token_ids.to(torch.int32) * -1640531527 + key[:, :1]  # odd: a bijection of tokens
    x ^= (x >> 15) & 0x1FFFF
    x *= 739982445  # 0x2C1B3C6D
    x ^= (x >> 12) & 0xFFFFF
    x += key[:, 1:]
    x ^= (x >> 16) & 0xFFFF
    x *= 2146121005  # 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= -2073254261  # 0x846CA68B
    x ^= (x >> 16) & 0xFFFF
    uniform = (x & 0x7FFFFFFF).to(torch.float32)
    # float32 rounds the largest values up to 1: held below it, or a token could never be chosen
    uniform.add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()
