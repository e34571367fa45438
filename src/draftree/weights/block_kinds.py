"""Kinds of blocks of GGUF files that passes in C read as they are."""

from __future__ import annotations

import math
from dataclasses import dataclass

from draftree.weights.gguf_file import GgufFile

__all__ = ["KINDS", "BlockShare", "block_shares", "other_kinds"]

KINDS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
"""Names of the kinds, in the order of the C library."""


@dataclass(frozen=True, slots=True)
class BlockShare:
    """Matrices of a file that have one kind of blocks.

    Attributes:
        kind: name of the kind.
        num_matrices: how many have it.
        num_weights: number of their values.
        num_bytes: size of their blocks.
    """

    kind: str
    num_matrices: int
    num_weights: int
    num_bytes: int


def block_shares(file: GgufFile) -> tuple[BlockShare, ...]:
    """Return the kinds of a file's matrices, that of most weights first.

    Routers are left out: they are never quantized. The matrices of all experts of a layer count as one.
    """
    found: dict[str, BlockShare] = {}
    for name, tensor in file.tensors.items():
        if len(tensor.shape) > 1 and not tensor.is_router:
            kind = file.kind_of(name)
            one = found.get(kind, BlockShare(kind, 0, 0, 0))
            num_weights, num_bytes = one.num_weights + math.prod(tensor.shape), one.num_bytes + tensor.num_bytes
            found[kind] = BlockShare(kind, one.num_matrices + 1, num_weights, num_bytes)
    return tuple(sorted(found.values(), key=lambda one: (-one.num_weights, one.kind)))


def other_kinds(file: GgufFile) -> list[str]:
    """Return the kinds of a file's matrices that passes in C do not read, sorted."""
    return sorted({one.kind for one in block_shares(file)} - set(KINDS))
