"""Native passes match transformers, and are bit-identical however a token is scored."""

from __future__ import annotations

import itertools
import os
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from draftree.core.tree import path
from draftree.models.base import Extend, Pass
from draftree.models.native import decoder
from draftree.models.torch.hf import HFModel
from families import VOCAB_SIZE, fresh
from native_builds import EACH_BUILD, built
from native_samples import DTYPES, FAMILIES, SIZES, kinds_of, lower, lowered, native, text
from slot_samples import alone, at_once, filled

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="native kernels need a C compiler")

HEADS = [(9, 3, 64), (2, 1, 128), (3, 3, 80), (20, 1, 16)]
"""Heads, key heads and their size: queries of a row in two tiles, sums that fit into tiles and that do not."""


def shape(heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}


def random_tree(nodes: int, seed: int) -> tuple[list[int], list[int]]:
    choose = random.Random(seed)
    parents = [choose.randrange(-1, node) if node else -1 for node in range(nodes)]
    return [choose.randrange(3, VOCAB_SIZE) for _ in range(nodes)], parents


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str) -> None:
    tokens = text(150)
    peer = fresh(family, **(SIZES | FAMILIES[family]))
    with torch.inference_mode():
        wanted = peer(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
    found = at_once(native(family), tokens)
    assert (found - wanted).abs().max() < 2e-5 * (wanted.max() - wanted.min())


@pytest.mark.parametrize(("kind", "share"), [("bfloat16", 0.02), ("int8", 0.08)])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3"])
def test_smaller_formats_stay_near_float32(family: str, kind: str, share: float) -> None:
    tokens = text(40)
    rows = [at_once(lm, tokens) for lm in (native(family), native(family, kind))]
    spread = rows[0].max() - rows[0].min()
    error = (rows[1] - rows[0]).pow(2).mean().sqrt() / spread
    assert 0 < error < share


@pytest.mark.parametrize(("family", "kind"), kinds_of(FAMILIES))
def test_a_node_has_the_same_bits_in_every_tree_and_batch(family: str, kind: str) -> None:
    lm = native(family, kind)
    for seed, prefix in enumerate((0, 1, 30, 63, 64, 100)):
        before = text(prefix)
        tokens, parents = random_tree(9 + 7 * seed, seed)
        slots = [filled(lm, before), filled(lm, text(11))]
        other = random_tree(5, seed + 50)
        jobs = [Extend(slots[0], tokens, parents), Extend(slots[1], *other)]
        scores = lm.run(Pass(jobs if seed % 2 else jobs[::-1])).of(0 if seed % 2 else 1).tensor()
        for slot in slots:
            lm.close(slot)
        deepest = max(range(len(parents)), key=lambda node: len(path(parents, node)))
        for node in {0, len(parents) - 1, deepest}:
            branch = path(parents, node)
            assert torch.equal(scores[branch], alone(lm, [*before, *(tokens[n] for n in branch)])[prefix:])


@pytest.mark.parametrize("kind", DTYPES)
def test_a_tree_that_grows_pass_by_pass_and_is_pruned_keeps_its_bits(kind: str) -> None:
    lm = native("qwen3", kind)
    before = text(70)
    slot = filled(lm, before)
    lm.run(Pass([Extend(slot, [5, 6], [-1, -1], logits_at=())]))
    lm.run(Pass([Extend(slot, [7, 8, 9], [1, 0, 1], logits_at=())]))
    lm.commit(slot, [], [1, 2, 4])
    scores = lm.run(Pass([Extend(slot, [10, 11], [2, 1])])).logits.tensor()
    assert torch.equal(scores[0], alone(lm, [*before, 6, 9, 10])[-1])
    assert torch.equal(scores[1], alone(lm, [*before, 6, 7, 11])[-1])
    lm.commit(slot, [0, 2])
    lm.truncate(slot, 71)
    again = lm.run(Pass([Extend(slot, [9, 10], [-1, 0])])).logits.tensor()
    assert torch.equal(again[1], scores[0])
    lm.close(slot)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", HEADS)
def test_where_a_prompt_is_cut_changes_no_bit(heads: tuple[int, int, int], kind: str) -> None:
    lm, tokens, choose = lowered("mistral", kind, **shape(*heads), sliding_window=150), text(380), random.Random(7)
    wanted = at_once(lm, tokens)
    for pieces in (2, 4, 60):
        cuts = [0, *sorted(choose.sample(range(1, 380), pieces - 1)), 380]
        slot = lm.open()
        for start, end in itertools.pairwise(cuts):
            found = lm.run(Pass([Extend(slot, tokens[start:end], range(-1, end - start - 1))])).logits.tensor()
            assert torch.equal(found, wanted[start:end])
            lm.commit(slot, range(end - start))
        lm.close(slot)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("heads", HEADS)
def test_wide_trees_after_many_blocks_keep_their_bits(heads: tuple[int, int, int], kind: str) -> None:
    lm, before = lowered("qwen3", kind, **shape(*heads)), text(300)
    slot = filled(lm, before)
    tokens, parents = random_tree(64, 3)
    scores = lm.run(Pass([Extend(slot, tokens, parents)])).logits.tensor()
    lm.commit(slot, ())
    for node in (1, 17, 40, 63):
        branch = path(parents, node)
        for place in branch:
            row = lm.run(Pass([Extend(slot, [tokens[place]], [-1])])).logits.tensor()
            lm.commit(slot, [0])
            assert torch.equal(row[0], scores[place])
        lm.truncate(slot, len(before))
    lm.close(slot)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_change_a_bit(threads: int) -> None:
    lm, before = native("llama", "bfloat16"), torch.get_num_threads()
    wanted = alone(lm, text(20))
    try:
        torch.set_num_threads(threads)
        assert torch.equal(alone(lm, text(20)), wanted)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", DTYPES)
def test_how_rows_are_grouped_for_attention_changes_no_bit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lm, tokens = lowered("mistral", kind, **shape(9, 3, 64)), text(200)
    wanted = at_once(lm, tokens)
    for size in (1, 5, 8, 40):
        monkeypatch.setattr(decoder.NativeDecoder, "rows_of_chunk", lambda _self, _rows, size=size: size)
        assert torch.equal(at_once(lm, tokens), wanted)


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, VOCAB_SIZE + 8])
def test_logits_stored_past_the_caches_are_those_of_one_row(vocab_size: int) -> None:
    """Rows of the second size start at any place of a line of 64 bytes, where such stores are not possible."""
    lm = lowered("llama", "bfloat16", vocab_size=vocab_size)
    assert torch.equal(at_once(lm, text(20)), alone(lm, text(20)))


def test_passes_of_two_callers_at_once_on_more_threads_than_cores_keep_their_bits() -> None:
    models = [lowered("llama", "bfloat16"), lowered("qwen3", "int8")]
    wanted, before = [alone(lm, text(30)) for lm in models], torch.get_num_threads()
    try:
        torch.set_num_threads(2 * (os.cpu_count() or 1) + 3)
        with ThreadPoolExecutor(2) as callers:
            rounds = [list(callers.map(alone, models, [text(30)] * 2)) for _ in range(5)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found, known) for each in rounds for found, known in zip(each, wanted, strict=True))


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("name", EACH_BUILD)
def test_every_set_of_instructions_agrees(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = built(name)
    monkeypatch.setattr(decoder, "library", lambda: library)
    lm, tokens = lowered("gemma3_text", kind), text(90)
    rows = alone(lm, tokens)
    assert torch.equal(at_once(lm, tokens), rows)
    spread = rows.max() - rows.min()
    assert (rows - alone(native("gemma3_text", kind), tokens)).pow(2).mean().sqrt() < 0.01 * spread


@torch.no_grad()
def with_bytes_for_weights(family: str) -> Any:
    model = fresh(family, **(SIZES | FAMILIES[family]))
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            scale = layer.weight.abs().amax(1, keepdim=True) / 127
            layer.weight.copy_((layer.weight / scale).round() * scale)
    return model


@pytest.mark.parametrize("name", EACH_BUILD)
def test_int8_rounds_weights_and_inputs_to_16_bits_or_8_in_groups(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = built(name)
    monkeypatch.setattr(decoder, "library", lambda: library)
    rows = []
    for quantization in (None, "int8"):
        lm = lower(HFModel(with_bytes_for_weights("mistral")), quantization=quantization)
        rows.append(at_once(lm, text(60)))
    spread = rows[0].max() - rows[0].min()
    limit = 4e-2 if "int8 products" in library.instructions else 3e-4  # inputs of 8 bits in groups, or of 16
    assert (rows[1] - rows[0]).abs().max() < limit * spread
