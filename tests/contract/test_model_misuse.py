"""Misuse that every model refuses: foreign slots, nodes that are not connected."""

from __future__ import annotations

from typing import Any

import pytest

from draftree.core.errors import ConfigurationError, UnsupportedModelError
from draftree.models.base import Extend, Pass
from model_subjects import (
    PARENTS,
    PREFIX,
    TREE,
    any_model,
    subject,
)
from slot_samples import filled

MISUSE = (AssertionError, ValueError)


EDITS: list[tuple[Any, ...]] = [
    *(("truncate", length) for length in (-1, len(PREFIX) + 1)),
    *(("commit", way) for way in ([1], [0, 0], [0, 3], [9], [0, 2, 1], [-1])),
    *(("commit", [], keep) for keep in ([1], [0, 9], [-1])),
    *(("commit", way, keep) for way, keep in (([0], [3]), ([0, 2], [1]), ([0], [0, 1]), ([3], [2]), ([0, 1], [3]))),
]
"""A prefix is cut within itself; only a path is committed; what is kept is connected, and hangs on the path's end."""


@any_model
def test_edits_that_do_not_fit_the_tree_are_refused(name: str) -> None:
    model = subject(name).model
    for edit, *given in EDITS:
        slot = filled(model, PREFIX)
        model.run(Pass([Extend(slot, TREE, subject(name).parents)]))
        with pytest.raises(MISUSE):
            getattr(model, edit)(slot, *given)
        model.close(slot)


@any_model
def test_a_slot_is_closed_once_and_not_used_again(name: str) -> None:
    model = subject(name).model
    slot = filled(model, PREFIX)
    model.close(slot)
    for misuse in (
        lambda: model.close(slot),
        lambda: model.run(Pass([Extend(slot, [3], [-1])])),
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
        model.run(Pass([Extend(slot, [3], [-1])]))
    other.close(slot)


@any_model
def test_parents_name_earlier_nodes(name: str) -> None:
    model = subject(name).model
    for parents in ([-1, 1], [0], [-2], [-1, 5]):
        slot = filled(model, PREFIX)
        with pytest.raises((*MISUSE, IndexError)):
            model.run(Pass([Extend(slot, TREE[: len(parents)], parents)]))
        model.close(slot)


@any_model
def test_a_slot_takes_one_job_a_pass(name: str) -> None:
    model = subject(name).model
    slot = filled(model, PREFIX)
    with pytest.raises(MISUSE):
        model.run(Pass([Extend(slot, [3], [-1]), Extend(slot, [4], [0])]))
    model.close(slot)


@any_model
def test_layers_that_cannot_be_captured_are_refused(name: str) -> None:
    model = subject(name).model
    slot = filled(model, PREFIX)
    with pytest.raises((ConfigurationError, UnsupportedModelError)):
        model.run(Pass([Extend(slot, [3], [-1])], capture=(99,)))
    assert slot.num_tentative == 0
    model.close(slot)


@pytest.mark.parametrize("name", ["bloom", "mpt"])
def test_a_model_of_chains_refuses_a_tree(name: str) -> None:
    model = subject(name).model
    slot = filled(model, PREFIX)
    with pytest.raises(MISUSE, match="chains only"):
        model.run(Pass([Extend(slot, TREE, PARENTS)]))
    model.close(slot)
