"""Triton kernel for the largest entry of each row over its temperature plus noise, in one pass over the logits.

The noise is that of `core.noise`, bit by bit up to the logarithms. Import this module only for tensors on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftree.core.tensors import to_device, to_host
from draftree.core.triton_language import jit, tl, triton

BLOCK = 4096  # columns of a program


class Choice(NamedTuple):
    """The largest score of a row."""

    token: int
    """Its column, the first of equals."""
    score: float
    second: float
    """The next score."""
    total: float
    """Logarithm of the sum of the scores' exponentials; NaN if a score is."""


def choices(
    logits: Tensor, noise: Sequence[tuple[tuple[int, int], float] | None], token_ids: Tensor | None
) -> list[Choice]:
    """Return the choice of each row, in one transfer.

    Args:
        logits: shape (rows, columns), float32, on a GPU.
        noise: for each row the keys of its noise and its temperature; None for the row as it is.
        token_ids: the token of each column, int32, shape (columns,); None if column i is token i.
    """
    plain = ((0, 0), 0.0)
    entries = [plain if entry is None else entry for entry in noise]
    keys = to_device([keys for keys, _ in entries], logits.device, dtype=torch.int32)
    temperatures = to_device([temperature for _, temperature in entries], logits.device, dtype=torch.float32)
    return [Choice(int(token), *scores) for token, *scores in to_host(choose(logits, keys, temperatures, token_ids))]


def choose(logits: Tensor, keys: Tensor, temperatures: Tensor, token_ids: Tensor | None) -> Tensor:
    """Return the fields of the choices, float64 of shape (rows, 4); the host does not wait.

    `keys`: int32, shape (rows, 2). `temperatures`: float32, shape (rows,); 0 for a row as it is.
    """
    assert all(part.is_contiguous() for part in (keys, temperatures)), "rows follow each other"
    rows, columns = logits.shape
    num_blocks = triton.cdiv(columns, BLOCK)
    parts = logits.new_empty((rows, num_blocks, 3))
    columns_of_parts = logits.new_empty((rows, num_blocks), dtype=torch.int32)
    results = logits.new_empty((rows, 4), dtype=torch.float64)
    with torch.cuda.device_of(logits):
        _scan[(rows, num_blocks)](
            logits, keys, temperatures, keys if token_ids is None else token_ids, parts, columns_of_parts,
            logits.stride(0), columns, HAS_IDS=token_ids is not None, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
        _combine[(rows,)](
            parts, columns_of_parts, results, num_blocks, BLOCKS=triton.next_power_of_2(num_blocks), num_warps=4
        )
    return results


@jit
def _fold(x: Any, SHIFT: tl.constexpr) -> Any:
    return x ^ (x >> SHIFT)


@jit
def _gumbel(first: Any, second: Any, token: Any) -> Any:
    """Return the noise of `core.noise.gumbel`; all are uint32."""
    x = _fold(token * 0x9E3779B9, 15) * 0x7FEB352D + first
    x = _fold(_fold(x, 16) * (second | 1), 15) * 0x846CA68B
    minus = ((x >> 1) | 0x80000000).to(tl.int32, bitcast=True).to(tl.float32)
    minus = tl.maximum((minus + 0.5) * 4.656612873077393e-10, -0.99999994)
    # Kahan's log1p: exact for the small uniforms that decide the argmax
    whole = minus + 1
    part = tl.where(whole == 1, 1.0, whole - 1)
    return -tl.log(-tl.where(whole == 1, minus, tl.log(whole) * (minus / part)))


@jit
def _scan(
    logits: Any, keys: Any, temperatures: Any, token_ids: Any, parts: Any, columns_of_parts: Any, stride: Any,
    num_columns: Any, HAS_IDS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write the largest and the next score of a block of columns, the sum of exponentials, and the first's column."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    scores = tl.load(logits + row * stride + column, mask=inside, other=float("-inf"))
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        token = column
        if HAS_IDS:
            token = tl.load(token_ids + column, mask=inside, other=0)
        first = tl.load(keys + 2 * row).to(tl.uint32, bitcast=True)
        second = tl.load(keys + 2 * row + 1).to(tl.uint32, bitcast=True)
        noise = _gumbel(first, second, token.to(tl.uint32, bitcast=True))
        scores = tl.where(inside, scores / temperature + noise, float("-inf"))
    is_nan = scores != scores
    has_nan = tl.max(is_nan.to(tl.int32), axis=0)
    scores = tl.where(is_nan, float("inf"), scores)
    best = tl.max(scores, axis=0)
    place = tl.min(tl.where(scores == best, column, 0x7FFFFFFF), axis=0)
    second_best = tl.max(tl.where(column == place, float("-inf"), scores), axis=0)
    shift = tl.where(best == float("-inf"), 0.0, best)
    total = tl.sum(tl.exp(scores - shift), axis=0)
    total = tl.where(has_nan > 0, float("nan"), total)
    part = row * tl.num_programs(1) + block
    tl.store(parts + 3 * part, best)
    tl.store(parts + 3 * part + 1, second_best)
    tl.store(parts + 3 * part + 2, total)
    tl.store(columns_of_parts + part, place)


@jit
def _combine(parts: Any, columns_of_parts: Any, results: Any, num_blocks: Any, BLOCKS: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    inside = block < num_blocks
    part = row * num_blocks + block
    best_of = tl.load(parts + 3 * part, mask=inside, other=float("-inf"))
    second_of = tl.load(parts + 3 * part + 1, mask=inside, other=float("-inf"))
    total_of = tl.load(parts + 3 * part + 2, mask=inside, other=0.0)
    column_of = tl.load(columns_of_parts + part, mask=inside, other=0x7FFFFFFF)
    best = tl.max(best_of, axis=0)
    column = tl.min(tl.where(best_of == best, column_of, 0x7FFFFFFF), axis=0)
    rest = tl.where(column_of == column, second_of, best_of)
    shift = tl.where(best == float("-inf"), 0.0, best)
    shift_of = tl.where(best_of == float("-inf"), 0.0, best_of)
    total = tl.sum(total_of * tl.exp(shift_of - shift), axis=0)
    tl.store(results + 4 * row, column.to(tl.float64))
    tl.store(results + 4 * row + 1, best.to(tl.float64))
    tl.store(results + 4 * row + 2, tl.max(rest, axis=0).to(tl.float64))
    tl.store(results + 4 * row + 3, (shift + tl.log(total)).to(tl.float64))
