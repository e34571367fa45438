"""Streamed weights give the same bits as weights in memory; drafting with a quantized copy changes no text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from draftree import LLM, SamplingParams
from draftree.core.errors import ConfigurationError
from draftree.loading.load import load_model
from draftree.models.base import Extend, LayerSubset, Pass
from draftree.models.native.streaming.model import StreamedModel
from draftree.models.native.streaming.store import layout, open_store, shallow
from families import VOCAB_SIZE, drafter_folder, fresh
from native_samples import in_c, lowered, text
from private_cache import private_cache
from slot_samples import at_once, filled
from streamed import LAYERS, sizes, streamed

pytestmark = in_c

TREE = [-1, 0, 0, 2, -1, 4]
PROMPTS = [text(9), text(31), text(4)]
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.9, seed=5, ignore_eos=True)


@pytest.mark.parametrize("resident", [0, 1, 3])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3", "qwen2_moe", "gpt_oss"])
def test_streamed_logits_have_the_same_bits(family: str, kind: str, resident: int, tmp_path: Path) -> None:
    ours = streamed(family, tmp_path / "model", kind, resident=resident)
    whole = lowered(family, kind, **sizes(family))
    assert ours.stream_stats.streamed_layers >= 2
    assert torch.equal(at_once(ours, text(70)), at_once(whole, text(70)))
    trees = []
    for lm in (ours, whole):
        slot = filled(lm, text(40))
        trees.append(lm.run(Pass([Extend(slot, [3, 9, 4, 11, 8, 2], TREE)])).logits.tensor().clone())
        lm.close(slot)
    assert torch.equal(*trees)


def test_captured_states_and_partial_passes_have_the_same_bits(tmp_path: Path) -> None:
    ours, whole = streamed("llama", tmp_path / "model"), lowered("llama", **sizes("llama"))
    parts = (LayerSubset(end=3), LayerSubset(attention=frozenset({1}), mlp=frozenset({1, 4})))
    for capture in ((0, 2, LAYERS), (4, 1), (LAYERS,)):
        found = []
        for lm in (ours, whole):
            slot = filled(lm, text(20))
            found.append(lm.run(Pass([Extend(slot, [3, 9], [-1, 0])], capture=capture)).hidden)
            lm.close(slot)
        assert torch.equal(*found)
    for part in parts:
        results = []
        for lm in (ours, whole):
            slot = filled(lm, text(20))
            results.append(lm.run(Pass([Extend(slot, [3, 9], [-1, 0])], part)).logits.tensor().clone())
            results.append(lm.run(Pass([Extend(slot, [3, 9], [-1, 0])])).logits.tensor().clone())
            lm.close(slot)
        assert torch.equal(results[0], results[2])
        assert torch.equal(results[1], results[3])


def test_embedding_and_head_are_those_of_the_model_in_memory(tmp_path: Path) -> None:
    ours, whole = streamed("qwen2", tmp_path / "model", "bfloat16"), lowered("qwen2", "bfloat16", **sizes("qwen2"))
    assert torch.equal(ours.input_embedding(), whole.input_embedding())
    assert torch.equal(ours.output_head(), whole.output_head())


def test_every_pass_reads_the_streamed_layers_once(tmp_path: Path) -> None:
    ours = streamed("llama", tmp_path / "model", resident=1)
    slot = filled(ours, text(5))
    stats = ours.stream_stats
    for _ in range(6):
        ours.run(Pass([Extend(slot, [3], [-1])]))
        ours.commit(slot, ())
    read = ours.stream_stats.read - stats.read
    ahead = 2 * stats.of_pass // stats.streamed_layers
    assert 5 * stats.of_pass <= read <= 6 * stats.of_pass + ahead
    assert stats.memory < stats.file


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("draft", ["quantized:int8", "quantized:int8,tree=best-8,k=3", "ngram", "early-exit:2"])
def test_texts_are_those_of_plain_decoding(kind: str, draft: str, tmp_path: Path) -> None:
    plain = LLM(lowered("llama", kind, **sizes("llama")), "none")
    ours = LLM(streamed("llama", tmp_path / "model", kind), draft=draft)
    for params in (GREEDY, SAMPLED):
        wanted = [list(one.token_ids) for one in plain.generate(PROMPTS, params)]
        assert [list(one.token_ids) for one in ours.generate(PROMPTS, params)] == wanted


def test_a_draft_model_in_8_bits_needs_less_memory_and_changes_no_text(tmp_path: Path) -> None:
    target = lowered("llama", **sizes("llama"))
    drafter = drafter_folder("llama", tmp_path, **sizes("llama"))
    wanted = [list(one.token_ids) for one in LLM(target, "none").generate(PROMPTS, SAMPLED)]
    weights = []
    for options in ("", ",bits=int8"):
        llm = LLM(target, f"model:{drafter},tree=best-12-3,k=3{options}")
        assert [list(one.token_ids) for one in llm.generate(PROMPTS, SAMPLED)] == wanted
        weights.append(llm.engine.parts.drafters[0].drafter.footprint.weights)
    assert weights[1] < 0.8 * weights[0]


def test_other_kinds_of_weights_of_a_draft_model_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="weights of kind 'int3'"):
        LLM(lowered("llama"), draft="model:any,bits=int3")


def test_a_quantized_copy_is_accepted_far_more_often_than_by_chance() -> None:
    records = []
    llm = LLM(lowered("llama"), draft="quantized:int8,k=4", plan="fixed:4", on_round=records.append)
    llm.generate(PROMPTS, GREEDY)
    rows = [row for record in records for row in record.sequences]
    assert sum(row.num_accepted for row in rows) > 0.6 * sum(row.num_drafted for row in rows) > 0


def test_a_copy_of_a_quantized_target_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="int8 already"):
        LLM(lowered("llama", "int8"), draft="quantized:int8")


def test_a_copy_of_a_target_through_torch_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="native kernels"):
        LLM(fresh("llama"), draft="quantized:int8")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTREE_CACHE", private_cache(tmp_path / "cache"))
    place = tmp_path / "model"
    fresh("llama", **sizes("llama")).save_pretrained(place)
    return place


def budget(folder: Path) -> str:
    layer = 4 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96)
    return f"{(4 * 4 * VOCAB_SIZE * 64 + 4 * layer) / 1000}KB"


def test_a_model_is_packed_once_and_then_starts_from_its_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_model(folder, dtype="float32", offload=budget(folder))
    assert isinstance(first.model, StreamedModel)
    assert first.model.is_exact
    (packed,) = (folder.parent / "cache" / "packed").iterdir()
    written = (packed / "weights.bin").stat().st_mtime_ns
    monkeypatch.setattr("draftree.loading.load.read_model", lambda *_, **__: pytest.fail("transformers is not needed"))
    second = load_model(folder, dtype="float32", offload=budget(folder))
    assert second.model.is_exact
    assert second.eos_ids == first.eos_ids
    assert (packed / "weights.bin").stat().st_mtime_ns == written
    assert torch.equal(at_once(first.model, text(50)), at_once(second.model, text(50)))


def test_a_model_whose_rows_differ_by_shape_is_not_exact(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftree.loading.native_start.rounds_alike", lambda *_: False)
    first = load_model(folder, dtype="float32", offload=budget(folder))
    assert not first.model.is_exact
    assert not load_model(folder, dtype="float32", offload=budget(folder)).model.is_exact


@pytest.mark.parametrize(("family", "layers"), [("llama", 2), ("gemma3_text", None)])
def test_shapes_are_compared_on_the_first_layers_of_each_kind(family: str, layers: int | None, tmp_path: Path) -> None:
    whole = streamed(family, tmp_path / "model")
    plan, store = shallow(whole.blueprint, open_store(tmp_path / "model"))
    windows = {layer.window for layer in whole.blueprint.layers}
    assert {layer.window for layer in plan.layers} == windows
    assert len(plan.layers) == len(store.layers) == len(store.extents) < LAYERS
    assert layers in (None, len(plan.layers))
    part = StreamedModel(plan, store, budget=10**9)
    assert torch.equal(at_once(part, text(20)), _of_layers(whole, len(plan.layers), text(20)))


def _of_layers(model: StreamedModel, count: int, tokens: list[int]) -> torch.Tensor:
    slot = model.open()
    job = Extend(slot, tokens, range(-1, len(tokens) - 1))
    rows = model.run(Pass([job], LayerSubset(end=count))).logits.tensor().clone()
    model.close(slot)
    return rows


def test_a_recorded_start_is_enough_to_pack(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTREE_BLUEPRINTS", "1")
    whole = load_model(folder, dtype="float32")
    monkeypatch.setattr("draftree.loading.load.read_model", lambda *_, **__: pytest.fail("transformers is not needed"))
    ours = load_model(folder, dtype="float32", offload=budget(folder))
    assert isinstance(ours.model, StreamedModel)
    assert ours.model.is_exact
    assert torch.equal(at_once(whole.model, text(50)), at_once(ours.model, text(50)))


def test_changed_files_are_packed_again(folder: Path) -> None:
    first = load_model(folder, dtype="float32", offload=budget(folder))
    changed = fresh("llama", **sizes("llama"))
    changed.lm_head.weight.data *= 1.5
    changed.save_pretrained(folder)
    second = load_model(folder, dtype="float32", offload=budget(folder))
    assert not torch.equal(at_once(first.model, text(20)), at_once(second.model, text(20)))


def test_weights_that_another_version_packed_are_packed_again(folder: Path) -> None:
    first = load_model(folder, dtype="float32", offload=budget(folder))
    (packed,) = (folder.parent / "cache" / "packed").iterdir()
    description = json.loads((packed / "description.json").read_text("utf-8"))
    del description["layout"]["CLinear"][-1]
    for layer in description["layers"]:
        del layer["down"]["bias"]
    (packed / "description.json").write_text(json.dumps(description), "utf-8")
    second = load_model(folder, dtype="float32", offload=budget(folder))
    assert torch.equal(at_once(first.model, text(20)), at_once(second.model, text(20)))
    assert json.loads((packed / "description.json").read_text("utf-8"))["layout"] == layout()


def test_too_little_memory_is_refused_with_what_is_needed(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"too little for this model: its head and 2 layers need \d+ bytes"):
        load_model(folder, dtype="float32", offload="1KB")


def test_malformed_memory_is_refused_before_the_model_is_resolved() -> None:
    with pytest.raises(ConfigurationError, match="offload is 'much'"):
        load_model("/nowhere", offload="much")
    with pytest.raises(ConfigurationError, match="graphs"):
        load_model("/nowhere", offload="8GB", kernels="graphs")
    with pytest.raises(ConfigurationError, match="already loaded"):
        LLM(lowered("llama"), "none", offload="8GB")


def test_torch_needs_accelerate(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftree.loading.load.find_spec", lambda _: None)
    with pytest.raises(ConfigurationError, match="package 'accelerate'"):
        load_model(folder, dtype="float32", kernels="torch", offload="8GB")


def test_torch_needs_memory_for_the_embedding(folder: Path) -> None:
    pytest.importorskip("accelerate")
    with pytest.raises(ConfigurationError, match=r"offload is '10KB', .* too little for the embedding"):
        load_model(folder, dtype="float32", kernels="torch", offload="10KB")


def test_torch_passes_with_modules_placed_by_accelerate_write_the_same_texts(folder: Path) -> None:
    pytest.importorskip("accelerate")
    plain = LLM(folder, "none", dtype="float32", kernels="torch")
    ours = LLM(folder, dtype="float32", kernels="torch", offload="400KB", draft="ngram")
    assert "disk" in {str(place) for place in ours.model.model.hf_device_map.values()}
    for params in (GREEDY, SAMPLED):
        wanted = [list(one.token_ids) for one in plain.generate(PROMPTS, params)]
        assert [list(one.token_ids) for one in ours.generate(PROMPTS, params)] == wanted
