"""Row tables of passes in C: every row names its ancestors' places, and rows on one path share a list."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from draftree.core.tree import path
from draftree.models.kv.slots import KVSlot
from draftree.models.native.rows import Rows, plan_rows

COLUMNS = ("tokens", "slot", "place", "position", "identical", "list_start")


def filled_slot(index: int, length: int, parents: list[int]) -> KVSlot:
    slot = KVSlot(index)
    slot.copy_prefix(length)
    slot.append(parents)
    return slot


def column(rows: Rows, name: str) -> list[int]:
    start = rows.starts[COLUMNS.index(name)]
    return list(rows.numbers[start : start + rows.count])


def key_places(rows: Rows, row: int) -> list[int]:
    """Places of a row's keys in the order of their positions, as the C code looks them up."""
    identical, start = column(rows, "identical")[row], rows.starts[6] + column(rows, "list_start")[row]
    count = column(rows, "position")[row] + 1 - identical
    return [*range(identical), *rows.numbers[start : start + count]]


@st.composite
def slots_with_rows(draw: st.DrawFn) -> tuple[KVSlot, list[int]]:
    size = draw(st.integers(1, 24))
    # mostly chains, so that trees are deep
    parents = [draw(st.one_of(st.just(node - 1), st.integers(-1, node - 1))) for node in range(size)]
    chosen = sorted(draw(st.sets(st.integers(0, size - 1), min_size=1)))
    return filled_slot(0, draw(st.integers(0, 9)), parents), chosen


@given(st.lists(slots_with_rows(), min_size=1, max_size=4), st.integers(1, 5))
def test_rows_name_the_places_of_their_ancestors(jobs: list[tuple[KVSlot, list[int]]], rows_of_chunk: int) -> None:
    for index, (slot, _) in enumerate(jobs):
        slot.index = index
    slots, nodes = [slot for slot, _ in jobs], [chosen for _, chosen in jobs]
    tokens = [[100 * slot.index + node for node in chosen] for slot, chosen in jobs]
    rows = plan_rows(slots, tokens, nodes, rows_of_chunk=rows_of_chunk)
    expected = [(slot, node) for slot, chosen in jobs for node in chosen]
    assert rows.count == len(expected)
    for row, (slot, node) in enumerate(expected):
        above = path(slot.parents, node)
        assert key_places(rows, row) == [*range(slot.length), *(slot.length + n for n in above)]
        assert column(rows, "tokens")[row] == 100 * slot.index + node
        assert column(rows, "slot")[row] == slot.index
        assert column(rows, "place")[row] == slot.length + node
        assert column(rows, "position")[row] == slot.length + len(above) - 1
    assert rows.longest == max(column(rows, "position")) + 1
    chunks = list(rows.numbers[rows.starts[7] : rows.starts[7] + rows.num_chunks + 1])
    assert (chunks[0], chunks[-1]) == (0, rows.count)
    owners = column(rows, "slot")
    for first, end in pairwise(chunks):
        assert 0 < end - first <= rows_of_chunk
        assert len(set(owners[first:end])) == 1


def test_rows_on_one_path_share_a_list() -> None:
    # nodes 0 and 1 are a chain; below each of them is a branch, and the branches stand level by level
    slot = filled_slot(0, 7, [-1, 0, 0, *range(1, 79)])
    rows = plan_rows([slot], [range(81)], [range(81)], rows_of_chunk=16)
    assert len(rows.numbers) - rows.starts[6] == 79
    assert len(set(column(rows, "list_start")[2:])) == 2


def test_the_first_chain_of_a_tree_needs_no_list() -> None:
    slot = filled_slot(0, 5, [-1, 0, 1, 0])
    rows = plan_rows([slot], [range(4)], [range(4)], rows_of_chunk=16)
    assert column(rows, "identical") == [6, 7, 8, 6]
    assert list(rows.numbers[rows.starts[6] :]) == [8]
