"""The rows of a pass as the C pass reads them: where each row's keys lie, in the order of their positions."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from draftree.core.tree import ROOT
from draftree.models.slots import KVSlot


@dataclass(frozen=True, slots=True)
class Rows:
    """All of 64 bits, one entry a row where not said otherwise.

    Attributes:
        tokens: token ids.
        slot: index of the row's slot.
        place: where in the slot its keys and values go.
        position: its position in the text.
        identical: keys of positions before this one lie at the place of the same number.
        list_start: where the places of the row's further keys begin in `list`.
        list: places, by position, of all rows.
        chunks: first rows of runs of rows of one slot, and the number of rows behind them.
    """

    tokens: array[int]
    slot: array[int]
    place: array[int]
    position: array[int]
    identical: array[int]
    list_start: array[int]
    list: array[int]
    chunks: array[int]


def plan_rows(
    slots: Sequence[KVSlot], tokens: Sequence[Sequence[int]], nodes: Sequence[Sequence[int]], *, rows_of_chunk: int
) -> Rows:
    """Rows of a pass.

    Args:
        slots: a slot a job; the nodes are already noted in them.
        tokens: for each job its rows' tokens.
        nodes: which tentative nodes these rows are, ascending.
        rows_of_chunk: rows in a chunk at most.
    """
    columns: list[list[int]] = [[], [], [], [], []]
    slot_column, place_column, position_column, identical_column, start_column = columns
    places: list[int] = []
    chunks = [0]
    for slot, chosen in zip(slots, nodes, strict=True):
        length, wanted = slot.length, set(chosen)
        chain = _chain_length(slot.parents)
        lists: dict[int, list[int]] = {}
        for node in range(slot.num_tentative):
            if node >= chain:
                parent = slot.parents[node]
                above = lists.get(parent, [])
                lists[node] = [*above, length + node]
            if node not in wanted:
                continue
            position = length - 1 + slot.depths[node]
            own = lists.get(node, [])
            slot_column.append(slot.index)
            place_column.append(length + node)
            position_column.append(position)
            identical_column.append(position + 1 - len(own))
            start_column.append(len(places))
            places.extend(own)
        end = chunks[-1] + len(chosen)
        chunks.extend(range(chunks[-1] + rows_of_chunk, end, rows_of_chunk))
        chunks.append(end)
    flat = [token for row in tokens for token in row]
    return Rows(*(array("q", column) for column in (flat, *columns, places, chunks)))


def _chain_length(parents: Sequence[int]) -> int:
    """How many first nodes are a chain: their places are their positions."""
    for node, parent in enumerate(parents):
        if parent != (node - 1 if node else ROOT):
            return node
    return len(parents)
