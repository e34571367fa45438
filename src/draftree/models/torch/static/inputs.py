"""Inputs of a static pass: integers in one array, which is copied to the device at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from torch import Tensor

from draftree.core.tree import ancestor_bits
from draftree.models.kv.slots import KVSlot
from draftree.models.torch.static.buckets import WORD_BITS, Bucket

Array = TypeVar("Array", np.ndarray, Tensor)


@dataclass(frozen=True, slots=True)
class Inputs(Generic[Array]):
    """Views of one array of integers.

    Attributes:
        tokens: token of each row; 0 for padding.
        positions: position of each row.
        slots: slot of each row's keys; for padding the first slot of the range.
        places: index of each row's keys in its slot; for padding the scratch index after all others.
        cell_of_row: cell in which each row attends; for padding the cell of the first row.
        requested: rows whose logits are requested, then zeros.
        row_of_cell: row whose query each cell has, shape (slots, nodes); the first row for empty cells.
        prefixes: committed tokens of each slot, 0 without a job.
        cell_positions: position of each cell, shape (slots, nodes).
        tree_positions: positions of each slot's tentative nodes, shape (slots, tree size).
        seen: bits of the tentative nodes that are visible to each cell, shape (slots, nodes, words); at least one.
    """

    tokens: Array
    positions: Array
    slots: Array
    places: Array
    cell_of_row: Array
    requested: Array
    row_of_cell: Array
    prefixes: Array
    cell_positions: Array
    tree_positions: Array
    seen: Array


def inputs_size(bucket: Bucket) -> int:
    """Return the number of integers of a pass of this shape."""
    return sum(int(np.prod(shape)) for shape in _shapes(bucket))


def inputs_of(array: Array, bucket: Bucket) -> Inputs[Array]:
    """Return the views of a flat array of `inputs_size` integers."""
    views, start = [], 0
    for shape in _shapes(bucket):
        end = start + int(np.prod(shape))
        views.append(array[start:end].reshape(shape))
        start = end
    return Inputs(*views)


def _shapes(bucket: Bucket) -> list[tuple[int, ...]]:
    cells = (bucket.num_slots, bucket.nodes)
    trees = (bucket.num_slots, bucket.tree_size)
    return [*[(bucket.rows,)] * 6, cells, (bucket.num_slots,), cells, trees, (*cells, bucket.words)]


def pack_inputs(
    bucket: Bucket,
    slots: Sequence[KVSlot],
    tokens: Sequence[Sequence[int]],
    nodes: Sequence[Sequence[int]],
    *,
    requested: Sequence[int],
    scratch: int,
) -> np.ndarray:
    """Return the integers of one pass.

    Args:
        bucket: shape of the pass.
        slots: slot of each job.
        tokens: tokens of each job.
        nodes: tentative nodes of each job's tokens.
        requested: rows whose logits are requested; rows are in the order of the jobs.
        scratch: index that is never read.
    """
    array = np.zeros(inputs_size(bucket), dtype=np.int64)
    into = inputs_of(array, bucket)
    into.slots[:] = bucket.first_slot
    into.places[:] = scratch
    into.requested[: len(requested)] = requested
    into.seen[:, :, 0] = 1  # softmax over no visible key gives NaN
    row = 0
    for slot, own_tokens, own in zip(slots, tokens, nodes, strict=True):
        line, count, chosen = slot.index - bucket.first_slot, len(own), list(own)
        rows = slice(row, row + count)
        positions = np.array(slot.depths) + (slot.length - 1)
        into.tokens[rows] = own_tokens
        into.positions[rows] = into.cell_positions[line, :count] = positions[chosen]
        into.slots[rows] = slot.index
        into.places[rows] = np.array(chosen) + slot.length
        into.cell_of_row[rows] = np.arange(count) + line * bucket.nodes
        into.row_of_cell[line, :count] = np.arange(row, row + count)
        into.prefixes[line] = slot.length
        into.tree_positions[line, : len(positions)] = positions
        bits = ancestor_bits(slot.parents, num_bytes=bucket.words * WORD_BITS // 8)
        into.seen[line, :count] = bits.view("<i8")[chosen]
        row += count
    into.cell_of_row[row:] = into.cell_of_row[0]
    return array
