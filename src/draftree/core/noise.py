"""Noise per request: a hash of (seed, position, token) only.

The values are equal on every device, in every batch and for every draft, so the target's sample at a position is a pure
function of its logits. Verifiers that need uniforms or residual draws use separate streams: reusing the noise of the
draft would bias the distribution.

Integers are hashed in 32 bits by multiplications and xor-shifts; one key of the row is added and one multiplied.
31 bits become a uniform, and -log1p(-u) keeps full precision for the small values that decide the argmax.
All operations are in place: at vocabulary width, allocation costs more than arithmetic.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftree.core.tensors import to_device

_MASK64 = (1 << 64) - 1
_MASK32 = (1 << 32) - 1
_SIGN32 = 1 << 31


def _mix64(value: int) -> int:
    """Finaliser of splitmix64: a bijection of 64-bit integers with good avalanche."""
    value &= _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def _signed32(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value & _SIGN32 else value


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise of one request. Immutable; only the low 64 bits of the seed count."""

    seed: int

    def stream(self, *salts: int | str) -> Noise:
        """Return an independent noise stream, named by its salts."""
        name = repr((self.seed & _MASK64, *(salt if isinstance(salt, str) else int(salt) for salt in salts)))
        return Noise(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little"))

    def keys(self, position: int) -> tuple[int, int]:
        """Return the two signed 32-bit keys for a position."""
        state = _mix64(_mix64(self.seed) + _mix64(position + 0x632BE59BD9B4E019))
        return _signed32(state), _signed32(state >> 32)

    def uniform(self, position: int, index: int = 0) -> float:
        """Return a number in (0, 1) with 52 bits, for a position and an index (below 2**20) at it."""
        state = _mix64(_mix64(self.seed ^ 0xD1342543DE82EF95) + _mix64((position << 20) ^ index))
        # a 53rd bit would leave no room for the half, and the largest number would round up to 1
        return ((state >> 12) + 0.5) * 2.0**-52

    def gumbel(self, position: int, token_ids: Tensor) -> Tensor:
        """Return standard Gumbel noise for tokens at a position; float32, shape of `token_ids`."""
        return gumbel([self.keys(position)], token_ids.reshape(1, -1)).reshape(token_ids.shape)

    def gumbel_of_few(self, position: int, tokens: Sequence[int]) -> list[float]:
        """Compute the same for few tokens in Python integers; faster than tensors up to some dozens."""
        return gumbel_of_few(self.keys(position), tokens)


def gumbel_of_few(keys: tuple[int, int], tokens: Sequence[int]) -> list[float]:
    """Return standard Gumbel noise for tokens under one pair of keys, in double precision."""
    first, second = keys
    return [-math.log(-math.log1p(-_uniform_of(first, second | 1, token))) for token in tokens]


def gumbel(keys: Sequence[tuple[int, int]] | Tensor, token_ids: Tensor) -> Tensor:
    """Return standard Gumbel noise for rows of tokens, float32 of shape (rows, tokens), on the ids' device."""
    key = keys if isinstance(keys, Tensor) else to_device(keys, token_ids.device, dtype=torch.int32)
    # the part that depends only on the token is computed once, not per row
    token = token_ids.to(torch.int32) * -1640531527
    _fold(token, torch.empty_like(token), 15)
    token *= 2146121005  # 0x7FEB352D
    x = token + key[:, :1]
    scratch = torch.empty_like(x)
    _fold(x, scratch, 16)
    x.mul_(key[:, 1:] | 1)  # odd: a bijection
    _fold(x, scratch, 15)
    x.mul_(-2073254261)  # 0x846CA68B
    # the 31 high bits, where a product is mixed best, as a negative number: minus the uniform in units of 2**-31
    x.bitwise_right_shift_(1).bitwise_or_(-_SIGN32)
    minus_uniform = scratch.view(torch.float32).copy_(x).add_(0.5).mul_(2.0**-31)
    # float32 rounds the largest uniforms up to 1: clamp below 1, or a token could never be chosen
    return minus_uniform.clamp_(min=2.0**-24 - 1.0).log1p_().neg_().log_().neg_()


def _uniform_of(first: int, odd: int, token: int) -> float:
    """Return one minus the uniform that `gumbel` hashes from these keys (the second made odd) and a token."""
    x = token * 0x9E3779B9 & _MASK32
    x = (x ^ (x >> 15)) * 0x7FEB352D + first & _MASK32
    x = (x ^ (x >> 16)) * odd & _MASK32
    x = (x ^ (x >> 15)) * 0x846CA68B & _MASK32
    return min(((1 << 31) - (x >> 1) - 0.5) * 2.0**-31, 1.0 - 2.0**-24)


def _fold(x: Tensor, scratch: Tensor, shift: int) -> None:
    """Compute `x ^= x >> shift` on unsigned integers in place; a bijection."""
    torch.bitwise_right_shift(x, shift, out=scratch)
    x.bitwise_xor_(scratch.bitwise_and_((1 << (32 - shift)) - 1))
