"""Rows of every model depend only on their own path."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftree.core.tree import ROOT, path
from draftree.models.base import Extend, Pass
from families import VOCAB_SIZE
from model_subjects import (
    PREFIX,
    TREE,
    any_model,
    each_of,
    same,
    subject,
    wanted_rows,
)
from slot_samples import filled


@any_model
def test_a_chain_is_read_as_the_text_it_is(name: str) -> None:
    one = subject(name)
    slot = one.model.open()
    scores = one.model.run(Pass([Extend(slot, PREFIX, range(-1, len(PREFIX) - 1))]))
    assert (slot.length, slot.num_tentative) == (0, len(PREFIX))
    assert same(scores.logits.tensor(), one.rows(PREFIX))
    assert scores.logits.tensor().shape[1] == one.model.vocab_size
    one.model.close(slot)


@any_model
def test_a_tree_is_its_paths(name: str) -> None:
    one = subject(name)
    slot = filled(one.model, PREFIX)
    scores = one.model.run(Pass([Extend(slot, TREE, one.parents)]))
    assert same(scores.logits.tensor(), wanted_rows(one, PREFIX, TREE, one.parents))
    one.model.close(slot)


@any_model
def test_a_tree_that_grows_in_passes_is_the_same_tree(name: str) -> None:
    one = subject(name)
    slot = filled(one.model, PREFIX)
    parts = [
        one.model.run(Pass([Extend(slot, TREE[a:b], one.parents[a:b])])).logits.tensor()
        for a, b in ((0, 2), (2, 3), (3, 7))
    ]
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
    scores = one.model.run(Pass([Extend(slots[i], *jobs[i]) for i in order]))
    for place, i in enumerate(order):
        assert same(scores.of(place).tensor(), wanted_rows(one, prefixes[i], *jobs[i])), i
    for slot in slots:
        one.model.close(slot)


@any_model
def test_only_the_requested_rows_are_returned(name: str) -> None:
    one = subject(name)
    slots = [filled(one.model, PREFIX) for _ in range(3)]
    asked: list[Sequence[int] | None] = [[1, 6], (), None]
    scores = one.model.run(
        Pass([Extend(s, TREE, one.parents, logits_at=at) for s, at in zip(slots, asked, strict=True)])
    )
    wanted = wanted_rows(one, PREFIX, TREE, one.parents)
    assert scores.starts == (0, 2, 2, 9)
    assert same(scores.of(0).tensor(), wanted[[1, 6]])
    assert same(scores.of(2).tensor(), wanted)
    for slot in slots:
        one.model.close(slot)


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
@each_of(["llama", "gemma2", "static gemma2", "in C"])
def test_any_trees_and_paths_of_any_sequences(name: str, batch: list[list[tuple[list[int], list[int], int]]]) -> None:
    one = subject(name)
    texts = [[3 + i] for i in range(len(batch))]
    slots = [filled(one.model, text) for text in texts]
    for number in range(max(map(len, batch))):
        going = [i for i, rounds in enumerate(batch) if number < len(rounds)]
        scores = one.model.run(Pass([Extend(slots[i], *batch[i][number][:2]) for i in going]))
        for place, i in enumerate(going):
            tokens, parents, node = batch[i][number]
            assert same(scores.of(place).tensor(), wanted_rows(one, texts[i], tokens, parents))
            way = path(parents, node)
            one.model.commit(slots[i], way)
            texts[i] += [tokens[n] for n in way]
    for slot in slots:
        one.model.close(slot)
