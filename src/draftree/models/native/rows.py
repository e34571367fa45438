"""The rows of a pass as the C pass reads them: where each row's keys lie, in the order of their positions."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from draftree.models.kv.slots import KVSlot


@dataclass(frozen=True, slots=True)
class Rows:
    """Columns of 64-bit numbers.

    They are, one entry a row: the token's id; the slot's index; where in the slot its keys and values go; its position
    in the text; from which position on keys lie elsewhere than at the place of the same number; where in the list the
    places of these begin. Then the list: places, by position; rows on one path share them. Then first rows of chunks,
    which are runs of rows of one slot, and the number of rows after them.

    Attributes:
        numbers: all columns.
        starts: where each begins; the list itself lies last.
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
    return columns.rows([token for row in tokens for token in row], chunks)


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
        """Rows of a slot whose nodes are a chain: their places are their positions."""
        places = [slot.length + node for node in chosen]
        self.slot += [slot.index] * len(places)
        self.place += places
        self.position += places
        self.identical += [place + 1 for place in places]
        self.start += [0] * len(places)

    def add_tree(self, slot: KVSlot, chosen: Sequence[int], chain: int) -> None:
        """Rows of a slot of which only the first `chain` nodes are a chain.

        A node's first child extends the node's list of places; any other child extends a copy. So Python takes one
        step for each node, however deep the node is. List 0 is empty, for nodes of the chain.
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
        """All columns in one array; the list, which is an array already, is copied to its end."""
        count, end = len(tokens), 6 * len(tokens)
        columns = [*tokens, *self.slot, *self.place, *self.position, *self.identical, *self.start, *chunks]
        numbers = array("q", columns)
        numbers += self.list
        starts = (0, count, 2 * count, 3 * count, 4 * count, 5 * count, end + len(chunks), end)
        return Rows(numbers, starts, count, len(chunks) - 1, max(self.position) + 1)


def _chain_length(parents: Sequence[int]) -> int:
    """How many first nodes are a chain: their places are their positions."""
    for node, parent in enumerate(parents):
        if parent != node - 1:
            return node
    return len(parents)
