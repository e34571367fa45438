"""The rows of a pass as the C pass reads them: where each row's keys lie, in the order of their positions."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from draftree.models.kv.slots import KVSlot


@dataclass(frozen=True, slots=True)
class Rows:
    """Columns of 64-bit numbers, one behind the other.

    They are, one entry a row: the token's id; the slot's index; where in the slot its keys and values go; its position
    in the text; from which position on keys lie elsewhere than at the place of the same number; where in the list the
    places of these begin. Then the list: places, by position, of all rows. Then first rows of chunks, which are runs of
    rows of one slot, and the number of rows behind them.

    Attributes:
        numbers: all columns.
        starts: where each begins.
        count: rows.
        num_chunks: chunks.
        longest: positions up to the last one.
    """

    numbers: array[int]
    starts: Sequence[int]
    count: int
    num_chunks: int
    longest: int


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
    columns = _Columns()
    chunks = [0]
    for slot, chosen in zip(slots, nodes, strict=True):
        chain = _chain_length(slot.parents)
        if chain == slot.num_tentative:
            columns.add_chain(slot, chosen)
        else:
            columns.add_tree(slot, chosen, chain)
        end = chunks[-1] + len(chosen)
        chunks.extend(range(chunks[-1] + rows_of_chunk, end, rows_of_chunk))
        chunks.append(end)
    flat = [token for row in tokens for token in row]
    parts = (flat, columns.slot, columns.place, columns.position, columns.identical, columns.start, columns.list)
    starts, numbers = [], array("q")
    for part in (*parts, chunks):
        starts.append(len(numbers))
        numbers.extend(part)
    return Rows(numbers, starts, len(flat), len(chunks) - 1, max(columns.position) + 1)


class _Columns:
    """What a pass knows of its rows, while they are planned."""

    __slots__ = ("identical", "list", "place", "position", "slot", "start")

    def __init__(self) -> None:
        self.slot: list[int] = []
        self.place: list[int] = []
        self.position: list[int] = []
        self.identical: list[int] = []
        self.start: list[int] = []
        self.list: list[int] = []

    def add_chain(self, slot: KVSlot, chosen: Sequence[int]) -> None:
        """Rows of a slot whose nodes are a chain: their places are their positions."""
        places = [slot.length + node for node in chosen]
        self.slot += [slot.index] * len(places)
        self.place += places
        self.position += places
        self.identical += [place + 1 for place in places]
        self.start += [len(self.list)] * len(places)

    def add_tree(self, slot: KVSlot, chosen: Sequence[int], chain: int) -> None:
        """Rows of a slot whose first nodes alone are a chain."""
        length, wanted = slot.length, set(chosen)
        lists: dict[int, list[int]] = {}
        for node in range(slot.num_tentative):
            if node >= chain:
                lists[node] = [*lists.get(slot.parents[node], ()), length + node]
            if node not in wanted:
                continue
            position = length - 1 + slot.depths[node]
            own = lists.get(node, ())
            self.slot.append(slot.index)
            self.place.append(length + node)
            self.position.append(position)
            self.identical.append(position + 1 - len(own))
            self.start.append(len(self.list))
            self.list.extend(own)


def _chain_length(parents: Sequence[int]) -> int:
    """How many first nodes are a chain: their places are their positions."""
    for node, parent in enumerate(parents):
        if parent != node - 1:
            return node
    return len(parents)
