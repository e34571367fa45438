"""What every model behind the seam keeps: rows depend on their own path alone, slots hold what was committed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftree.core.tree import ROOT, path
from draftree.models.base import Extend, LanguageModel, Slot
from draftree.models.hf import HFModel
from draftree.models.native.lowering import lower
from draftree.models.sequential import SequentialModel
from draftree.models.static.buckets import Shapes
from draftree.models.table import TableLM, hashed
from families import VOCAB_SIZE, fresh, peer, target

MISUSE = (AssertionError, ValueError)
PREFIX = [5, 9, 33, 9, 60, 61, 62, 63, 64, 65, 66]
"""Longer than the window of the families that have one."""
TREE = [7, 8, 9, 7, 30, 31, 32]
PARENTS = [-1, 0, 0, -1, 2, 4, 3]
CHAIN = [-1, 0, 1, 2, 3, 4, 5]
IN_C = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


@dataclass(frozen=True)
class Subject:
    """A model and what it must say behind any tokens."""

    model: LanguageModel
    rows: Callable[[Sequence[int]], Tensor]

    @property
    def parents(self) -> list[int]:
        return PARENTS if self.model.supports_trees else CHAIN


@functools.cache
def table() -> TableLM:
    return TableLM(hashed(VOCAB_SIZE, seed=4))


@torch.inference_mode()
def rows_of_peer(family: str, tokens: Sequence[int]) -> Tensor:
    found: Tensor = peer(family)(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return found


@functools.cache
def native_peer() -> Any:
    return fresh("qwen3", **IN_C)


@torch.inference_mode()
def rows_of_native_peer(tokens: Sequence[int]) -> Tensor:
    found: Tensor = native_peer()(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return found


def rows_of_table(tokens: Sequence[int]) -> Tensor:
    return torch.stack([table().logits(tokens[: end + 1]) for end in range(len(tokens))])


@functools.cache
def subject(name: str) -> Subject:
    if name == "table":
        return Subject(table(), rows_of_table)
    if name.startswith("leaf by leaf"):
        return Subject(
            SequentialModel(target("llama"), batched="row" in name), functools.partial(rows_of_peer, "llama")
        )
    if name.startswith("static "):
        family = name.removeprefix("static ")
        model = HFModel(fresh(family), shapes=Shapes(shortest=32))
        return Subject(model, functools.partial(rows_of_peer, family))
    if name == "in C":
        return Subject(lower(HFModel(fresh("qwen3", **IN_C))), rows_of_native_peer)
    return Subject(target(name), functools.partial(rows_of_peer, name))


FAMILIES = ["llama", "gemma2", "gpt_oss", "mistral", "deepseek_v3", "bloom", "mpt"]
STATIC = ["static llama", "static gemma2", "static gpt_oss", "static deepseek_v3"]
NAMES = ["table", *STATIC, "in C", "leaf by leaf, one row each", "leaf by leaf, one pass each", *FAMILIES]
any_model = pytest.mark.parametrize("name", NAMES)
tree_models = pytest.mark.parametrize("name", [name for name in NAMES if name not in ("bloom", "mpt")])


def same(found: Tensor, wanted: Tensor) -> bool:
    return found.shape == wanted.shape and torch.allclose(found.double(), wanted.double(), atol=2e-4)


def filled(model: LanguageModel, tokens: Sequence[int]) -> Slot:
    slot = model.open()
    model.extend([Extend(slot, tokens, range(-1, len(tokens) - 1), logits_at=())])
    model.commit(slot, range(len(tokens)))
    return slot


def wanted_rows(one: Subject, prefix: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> Tensor:
    """Every node scored alone: its own path behind the prefix."""
    return torch.stack([one.rows([*prefix, *(tokens[n] for n in path(parents, i))])[-1] for i in range(len(tokens))])


@any_model
def test_a_chain_is_read_as_the_text_it_is(name: str) -> None:
    one = subject(name)
    slot = one.model.open()
    scores = one.model.extend([Extend(slot, PREFIX, range(-1, len(PREFIX) - 1))])
    assert (slot.length, slot.num_tentative) == (0, len(PREFIX))
    assert same(scores.logits, one.rows(PREFIX))
    assert scores.logits.shape[1] == one.model.vocab_size
    one.model.close(slot)


@any_model
def test_a_tree_is_its_paths(name: str) -> None:
    one = subject(name)
    slot = filled(one.model, PREFIX)
    scores = one.model.extend([Extend(slot, TREE, one.parents)])
    assert same(scores.logits, wanted_rows(one, PREFIX, TREE, one.parents))
    one.model.close(slot)


@any_model
def test_a_tree_that_grows_in_passes_is_the_same_tree(name: str) -> None:
    one = subject(name)
    slot = filled(one.model, PREFIX)
    parts = [one.model.extend([Extend(slot, TREE[a:b], one.parents[a:b])]).logits for a, b in ((0, 2), (2, 3), (3, 7))]
    assert slot.num_tentative == len(TREE)
    assert same(torch.cat(parts), wanted_rows(one, PREFIX, TREE, one.parents))
    one.model.close(slot)


@any_model
def test_ragged_jobs_in_one_pass_are_each_as_if_alone(name: str) -> None:
    one = subject(name)
    prefixes = [PREFIX, PREFIX[:1], PREFIX[:6], [*PREFIX, *PREFIX, *PREFIX]]
    jobs = [(TREE, one.parents), ([3], [-1]), (TREE[:3], one.parents[:3]), (PREFIX, list(range(-1, len(PREFIX) - 1)))]
    slots = [filled(one.model, prefix) for prefix in prefixes]
    order = [2, 0, 3, 1]
    scores = one.model.extend([Extend(slots[i], *jobs[i]) for i in order])
    for place, i in enumerate(order):
        assert same(scores.of(place), wanted_rows(one, prefixes[i], *jobs[i])), i
    for slot in slots:
        one.model.close(slot)


@any_model
def test_only_the_asked_rows_come_back(name: str) -> None:
    one = subject(name)
    slots = [filled(one.model, PREFIX) for _ in range(3)]
    asked: list[Sequence[int] | None] = [[1, 6], (), None]
    scores = one.model.extend([Extend(s, TREE, one.parents, logits_at=at) for s, at in zip(slots, asked, strict=True)])
    wanted = wanted_rows(one, PREFIX, TREE, one.parents)
    assert scores.starts == (0, 2, 2, 9)
    assert same(scores.of(0), wanted[[1, 6]])
    assert same(scores.of(2), wanted)
    for slot in slots:
        one.model.close(slot)


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
def test_what_was_pruned_can_be_committed(name: str) -> None:
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
def test_a_truncated_prefix_goes_on_from_where_it_was_cut(name: str, length: int) -> None:
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
@pytest.mark.parametrize("length", [-1, len(PREFIX) + 1])
def test_a_prefix_is_cut_within_itself(name: str, length: int) -> None:
    model = subject(name).model
    slot = filled(model, PREFIX)
    with pytest.raises(MISUSE):
        model.truncate(slot, length)
    model.close(slot)


@any_model
def test_a_fork_and_its_origin_go_their_own_ways(name: str) -> None:
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
def test_a_place_that_was_used_before_leaves_no_trace(name: str) -> None:
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


def test_room_that_grows_keeps_what_is_stored() -> None:
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


def test_more_slots_than_reserved_are_made_room_for() -> None:
    model = subject("llama").model
    slots = [filled(model, PREFIX[: 1 + i % 7]) for i in range(40)]
    scores = model.extend([Extend(slot, [3], [-1]) for slot in slots])
    for i in (0, 17, 39):
        assert same(scores.of(i), rows_of_peer("llama", [*PREFIX[: 1 + i % 7], 3])[-1:])
    for slot in slots:
        model.close(slot)


@any_model
def test_a_slot_is_closed_once_and_not_used_again(name: str) -> None:
    model = subject(name).model
    slot = filled(model, PREFIX)
    model.close(slot)
    for misuse in (
        lambda: model.close(slot),
        lambda: model.extend([Extend(slot, [3], [-1])]),
        lambda: model.commit(slot, []),
        lambda: model.truncate(slot, 1),
        lambda: model.fork(slot),
    ):
        with pytest.raises(MISUSE):
            misuse()


@any_model
def test_a_slot_of_another_model_is_refused(name: str) -> None:
    model, other = subject(name).model, subject("table" if name != "table" else "llama").model
    slot = other.open()
    with pytest.raises(MISUSE):
        model.extend([Extend(slot, [3], [-1])])
    other.close(slot)


@any_model
def test_parents_name_earlier_nodes(name: str) -> None:
    model = subject(name).model
    for parents in ([-1, 1], [0], [-2], [-1, 5]):
        slot = filled(model, PREFIX)
        with pytest.raises((*MISUSE, IndexError)):
            model.extend([Extend(slot, TREE[: len(parents)], parents)])
        model.close(slot)


@any_model
def test_a_slot_takes_one_job_a_pass(name: str) -> None:
    model = subject(name).model
    slot = filled(model, PREFIX)
    with pytest.raises(MISUSE):
        model.extend([Extend(slot, [3], [-1]), Extend(slot, [4], [0])])
    model.close(slot)


@any_model
@pytest.mark.parametrize("way", [[1], [0, 0], [0, 3], [9], [0, 2, 1], [-1]])
def test_what_is_committed_is_a_path(name: str, way: list[int]) -> None:
    model = subject(name).model
    slot = filled(model, PREFIX)
    model.extend([Extend(slot, TREE, subject(name).parents)])
    with pytest.raises(MISUSE):
        model.commit(slot, way)
    model.close(slot)


@any_model
@pytest.mark.parametrize("keep", [[1], [0, 9], [-1]])
def test_what_is_kept_hangs_together(name: str, keep: list[int]) -> None:
    model = subject(name).model
    slot = filled(model, PREFIX)
    model.extend([Extend(slot, TREE, subject(name).parents)])
    with pytest.raises(MISUSE):
        model.prune(slot, keep)
    model.close(slot)


@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_a_model_of_chains_refuses_a_tree(name: str) -> None:
    model = subject(name).model
    slot = filled(model, PREFIX)
    with pytest.raises(MISUSE, match="chains only"):
        model.extend([Extend(slot, TREE, PARENTS)])
    model.close(slot)


@st.composite
def uses(draw: st.DrawFn) -> list[tuple[list[int], list[int], int]]:
    """Rounds of one sequence: the tree's tokens and parents, and the node whose path is committed (-1: none)."""
    rounds = []
    for _ in range(draw(st.integers(1, 4))):
        count = draw(st.integers(1, 7))
        parents = [draw(st.integers(ROOT, node - 1)) for node in range(count)]
        tokens = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=count, max_size=count))
        rounds.append((tokens, parents, draw(st.integers(ROOT, count - 1))))
    return rounds


@settings(max_examples=25)
@given(st.lists(uses(), min_size=1, max_size=3))
@pytest.mark.parametrize("name", ["llama", "gemma2", "static gemma2"])
def test_any_trees_and_paths_of_any_sequences(name: str, batch: list[list[tuple[list[int], list[int], int]]]) -> None:
    one = subject(name)
    texts = [[3 + i] for i in range(len(batch))]
    slots = [filled(one.model, text) for text in texts]
    for number in range(max(map(len, batch))):
        going = [i for i, rounds in enumerate(batch) if number < len(rounds)]
        scores = one.model.extend([Extend(slots[i], *batch[i][number][:2]) for i in going])
        for place, i in enumerate(going):
            tokens, parents, node = batch[i][number]
            assert same(scores.of(place), wanted_rows(one, texts[i], tokens, parents))
            way = path(parents, node)
            one.model.commit(slots[i], way)
            texts[i] += [tokens[n] for n in way]
    for slot in slots:
        one.model.close(slot)
