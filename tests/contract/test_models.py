"""Slots of every model hold the committed tokens and nothing of the dropped ones."""

from __future__ import annotations

import functools

import pytest

from draftree.models.base import Extend
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
    one.model.extend([Extend(slot, TREE, one.parents)])
    one.model.commit(slot, nodes)
    assert (slot.length, slot.num_tentative) == (len(PREFIX) + len(way), 0)
    text = [*PREFIX, *(TREE[node] for node in nodes)]
    scores = one.model.extend([Extend(slot, TREE, one.parents)])
    assert same(scores.logits, wanted_rows(one, text, TREE, one.parents))
    one.model.close(slot)


@any_model
def test_committing_many_is_committing_each(name: str) -> None:
    one = subject(name)
    ways = [[0, 2], [], [3]] if one.model.supports_trees else [[0, 1], [], [0]]
    slots = [filled(one.model, PREFIX[: 4 + i]) for i in range(3)]
    one.model.extend([Extend(slot, TREE, one.parents) for slot in slots])
    one.model.commit_many(slots, ways)
    scores = one.model.extend([Extend(slot, [50], [-1]) for slot in slots])
    for i, way in enumerate(ways):
        text = [*PREFIX[: 4 + i], *(TREE[node] for node in way), 50]
        assert same(scores.of(i), one.rows(text)[-1:])
        one.model.close(slots[i])


@tree_models
def test_a_pruned_tree_can_be_committed(name: str) -> None:
    one = subject(name)
    slot = filled(one.model, PREFIX)
    one.model.extend([Extend(slot, TREE, PARENTS)])
    one.model.prune(slot, [0, 2, 4])
    one.model.commit(slot, [0, 1, 2])
    scores = one.model.extend([Extend(slot, [3], [-1])])
    assert same(scores.logits, one.rows([*PREFIX, 7, 9, 30, 3])[-1:])
    one.model.close(slot)


@tree_models
def test_a_pruned_tree_goes_on_growing(name: str) -> None:
    one = subject(name)
    slot = filled(one.model, PREFIX)
    one.model.extend([Extend(slot, TREE, PARENTS)])
    one.model.prune(slot, [0, 2, 3, 4])
    assert (slot.length, slot.num_tentative) == (len(PREFIX), 4)
    tokens, parents = [7, 9, 7, 30, 40, 41], [-1, 0, -1, 1, 3, 2]
    scores = one.model.extend([Extend(slot, tokens[4:], parents[4:])])
    assert same(scores.logits, wanted_rows(one, PREFIX, tokens, parents)[4:])
    one.model.commit(slot, [0, 1, 3, 4])
    scores = one.model.extend([Extend(slot, [3], [-1])])
    assert same(scores.logits, one.rows([*PREFIX, 7, 9, 30, 40, 3])[-1:])
    one.model.close(slot)


@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_a_pruned_chain_goes_on_growing(name: str) -> None:
    one = subject(name)
    slot = filled(one.model, PREFIX)
    one.model.extend([Extend(slot, TREE, CHAIN)])
    one.model.prune(slot, [0, 1, 2])
    assert (slot.length, slot.num_tentative) == (len(PREFIX), 3)
    scores = one.model.extend([Extend(slot, [40, 41], [2, 3])])
    assert same(scores.logits, one.rows([*PREFIX, *TREE[:3], 40, 41])[-2:])
    one.model.close(slot)


@any_model
@pytest.mark.parametrize("length", [0, 3, len(PREFIX)])
def test_a_truncated_prefix_continues_at_the_cut(name: str, length: int) -> None:
    one = subject(name)
    slot, other = filled(one.model, PREFIX), filled(one.model, PREFIX[::-1])
    one.model.extend([Extend(slot, TREE, one.parents)])
    one.model.truncate(slot, length)
    assert (slot.length, slot.num_tentative) == (length, 0)
    scores = one.model.extend([Extend(slot, TREE, one.parents), Extend(other, [3], [-1])])
    assert same(scores.of(0), wanted_rows(one, PREFIX[:length], TREE, one.parents))
    assert same(scores.of(1), one.rows([*PREFIX[::-1], 3])[-1:])
    one.model.commit(slot, [0])
    scores = one.model.extend([Extend(slot, [4], [-1])])
    assert same(scores.logits, one.rows([*PREFIX[:length], TREE[0], 4])[-1:])
    one.model.close(slot)
    one.model.close(other)


@any_model
def test_a_fork_and_its_origin_are_independent(name: str) -> None:
    one = subject(name)
    slot = filled(one.model, PREFIX)
    one.model.extend([Extend(slot, TREE, one.parents)])
    fork = one.model.fork(slot)
    assert (fork.length, fork.num_tentative) == (len(PREFIX), 0)
    one.model.commit(slot, [0])
    scores = one.model.extend([Extend(fork, [20, 21], [-1, 0]), Extend(slot, [22], [-1])])
    assert same(scores.of(0), one.rows([*PREFIX, 20, 21])[-2:])
    assert same(scores.of(1), one.rows([*PREFIX, TREE[0], 22])[-1:])
    one.model.close(slot)
    scores = one.model.extend([Extend(fork, [23], [1])])
    assert same(scores.logits, one.rows([*PREFIX, 20, 21, 23])[-1:])
    one.model.close(fork)


@any_model
def test_a_reused_slot_leaves_no_trace(name: str) -> None:
    one = subject(name)
    for text in (PREFIX, TREE, PREFIX[::-1]):
        slots = [filled(one.model, text) for _ in range(3)]
        one.model.close(slots[1])
        slots[1] = filled(one.model, text[1:])
        scores = one.model.extend([Extend(slot, [3], [-1]) for slot in slots])
        assert same(scores.of(1), one.rows([*text[1:], 3])[-1:])
        assert same(scores.of(2), one.rows([*text, 3])[-1:])
        for slot in slots:
            one.model.close(slot)


def test_growing_capacity_keeps_stored_keys() -> None:
    fresh_model = functools.partial(subject("llama").model.__class__, peer("llama"))
    model = fresh_model()
    model.reserve(1, 16)
    slot = filled(model, PREFIX)
    model.extend([Extend(slot, TREE[:3], CHAIN[:3])])
    model.reserve(3, 20)
    other = filled(model, PREFIX[:2])
    long = PREFIX * 5
    scores = model.extend([Extend(other, long, range(-1, len(long) - 1), logits_at=[54]), Extend(slot, [40], [2])])
    assert same(scores.of(0), rows_of_peer("llama", [*PREFIX[:2], *long])[-1:])
    assert same(scores.of(1), rows_of_peer("llama", [*PREFIX, *TREE[:3], 40])[-1:])


def test_more_slots_than_reserved_can_be_opened() -> None:
    model = subject("llama").model
    slots = [filled(model, PREFIX[: 1 + i % 7]) for i in range(40)]
    scores = model.extend([Extend(slot, [3], [-1]) for slot in slots])
    for i in (0, 17, 39):
        assert same(scores.of(i), rows_of_peer("llama", [*PREFIX[: 1 + i % 7], 3])[-1:])
    for slot in slots:
        model.close(slot)
