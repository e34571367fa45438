"""Slots of every model hold the committed tokens and nothing of the dropped ones."""

from __future__ import annotations

import functools

import pytest

from draftree.models.base import Close, Commit, Extend, Fork, Pass
from draftree.models.kv.slots import MIN_LENGTH
from families import peer
from model_subjects import (
    CHAIN,
    PARENTS,
    PREFIX,
    TREE,
    any_model,
    rows_of_peer,
    same,
    subject,
    tree_models,
    wanted_rows,
)
from slot_samples import filled


@any_model
@pytest.mark.parametrize("way", [[], [0], [0, 2, 4], [3, 6]])
def test_a_committed_path_is_prefix(name: str, way: list[int]) -> None:
    one = subject(name)
    nodes = way if one.model.supports_trees else list(range(len(way)))
    slot = filled(one.model, PREFIX)
    one.model.run(Pass([Extend(slot, TREE, one.parents)]))
    one.model.commit(slot, nodes)
    assert (slot.length, slot.num_tentative) == (len(PREFIX) + len(way), 0)
    text = [*PREFIX, *(TREE[node] for node in nodes)]
    scores = one.model.run(Pass([Extend(slot, TREE, one.parents)]))
    assert same(scores.logits.tensor(), wanted_rows(one, text, TREE, one.parents))
    one.model.close(slot)


@any_model
def test_committing_many_is_committing_each(name: str) -> None:
    one = subject(name)
    ways = [[0, 2], [], [3]] if one.model.supports_trees else [[0, 1], [], [0]]
    slots = [filled(one.model, PREFIX[: 4 + i]) for i in range(3)]
    one.model.run(Pass([Extend(slot, TREE, one.parents) for slot in slots]))
    one.model.apply([Commit(slot, way) for slot, way in zip(slots, ways, strict=True)])
    scores = one.model.run(Pass([Extend(slot, [50], [-1]) for slot in slots]))
    for i, way in enumerate(ways):
        text = [*PREFIX[: 4 + i], *(TREE[node] for node in way), 50]
        assert same(scores.of(i).tensor(), one.rows(text)[-1:])
        one.model.close(slots[i])


@tree_models
def test_a_pruned_tree_can_be_committed(name: str) -> None:
    one = subject(name)
    slot = filled(one.model, PREFIX)
    one.model.run(Pass([Extend(slot, TREE, PARENTS)]))
    one.model.commit(slot, [], [0, 2, 4])
    one.model.commit(slot, [0, 1, 2])
    scores = one.model.run(Pass([Extend(slot, [3], [-1])]))
    assert same(scores.logits.tensor(), one.rows([*PREFIX, 7, 9, 30, 3])[-1:])
    one.model.close(slot)


@tree_models
def test_a_pruned_tree_goes_on_growing(name: str) -> None:
    one = subject(name)
    slot = filled(one.model, PREFIX)
    one.model.run(Pass([Extend(slot, TREE, PARENTS)]))
    one.model.commit(slot, [], [0, 2, 3, 4])
    assert (slot.length, slot.num_tentative) == (len(PREFIX), 4)
    tokens, parents = [7, 9, 7, 30, 40, 41], [-1, 0, -1, 1, 3, 2]
    scores = one.model.run(Pass([Extend(slot, tokens[4:], parents[4:])]))
    assert same(scores.logits.tensor(), wanted_rows(one, PREFIX, tokens, parents)[4:])
    one.model.commit(slot, [0, 1, 3, 4])
    scores = one.model.run(Pass([Extend(slot, [3], [-1])]))
    assert same(scores.logits.tensor(), one.rows([*PREFIX, 7, 9, 30, 40, 3])[-1:])
    one.model.close(slot)


@tree_models
@pytest.mark.parametrize(("way", "keep"), [([0, 2], [4, 5]), ([0], [1, 2, 4]), ([3], [6]), ([0, 2, 4], [5]), ([], [3])])
def test_what_a_commit_keeps_grows_on_from_the_end_of_the_path(name: str, way: list[int], keep: list[int]) -> None:
    one = subject(name)
    slots = [filled(one.model, PREFIX), filled(one.model, PREFIX[:4])]
    one.model.run(Pass([Extend(slot, TREE, PARENTS) for slot in slots]))
    one.model.apply([Commit(slots[0], way, keep), Commit(slots[1], [0])])
    assert (slots[0].length, slots[0].num_tentative) == (len(PREFIX) + len(way), len(keep))
    text = [*PREFIX, *(TREE[node] for node in way)]
    place = {way[-1] if way else -1: -1} | {node: new for new, node in enumerate(keep)}
    tokens, parents = [*(TREE[node] for node in keep), 40, 41], [*(place[PARENTS[node]] for node in keep), -1, 0]
    result = one.model.run(Pass([Extend(slots[0], tokens[-2:], parents[-2:]), Extend(slots[1], [3], [-1])]))
    assert same(result.of(0).tensor(), wanted_rows(one, text, tokens, parents)[-2:])
    assert same(result.of(1).tensor(), one.rows([*PREFIX[:4], TREE[0], 3])[-1:])
    one.model.commit(slots[0], [0, len(keep) + 1])
    rows = one.model.run(Pass([Extend(slots[0], [3], [-1])])).logits.tensor()
    assert same(rows, one.rows([*text, tokens[0], 41, 3])[-1:])
    for slot in slots:
        one.model.close(slot)


@any_model
def test_a_slot_that_occurs_twice_in_one_call_is_edited_in_order(name: str) -> None:
    one = subject(name)
    slot = filled(one.model, PREFIX)
    nodes = [0, 2] if one.model.supports_trees else [0, 1]
    one.model.run(Pass([Extend(slot, TREE, one.parents)]))
    opened = one.model.apply([Commit(slot, nodes[:1], nodes[1:]), Commit(slot, [0]), Fork(slot, slot.length + 1)])
    text = [*PREFIX, *(TREE[node] for node in nodes)]
    assert [slot.length, *(fork.length for fork in opened)] == [len(text), len(PREFIX) + 1]
    result = one.model.run(Pass([Extend(slot, [3], [-1]), Extend(opened[0], [4], [-1])]))
    assert same(result.of(0).tensor(), one.rows([*text, 3])[-1:])
    assert same(result.of(1).tensor(), one.rows([*text[:-1], 4])[-1:])
    one.model.apply([Close(slot), Close(opened[0])])


@any_model
def test_slots_have_the_lowest_free_ids(name: str) -> None:
    model = subject(name).model
    slots = [model.open() for _ in range(4)]
    assert len({slot.id for slot in slots}) == 4
    closed = slots[1].id
    model.close(slots[1])
    slots[1] = model.fork(slots[0])
    assert slots[1].id == closed
    for slot in slots:
        model.close(slot)


@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_a_pruned_chain_goes_on_growing(name: str) -> None:
    one = subject(name)
    slot = filled(one.model, PREFIX)
    one.model.run(Pass([Extend(slot, TREE, CHAIN)]))
    one.model.commit(slot, [], [0, 1, 2])
    assert (slot.length, slot.num_tentative) == (len(PREFIX), 3)
    scores = one.model.run(Pass([Extend(slot, [40, 41], [2, 3])]))
    assert same(scores.logits.tensor(), one.rows([*PREFIX, *TREE[:3], 40, 41])[-2:])
    one.model.close(slot)


@any_model
@pytest.mark.parametrize("length", [0, 3, len(PREFIX)])
def test_a_truncated_prefix_continues_at_the_cut(name: str, length: int) -> None:
    one = subject(name)
    slot, other = filled(one.model, PREFIX), filled(one.model, PREFIX[::-1])
    one.model.run(Pass([Extend(slot, TREE, one.parents)]))
    one.model.truncate(slot, length)
    assert (slot.length, slot.num_tentative) == (length, 0)
    scores = one.model.run(Pass([Extend(slot, TREE, one.parents), Extend(other, [3], [-1])]))
    assert same(scores.of(0).tensor(), wanted_rows(one, PREFIX[:length], TREE, one.parents))
    assert same(scores.of(1).tensor(), one.rows([*PREFIX[::-1], 3])[-1:])
    one.model.commit(slot, [0])
    scores = one.model.run(Pass([Extend(slot, [4], [-1])]))
    assert same(scores.logits.tensor(), one.rows([*PREFIX[:length], TREE[0], 4])[-1:])
    one.model.close(slot)
    one.model.close(other)


@any_model
def test_a_fork_and_its_origin_are_independent(name: str) -> None:
    one = subject(name)
    slot = filled(one.model, PREFIX)
    one.model.run(Pass([Extend(slot, TREE, one.parents)]))
    fork = one.model.fork(slot)
    assert (fork.length, fork.num_tentative) == (len(PREFIX), 0)
    one.model.commit(slot, [0])
    scores = one.model.run(Pass([Extend(fork, [20, 21], [-1, 0]), Extend(slot, [22], [-1])]))
    assert same(scores.of(0).tensor(), one.rows([*PREFIX, 20, 21])[-2:])
    assert same(scores.of(1).tensor(), one.rows([*PREFIX, TREE[0], 22])[-1:])
    one.model.close(slot)
    scores = one.model.run(Pass([Extend(fork, [23], [1])]))
    assert same(scores.logits.tensor(), one.rows([*PREFIX, 20, 21, 23])[-1:])
    one.model.close(fork)


@any_model
def test_a_reused_slot_leaves_no_trace(name: str) -> None:
    one = subject(name)
    for text in (PREFIX, TREE, PREFIX[::-1]):
        slots = [filled(one.model, text) for _ in range(3)]
        one.model.close(slots[1])
        slots[1] = filled(one.model, text[1:])
        scores = one.model.run(Pass([Extend(slot, [3], [-1]) for slot in slots]))
        assert same(scores.of(1).tensor(), one.rows([*text[1:], 3])[-1:])
        assert same(scores.of(2).tensor(), one.rows([*text, 3])[-1:])
        for slot in slots:
            one.model.close(slot)


def test_growing_capacity_keeps_stored_keys() -> None:
    fresh_model = functools.partial(subject("llama").model.__class__, peer("llama"))
    model = fresh_model()
    model.reserve(1, 16)
    slot = filled(model, PREFIX)
    model.run(Pass([Extend(slot, TREE[:3], CHAIN[:3])]))
    model.reserve(3, MIN_LENGTH + 1)
    other = filled(model, PREFIX[:2])
    long = PREFIX * 5
    scores = model.run(Pass([Extend(other, long, range(-1, len(long) - 1), logits_at=[54]), Extend(slot, [40], [2])]))
    assert same(scores.of(0).tensor(), rows_of_peer("llama", [*PREFIX[:2], *long])[-1:])
    assert same(scores.of(1).tensor(), rows_of_peer("llama", [*PREFIX, *TREE[:3], 40])[-1:])


def test_more_slots_than_reserved_can_be_opened() -> None:
    model = subject("llama").model
    slots = [filled(model, PREFIX[: 1 + i % 7]) for i in range(40)]
    scores = model.run(Pass([Extend(slot, [3], [-1]) for slot in slots]))
    for i in (0, 17, 39):
        assert same(scores.of(i).tensor(), rows_of_peer("llama", [*PREFIX[: 1 + i % 7], 3])[-1:])
    for slot in slots:
        model.close(slot)
