"""Kinds of blocks of GGUF files that passes in C read as they are."""

from __future__ import annotations

from draftree.weights.gguf_file import GgufFile

__all__ = ["KINDS", "matrix_kinds"]

KINDS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
"""Names of the kinds, in the order of the C library."""


def matrix_kinds(file: GgufFile) -> set[str]:
    """Return the names of the blocks of a file's matrices, without routers, which are never quantized."""
    matrices = [name for name, tensor in file.tensors.items() if len(tensor.shape) > 1 and not tensor.is_router]
    return {file.kind_of(name) for name in matrices}
