"""Rows of a pass in the format of the C library: where each row's keys are stored, ordered by position."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from draftree.models.kv.slots import KVSlot


@dataclass(frozen=True, slots=True)
class Rows:
    """Columns of 64-bit numbers.

    With one entry per row: token id; slot index; index of its keys and values in the slot; position in the text; first
    position whose key is not stored at the index of the same number; start of the indices of such keys in the list.
    Then the list of indices by position, which rows on one path share. Then the first row of each chunk, a run of rows
    of one slot, and the total number of rows.

    Attributes:
        numbers: all columns.
        starts: start of each column; the list is the last one.
        count: number of rows.
        num_chunks: number of chunks.
        longest: largest position plus one.
    """

    numbers: array[int]
    starts: Sequence[int]
    count: int
    num_chunks: int
    longest: int


@dataclass(frozen=True, slots=True)
class SourceRows:
    """Sources of the rows of a pass.

    Attributes:
        rows: index of each row's source.
        table: address and length of the keys and values of each source, one after the other.
        queries: receives the queries with which the last layer attends to them, shape (rows, heads, head_dim), float32;
            None if they are not wanted.
    """

    rows: array[int]
    table: array[int]
    queries: Tensor | None = None


def plan_rows(
    slots: Sequence[KVSlot], tokens: Sequence[Sequence[int]], nodes: Sequence[Sequence[int]], *, rows_of_chunk: int
) -> Rows:
    """Return the rows of a pass.

    Args:
        slots: slot of each job, with the nodes appended.
        tokens: tokens of each job's rows.
        nodes: tentative nodes of these rows, ascending.
        rows_of_chunk: maximum number of rows per chunk.
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
    return columns.rows([token for row in tokens for token in row], chunks)


def place_of(numbers: array[int] | array[float]) -> int:
    """Return the address of an array's numbers."""
    return numbers.buffer_info()[0]


class _Columns:
    """Columns of a pass while its rows are planned."""

    __slots__ = ("identical", "list", "place", "position", "slot", "start")

    def __init__(self) -> None:
        self.slot: list[int] = []
        self.place: list[int] = []
        self.position: list[int] = []
        self.identical: list[int] = []
        self.start: list[int] = []
        self.list = array("q")

    def add_chain(self, slot: KVSlot, chosen: Sequence[int]) -> None:
        """Add rows of a slot whose nodes are a chain, stored at their positions."""
        places = [slot.length + node for node in chosen]
        self.slot += [slot.index] * len(places)
        self.place += places
        self.position += places
        self.identical += [place + 1 for place in places]
        self.start += [0] * len(places)

    def add_tree(self, slot: KVSlot, chosen: Sequence[int], chain: int) -> None:
        """Add rows of a slot of which only the first `chain` nodes are a chain.

        A node's first child extends the node's list of indices; every other child extends a copy. So Python takes one
        step for each node, at any depth. List 0 is empty, for nodes of the chain.
        """
        length, depths, parents = slot.length, slot.depths, slot.parents
        numbers, lists, identical = [0] * chain, [array("q")], [length]
        for node in range(chain, len(parents)):
            parent = parents[node]
            number = numbers[parent] if parent >= chain else 0
            if not number or lists[number][-1] != length + parent:
                first = identical[number] if number else length + parent + 1
                lists.append(lists[number][: length + depths[node] - 1 - first])
                identical.append(first)
                number = len(lists) - 1
            lists[number].append(length + node)
            numbers.append(number)
        starts = []
        for own in lists:
            starts.append(len(self.list))
            self.list += own
        self.slot += [slot.index] * len(chosen)
        self.place += [length + node for node in chosen]
        self.position += [length - 1 + depths[node] for node in chosen]
        self.identical += [identical[numbers[node]] if node >= chain else length + node + 1 for node in chosen]
        self.start += [starts[numbers[node]] for node in chosen]

    def rows(self, tokens: list[int], chunks: list[int]) -> Rows:
        """Return all columns in one array, with the list at its end."""
        count, end = len(tokens), 6 * len(tokens)
        columns = [*tokens, *self.slot, *self.place, *self.position, *self.identical, *self.start, *chunks]
        numbers = array("q", columns)
        numbers += self.list
        starts = (0, count, 2 * count, 3 * count, 4 * count, 5 * count, end + len(chunks), end)
        return Rows(numbers, starts, count, len(chunks) - 1, max(self.position) + 1)


def _chain_length(parents: Sequence[int]) -> int:
    """Return the number of first nodes that form a chain, stored at their positions."""
    for node, parent in enumerate(parents):
        if parent != node - 1:
            return node
    return len(parents)
