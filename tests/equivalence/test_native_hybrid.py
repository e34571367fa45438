"""Native passes of models with recurrent layers match transformers, and are bit-identical however a token is scored."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftree.core.tree import path
from draftree.loading.lowering import lower_model
from draftree.models.base import Extend, LayerSubset, Pass, Slot
from draftree.models.native import decoder
from draftree.models.native.describe import plan_model
from draftree.models.native.library import library
from draftree.models.native.model import NativeModel
from draftree.models.native.streaming.model import resident_model
from draftree.models.native.streaming.store import write_store
from draftree.models.native.weights import ModelWeights
from families import VOCAB_SIZE, fresh
from native_builds import EACH_BUILD, built
from native_samples import DTYPES, HYBRIDS, QUANTIZED, SIZES, in_c, kinds_of, lowered, native, text

pytestmark = in_c


def read(lm: NativeModel, slot: Slot, tokens: Sequence[int], *, settled: bool = True) -> Tensor:
    """Commit tokens in one pass; logits after each."""
    count = len(tokens)
    job = Extend(slot, tokens, range(-1, count - 1), settled=count if settled else 0)
    rows = lm.run(Pass([job])).logits.tensor().clone()
    lm.commit(slot, range(count))
    return rows


def whole(lm: NativeModel, tokens: Sequence[int], *, settled: bool = True) -> Tensor:
    slot = lm.open()
    rows = read(lm, slot, tokens, settled=settled)
    lm.close(slot)
    return rows


def random_tree(nodes: int, seed: int, *, settled: int = 0) -> tuple[list[int], list[int]]:
    """Tokens and parents of a tree after a chain of settled tokens."""
    choose = random.Random(seed)
    parents = [node - 1 if node <= settled else choose.randrange(settled - 1, node) for node in range(nodes)]
    return [choose.randrange(3, VOCAB_SIZE) for _ in range(nodes)], parents


@pytest.mark.parametrize("family", HYBRIDS)
def test_logits_are_those_of_transformers(family: str) -> None:
    tokens = text(150)
    peer = fresh(family, **(SIZES | HYBRIDS[family]))
    with torch.inference_mode():
        wanted = peer(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
    found = whole(native(family), tokens)
    # at some tokens, transformers' results with and without a cache differ by more than 1e-4
    assert (found - wanted).pow(2).mean().sqrt() < 1e-5 * (wanted.max() - wanted.min())


@pytest.mark.parametrize("family", ["nemotron_h", "zamba2", "zamba2-nope"])
def test_captured_states_are_those_before_the_layers_of_transformers(family: str) -> None:
    lm, tokens = native(family), text(20)
    peer = fresh(family, **(SIZES | HYBRIDS[family]))
    assert lm.num_layers == peer.config.num_hidden_layers
    with torch.inference_mode():
        wanted = peer(input_ids=torch.tensor([tokens]), use_cache=False, output_hidden_states=True).hidden_states
    slot = lm.open()
    layers = range(lm.num_layers - 1, -1, -1)
    result = lm.run(Pass([Extend(slot, tokens, range(-1, len(tokens) - 1))], capture=tuple(layers)))
    lm.close(slot)
    for index, layer in enumerate(layers):
        assert (result.hidden[:, index] - wanted[layer][0]).abs().max() < 1e-4 * wanted[layer].abs().max(), layer


def test_experts_are_chosen_by_scores_with_a_bias() -> None:
    model, tokens = fresh("lfm2_moe", **(SIZES | HYBRIDS["lfm2_moe"])), text(100)
    generator = torch.Generator().manual_seed(5)
    for name, bias in model.named_buffers():
        if name.endswith("expert_bias"):
            bias.copy_(torch.randn(bias.shape, generator=generator) / 4)
    with torch.inference_mode():
        wanted = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    found = whole(NativeModel(plan_model(model), ModelWeights(model)), tokens)
    assert (found - wanted).abs().max() < 2e-5 * (wanted.max() - wanted.min())
    assert (found - whole(native("lfm2_moe"), tokens)).abs().max() > 0.01 * (wanted.max() - wanted.min())


@pytest.mark.parametrize(("family", "kind"), kinds_of(HYBRIDS))
def test_the_self_check_passes(family: str, kind: str) -> None:
    model = fresh(family, dtype=DTYPES[kind], **(SIZES | HYBRIDS[family]))
    lowering = lower_model(model, quantization=kind if kind in QUANTIZED else None)
    assert lowering.model.is_exact


@pytest.mark.parametrize(("family", "kind"), kinds_of(HYBRIDS))
def test_a_node_has_the_same_bits_in_every_tree_and_batch(family: str, kind: str) -> None:
    lm = native(family, kind)
    for seed, prefix in enumerate((0, 1, 30, 64, 100)):
        settled, before = seed % 3, text(prefix)
        tokens, parents = random_tree(9 + 7 * seed, seed, settled=settled)
        slots = [lm.open(), lm.open()]
        for slot, start in zip(slots, (before, text(11)), strict=True):
            if start:
                read(lm, slot, start, settled=seed % 2 == 0)
        jobs = [Extend(slots[0], tokens, parents, settled=settled), Extend(slots[1], *random_tree(5, seed + 50))]
        scores = lm.run(Pass(jobs if seed % 2 else jobs[::-1])).of(0 if seed % 2 else 1).tensor()
        for slot in slots:
            lm.close(slot)
        for node in (len(parents) - 1, max(range(len(parents)), key=lambda node: len(path(parents, node)))):
            branch = path(parents, node)
            wanted = whole(lm, [*before, *(tokens[n] for n in branch)])
            assert torch.equal(scores[branch], wanted[prefix:])


@pytest.mark.parametrize(("family", "kind"), kinds_of(HYBRIDS))
def test_where_and_how_a_prompt_is_cut_changes_no_bit(family: str, kind: str) -> None:
    lm, tokens, choose = native(family, kind), text(150), random.Random(7)
    wanted = whole(lm, tokens)
    assert torch.equal(whole(lm, tokens, settled=False), wanted)
    for pieces in (2, 5, 60):
        cuts = [0, *sorted(choose.sample(range(1, 150), pieces - 1)), 150]
        slot = lm.open()
        for start, end in itertools.pairwise(cuts):
            assert torch.equal(read(lm, slot, tokens[start:end], settled=start % 3 > 0), wanted[start:end])
        lm.close(slot)


@pytest.mark.parametrize("family", HYBRIDS)
def test_rounds_of_drafts_keep_the_bits_of_plain_reading(family: str) -> None:
    """Every round reads what the last one left pending, and accepts a random path of a tree."""
    lm, choose = native(family, "bfloat16"), random.Random(3)
    slot, tokens = lm.open(), text(20)
    read(lm, slot, tokens)
    rows: list[Tensor] = []
    for seed in range(12):
        nodes, parents = random_tree(14, seed, settled=1)
        scores = lm.run(Pass([Extend(slot, nodes, parents, settled=1)])).logits.tensor().clone()
        branch = path(parents, choose.randrange(14))
        rows.append(scores[branch])
        lm.commit(slot, branch)
        tokens += [nodes[node] for node in branch]
        lm.check_integrity()
    lm.close(slot)
    assert torch.equal(torch.cat(rows), whole(lm, tokens)[20:])


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_tree_that_grows_pass_by_pass_and_is_pruned_keeps_its_bits(family: str) -> None:
    lm, before = native(family), text(40)
    slot = lm.open()
    read(lm, slot, before)
    lm.run(Pass([Extend(slot, [4, 5, 6], [-1, 0, 0], logits_at=(), settled=1)]))
    lm.run(Pass([Extend(slot, [7, 8, 9], [2, 1, 2], logits_at=())]))
    lm.commit(slot, [0], [2, 3, 5])
    scores = lm.run(Pass([Extend(slot, [10, 11], [2, 1])])).logits.tensor()
    assert torch.equal(scores[0], whole(lm, [*before, 4, 6, 9, 10])[-1])
    assert torch.equal(scores[1], whole(lm, [*before, 4, 6, 7, 11])[-1])
    lm.commit(slot, [0, 2])
    assert torch.equal(read(lm, slot, [12]), whole(lm, [*before, 4, 6, 9, 12])[-1:])
    lm.close(slot)


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_prefix_is_cut_and_copied_where_its_state_is_kept(family: str) -> None:
    lm, tokens = native(family), text(110)
    wanted = whole(lm, tokens)
    slot = lm.open()
    for start, end in ((0, 40), (40, 50), (50, 90)):
        read(lm, slot, tokens[start:end])
    read(lm, slot, tokens[90:93], settled=False)  # a path of a tree: cut anywhere
    assert [lm.cut_length(slot, length) for length in (93, 91, 89, 50, 39, 0)] == [93, 91, 40, 40, 0, 0]
    for length in (93, 91, 40, 0):
        copy = lm.fork(slot, length)
        assert torch.equal(read(lm, copy, tokens[length:]), wanted[length:])
        lm.close(copy)
    for length in (92, 40):
        lm.truncate(slot, length)
        assert torch.equal(read(lm, slot, tokens[length:100]), wanted[length:100])
    lm.close(slot)


def test_slots_that_are_added_and_lengthened_keep_their_states() -> None:
    lm, tokens = lowered("lfm2"), text(60)
    slots = [lm.open()]
    read(lm, slots[0], tokens[:40])
    read(lm, slots[0], tokens[40:50], settled=False)
    slots += [lm.open() for _ in range(20)]
    lm.reserve(40, 300)
    assert torch.equal(read(lm, slots[0], tokens[50:]), whole(lm, tokens)[50:])
    for slot in slots:
        lm.close(slot)
    assert lm.footprint.state > 0
    assert lm.footprint.node > 0


PARTS = [LayerSubset(end=2), LayerSubset(attention=frozenset({0})), LayerSubset(mlp=frozenset({1, 2}))]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("family", HYBRIDS)
def test_partial_nodes_leave_no_trace(family: str, part: LayerSubset) -> None:
    """Partial nodes have the same bits in every tree, and those of the whole model do not depend on them."""
    lm, before = native(family), text(40)
    lm.require_part(part)
    slot, other = lm.open(), lm.open()
    for opened in (slot, other):
        read(lm, opened, before)
    read(lm, slot, [9, 8], settled=False)
    read(lm, other, [9, 8])
    (first, chain), (more, parents) = ([4, 5, 6], [-1, 0, 0]), ([7, 8], [2, 1])
    rows = [lm.run(Pass([Extend(slot, *nodes)], part)).logits.tensor() for nodes in ((first, chain), (more, parents))]
    alone = lm.run(Pass([Extend(other, [4, 6, 7], [-1, 0, 1])], part)).logits.tensor()
    assert torch.equal(torch.stack([rows[0][0], rows[0][2], rows[1][0]]), alone)
    lm.close(other)
    scores = lm.run(Pass([Extend(slot, [3, 4, 5, 6], [-1, 0, 1, 1], settled=1)])).logits.tensor()
    assert torch.equal(scores[[0, 1, 3]], whole(lm, [*before, 9, 8, 3, 4, 6])[-3:])
    lm.commit(slot, [0, 1, 3])
    assert torch.equal(read(lm, slot, [5]), whole(lm, [*before, 9, 8, 3, 4, 6, 5])[-1:])
    lm.close(slot)


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_quantized_copy_drafts_on_the_states_of_its_target(family: str) -> None:
    lm, tokens = native(family), text(60)
    if family == "kimi_linear":
        lm = lowered(family, mlp_layer_types=["dense"] * 4, q_lora_rank=48)
    if lm.blueprint.has_experts:
        return
    copy, part = lm.quantized_copy("int8"), LayerSubset(end=lm.num_layers)
    slot, wanted = lm.open(), whole(lm, tokens)
    read(lm, slot, tokens[:40])
    drafted = copy.run(Pass([Extend(slot, tokens[40:50], range(-1, 9))], part)).logits.tensor()
    spread = wanted.max() - wanted.min()
    assert 0 < (drafted - wanted[40:50]).pow(2).mean().sqrt() < 0.05 * spread
    assert torch.equal(read(lm, slot, tokens[40:]), wanted[40:])
    lm.close(slot)


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("family", ["lfm3", "qwen3_5_text", "nemotron_h", "kimi_linear", "zamba2"])
def test_packed_weights_in_a_folder_give_the_same_bits(family: str, kind: str, tmp_path: Path) -> None:
    model = fresh(family, dtype=DTYPES[kind], **(SIZES | HYBRIDS[family]))
    blueprint, quantization = plan_model(model), kind if kind in QUANTIZED else None
    store = write_store(tmp_path, library(), blueprint, ModelWeights(model), quantization=quantization)
    lm = resident_model(blueprint, store, quantization=quantization)
    assert torch.equal(whole(lm, text(50)), whole(native(family, kind), text(50)))


@pytest.mark.parametrize("name", EACH_BUILD)
def test_every_set_of_instructions_agrees(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    other = built(name)
    monkeypatch.setattr(decoder, "library", lambda: other)
    for family in ("lfm3", "qwen3_5_text", "bamba", "kimi_linear", "zamba2"):
        lm, tokens = lowered(family, "bfloat16"), text(60)
        rows = whole(lm, tokens)
        spread = rows.max() - rows.min()
        assert (rows - whole(native(family, "bfloat16"), tokens)).pow(2).mean().sqrt() < 0.01 * spread
