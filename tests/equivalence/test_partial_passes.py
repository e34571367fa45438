"""Partial passes through some layers: their logits, and that whole passes that continue from them are exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from draftree.core.errors import UnsupportedModelError
from draftree.drafters.base import SequenceView
from draftree.drafters.tree_builder.target_stepper import PartialStepper
from draftree.models.base import Commit, Extend, LayerSubset, Pass
from draftree.models.table import TableLM, hashed, near
from draftree.models.torch.hf import HFModel
from draftree.sampling.controls import build_controls
from draftree.sampling.history import History
from draftree.sampling.params import SamplingParams
from families import CACHED, DIVIDED, VOCAB_SIZE, fresh, target
from model_subjects import DEEP, LAYERS, PARENTS, PREFIX, TREE, both_kernels, through_c, through_torch
from native_samples import DTYPES, in_c
from slot_samples import filled

DRAFTED = [0, 2, 3, 4]
"""The tree's nodes that are partial nodes; the others are not known before the whole pass."""
PARTS = [
    LayerSubset(end=1),
    LayerSubset(end=3),
    LayerSubset(attention=frozenset({1, 3}), mlp=frozenset({0, 1})),
    LayerSubset(end=3, mlp=frozenset({2})),
]


def subtree(nodes: Sequence[int]) -> tuple[list[int], list[int]]:
    place = {node: index for index, node in enumerate(nodes)} | {-1: -1}
    return [TREE[node] for node in nodes], [place[PARENTS[node]] for node in nodes]


@torch.inference_mode()
def cut_down(part: LayerSubset, tokens: Sequence[int]) -> Tensor:
    """Logits of a model of transformers that was built with this part only, after each token."""
    model = fresh("qwen3", **DEEP)
    for layer in part.attention:
        model.model.layers[layer].self_attn.o_proj.weight.zero_()
    for layer in part.mlp:
        model.model.layers[layer].mlp.down_proj.weight.zero_()
    model.model.layers = model.model.layers[: part.end]
    model.config.num_hidden_layers = len(model.model.layers)
    found: Tensor = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return found


@pytest.mark.parametrize("part", PARTS, ids=str)
@both_kernels
def test_a_partial_pass_is_a_pass_of_the_model_with_these_layers_only(build: Any, part: LayerSubset) -> None:
    model = build()
    slot = model.open()
    first = model.run(Pass([Extend(slot, PREFIX, range(-1, len(PREFIX) - 1))], part)).logits.tensor()
    more = model.run(Pass([Extend(slot, [3, 4], [len(PREFIX) - 1, len(PREFIX) - 1])], part)).logits.tensor()
    model.close(slot)
    assert torch.allclose(first, cut_down(part, PREFIX), atol=2e-4)
    for row, token in zip(more, (3, 4), strict=True):
        assert torch.allclose(row, cut_down(part, [*PREFIX, token])[-1], atol=2e-4)


@in_c
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_a_whole_pass_after_a_partial_one_is_bit_identical_in_c(kind: str, part: LayerSubset) -> None:
    model = through_c(kind)
    slot = filled(model, PREFIX)
    whole = model.run(Pass([Extend(slot, TREE, PARENTS)])).logits.tensor()
    model.commit(slot, ())
    model.run(Pass([Extend(slot, *subtree(DRAFTED[:2]), logits_at=())], part))
    model.run(Pass([Extend(slot, *(side[2:] for side in subtree(DRAFTED)))], part))
    resumed = model.run(Pass([Extend(slot, TREE, PARENTS)])).logits.tensor()
    assert torch.equal(whole, resumed)
    model.commit(slot, [0, 2, 4])
    after = model.run(Pass([Extend(slot, [50], [-1])])).logits.tensor()
    model.close(slot)
    other = filled(model, [*PREFIX, 7, 9, 30])
    assert torch.equal(after, model.run(Pass([Extend(other, [50], [-1])])).logits.tensor()), (
        "keys and values that were kept"
    )
    model.close(other)


@both_kernels
def test_in_a_batch_only_some_sequences_continue_from_partial_passes(build: Any) -> None:
    model = build()
    part = LayerSubset(end=2)
    slots = [filled(model, PREFIX[:length]) for length in (4, 11, 2, 7)]
    jobs = [Extend(slot, TREE, PARENTS, logits_at=[0, 3, 6]) for slot in slots]
    wanted = model.run(Pass(jobs)).logits.tensor()
    model.apply([Commit(slot, ()) for slot in slots])
    order = [2, 0, 3]
    model.run(Pass([Extend(slots[i], *subtree(DRAFTED[: 1 + i]), logits_at=()) for i in order], part))
    model.run(Pass([Extend(slots[1], TREE, PARENTS, logits_at=())], part))
    model.truncate(slots[0], 4)
    mixed = [jobs[i] for i in (3, 1, 0, 2)]
    found = model.run(Pass(mixed))
    for place, job in enumerate((3, 1, 0, 2)):
        assert torch.allclose(found.of(place).tensor(), wanted[3 * job : 3 * job + 3], atol=2e-4)
    for slot in slots:
        model.close(slot)


@both_kernels
def test_layers_of_a_partial_pass_are_not_run_again(build: Any) -> None:
    model = build()
    slot = filled(model, PREFIX)

    def runs(work: Any) -> int:
        before = model.num_sublayer_runs
        work()
        return int(model.num_sublayer_runs - before)

    whole = runs(lambda: model.run(Pass([Extend(slot, TREE, PARENTS)])))
    assert whole == 2 * LAYERS * len(TREE)
    model.commit(slot, ())
    partial = runs(lambda: model.run(Pass([Extend(slot, *subtree(DRAFTED))], LayerSubset(end=3))))
    assert partial == 2 * 3 * len(DRAFTED)
    assert runs(lambda: model.run(Pass([Extend(slot, TREE, PARENTS)]))) == whole - partial
    model.commit(slot, ())
    skipping = LayerSubset(attention=frozenset({0, 1}), mlp=frozenset({3}))
    assert runs(lambda: model.run(Pass([Extend(slot, *subtree(DRAFTED))], skipping))) == (2 * LAYERS - 3) * len(DRAFTED)
    assert runs(lambda: model.run(Pass([Extend(slot, TREE, PARENTS)]))) == whole
    model.close(slot)


@pytest.mark.parametrize("change", ["commit", "cut", "truncate", "another part"])
def test_any_change_of_a_slot_ends_its_partial_pass(change: str) -> None:
    model = through_torch()
    slot = filled(model, PREFIX)
    model.run(Pass([Extend(slot, [7], [-1])], LayerSubset(end=3)))
    if change == "commit":
        model.commit(slot, ())
    elif change == "cut":
        model.truncate(slot, 5)
    elif change == "truncate":
        model.truncate(slot, slot.length)
    else:
        model.run(Pass([Extend(slot, [8], [-1])], LayerSubset(end=1, mlp=frozenset({0}))))
    before = model.num_sublayer_runs
    model.run(Pass([Extend(slot, [7], [-1])]))
    assert model.num_sublayer_runs - before == 2 * LAYERS
    model.close(slot)


@pytest.mark.parametrize("family", sorted(DIVIDED))
def test_families_run_in_parts(family: str) -> None:
    model = target(family)
    model.require_part(LayerSubset(end=1))
    slot = filled(model, PREFIX)
    whole = model.run(Pass([Extend(slot, TREE, PARENTS)])).logits.tensor()
    model.commit(slot, ())
    model.run(Pass([Extend(slot, *subtree(DRAFTED))], LayerSubset(end=1)))
    resumed = model.run(Pass([Extend(slot, TREE, PARENTS)])).logits.tensor()
    model.close(slot)
    assert torch.allclose(whole, resumed, atol=2e-4)


@pytest.mark.parametrize("family", sorted(DIVIDED - {"opt", "roberta"}))
def test_families_leave_sublayers_out(family: str) -> None:
    model = target(family)
    part = LayerSubset(attention=frozenset({1}), mlp=frozenset({0}))
    model.require_part(part)
    slot = filled(model, PREFIX)
    whole = model.run(Pass([Extend(slot, TREE, PARENTS)])).logits.tensor()
    model.commit(slot, ())
    partial = model.run(Pass([Extend(slot, TREE, PARENTS)], part)).logits.tensor()
    assert partial.isfinite().all()
    assert not torch.allclose(partial, whole, atol=1e-2)
    assert torch.allclose(model.run(Pass([Extend(slot, TREE, PARENTS)])).logits.tensor(), whole, atol=2e-4)
    model.close(slot)


def test_missing_layers_are_refused() -> None:
    for part in (
        LayerSubset(end=5),
        LayerSubset(end=0),
        LayerSubset(attention=frozenset({4})),
        LayerSubset(mlp=frozenset({9})),
    ):
        with pytest.raises(UnsupportedModelError, match="has 4 layers"):
            through_torch().require_part(part)
    with pytest.raises(UnsupportedModelError, match="perceptron of layer 1"):
        target("opt").require_part(LayerSubset(mlp=frozenset({1})))
    with pytest.raises(UnsupportedModelError, match="cannot run a part"):
        target(sorted(CACHED)[0]).require_part(LayerSubset(end=1))


def test_a_model_that_changes_in_parts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = HFModel(fresh("qwen3", **DEEP))
    monkeypatch.setattr("draftree.models.kv.slotted.PartialTree.hidden", lambda self: torch.cat(self._hidden) * 1.5)
    with pytest.raises(UnsupportedModelError, match="in two parts"):
        model.require_part(LayerSubset(end=1))


def test_a_table_gives_its_listed_distributions() -> None:
    whole = hashed(VOCAB_SIZE, seed=1)
    model = TableLM(whole, partial=near(whole, seed=2, distance=1.0))
    slot = filled(model, PREFIX)
    found = model.run(Pass([Extend(slot, TREE[:2], [-1, 0])], LayerSubset(end=1))).logits.tensor()
    assert torch.equal(found[1], near(whole, seed=2, distance=1.0)((*PREFIX, 7, 8)))
    assert torch.equal(
        model.run(Pass([Extend(slot, [9], [0])], LayerSubset(end=1))).logits.tensor()[0],
        near(whole, seed=2, distance=1.0)((*PREFIX, 7, 9)),
    )
    assert slot.num_tentative == 0
    model.close(slot)
    with pytest.raises(UnsupportedModelError, match="cannot run a part"):
        TableLM(whole).require_part(LayerSubset(end=1))


def test_a_part_that_leaves_nothing_out_appends_no_tentative_nodes() -> None:
    model = target("llama")
    slot = filled(model, PREFIX)
    controls = build_controls(SamplingParams(temperature=0), vocab_size=VOCAB_SIZE, seed=1)
    stepper = PartialStepper(model, LayerSubset())
    state = stepper.open(SequenceView(History([*PREFIX, 7]), controls, slot=slot))
    first = stepper.catch_up([state], [1]).tensor()
    assert slot.num_tentative == 0
    assert torch.allclose(first, model.run(Pass([Extend(slot, [7], [-1])])).logits.tensor(), atol=2e-4)
    model.close(slot)
