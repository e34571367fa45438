"""Folders as other projects write them are read, or refused with the names of what is missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from block_samples import (
    ALL,
    EAGLE_1,
    EAGLE_3,
    FLASH,
    MEDUSA,
    PARALLEL,
    SECOND,
    SPARK,
    VOCABULARY,
    WIDTH,
    BlockTexts,
    config_of,
    random_head,
    random_parts,
)
from draftree.core.errors import ConfigurationError, ModelError, ModelLoadError, ModelNotFoundError
from draftree.heads.base import BlockRows, Head
from draftree.heads.dflash import DFlashHead
from draftree.heads.folders import check_head, is_head, read_config, read_head, write_head
from draftree.heads.layouts import eagle
from draftree.models.base import EmbeddingFacts

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": 24, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu",
    "max_position_embeddings": 2048, "vocab_size": VOCABULARY, "num_hidden_layers": 1,
}  # fmt: skip
QWEN: dict[str, Any] = {**LLAMA, "model_type": "qwen3", "num_hidden_layers": 2}
Stored = tuple[dict[str, Any], dict[str, Tensor]]


def eagle_1(head: Head) -> Stored:
    return {**LLAMA, "architectures": ["LlamaForCausalLM"], "bias": True}, dict(head.state_dict())


def eagle_3(head: Head) -> Stored:
    tensors = {name.replace("layers.0.", "midlayer."): part for name, part in head.state_dict().items()}
    tensors |= {"d2t": head.vocabulary.offsets(), "t2d": head.vocabulary.mask()}
    layers = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4], "use_aux_hidden_state": True}
    return {**LLAMA, "draft_vocab_size": 24, "eagle_config": layers}, tensors


def eagle_31(head: Head) -> Stored:
    values, tensors = eagle_3(head)
    tensors = {name.replace("midlayer.", "layers.0."): part for name, part in tensors.items()}
    return {**values, "fc_norm": True, "norm_output": True}, tensors


def peagle(head: Head) -> Stored:
    values, tensors = eagle_3(head)
    tensors = {name.replace("midlayer.", "layers.0."): part for name, part in tensors.items()}
    values |= {"ptd_token_id": 47, "parallel_drafting": True, "num_hidden_layers": 2}
    return values, tensors | {"mask_hidden": head.state_dict()["mask_hidden"][0]}


def dflash(head: Head) -> Stored:
    settings = {"mask_token_id": 47, "target_layer_ids": [1, 2, 4]}
    values = {**QWEN, "architectures": ["DFlashDraftModel"], "block_size": 4, "dflash_config": settings}
    return {**values, "layer_types": ["full_attention"] * 2}, dict(head.state_dict())


def jetspec(head: Head) -> Stored:
    values, tensors = dflash(head)
    return {**values, "dflash_config": {**values["dflash_config"], "causal_head": True}}, tensors


def dflash2(head: Head) -> Stored:
    values, tensors = dflash(head)
    selector = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 5}
    values |= {"architectures": ["DFlash2DraftModel"], "is_causal": False}
    return {**values, "dflash_config": {**values["dflash_config"], **selector}}, tensors


def without_layers(head: Head) -> Stored:
    values, tensors = dflash(head)
    return {**values, "num_target_layers": 12, "dflash_config": {"mask_token_id": 47}}, tensors


def of_transformers(head: Head) -> Stored:
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    values = {**QWEN, "model_type": "muse_glimmer_assistant", "block_size": 4, "mask_token_id": 47}
    values |= {"target_layer_ids": [1, 2, 4], "layer_types": ["sliding_attention", "full_attention"]}
    tensors = {names.get(name, name): part for name, part in head.state_dict().items()}
    return {**values, "sliding_window": 7, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, tensors


def dspark(head: Head) -> Stored:
    values = {**QWEN, "architectures": ["Qwen3DSparkModel"], "target_layer_ids": [1, 2, 4], "mask_token_id": 47}
    values |= {"block_size": 4, "markov_rank": 6, "markov_head_type": "vanilla", "enable_confidence_head": True}
    return {**values, "confidence_head_with_markov": True, "num_anchors": 8}, dict(head.state_dict())


def medusa(head: Head) -> Stored:
    tensors = {name.removeprefix("medusa_head."): part for name, part in head.state_dict().items()}
    return {"medusa_num_heads": 3, "medusa_num_layers": 2, "base_model_name_or_path": "org/target"}, tensors


LAYOUTS: dict[str, tuple[dict[str, Any], Callable[[Head], Stored]]] = {
    "eagle": ({**EAGLE_1, "depth": 5, "own_embedding": True}, eagle_1),
    "eagle3": ({**EAGLE_3, "depth": 7}, eagle_3),
    "eagle3.1": ({**EAGLE_3, "depth": 7, "fc_norm": True, "norm_output": True}, eagle_31),
    "peagle": ({**PARALLEL, "depth": 7, "num_layers": 2}, peagle),
    "dflash": (FLASH, dflash),
    "dflash2": (SECOND, dflash2),
    "jetspec": ({**FLASH, "causal": True}, jetspec),
    "dflash without layers": ({**FLASH, "features": (2, 10)}, without_layers),
    "dflash of transformers": ({**FLASH, "windows": (8, 0)}, of_transformers),
    "dspark": ({**SPARK, "own_embedding": True, "draft_vocab_size": VOCABULARY}, dspark),
    "medusa": ({**MEDUSA, "target_name": "org/target"}, medusa),
}


def written(layout: str, folder: Path) -> Head:
    values, store = LAYOUTS[layout]
    head = random_head(config_of(values))
    config, tensors = store(head)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: part.clone() for name, part in tensors.items()}
    if layout == "medusa":
        torch.save(tensors, folder / "medusa_lm_head.pt")
    elif layout == "eagle":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return head


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_head_of_another_project_is_read(layout: str, tmp_path: Path) -> None:
    head = written(layout, tmp_path)
    found = read_head(tmp_path)
    assert check_head(tmp_path) == found.config
    assert found.config == head.config == read_config(tmp_path)
    assert found.vocabulary == head.vocabulary
    assert found.state_dict().keys() == head.state_dict().keys()
    assert all(torch.equal(part, found.state_dict()[name]) for name, part in head.state_dict().items())
    assert not any(part.is_meta for part in found.state_dict().values())


@pytest.mark.parametrize("layout", ["eagle3", "dflash", "dspark"])
def test_missing_and_unexpected_tensors_are_named(layout: str, tmp_path: Path) -> None:
    head = written(layout, tmp_path)
    _, tensors = LAYOUTS[layout][1](head)
    tensors = {name: part.clone() for name, part in tensors.items() if name != "norm.weight"}
    save_file({**tensors, "layers.7.other": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"missing: norm\.weight; unexpected: layers\.7\.other"):
        read_head(tmp_path)


def test_a_dflash_head_names_what_it_does_with_embedding_and_output(tmp_path: Path) -> None:
    written("dflash", tmp_path)
    change(tmp_path, input_embedding_scale=3.0, output_multiplier=1.0, final_logit_softcapping=5.0)
    head = read_head(tmp_path)
    assert isinstance(head, DFlashHead)
    parts = random_parts(head.config)
    # what the target itself does is not done
    head.bind(replace(parts, facts=EmbeddingFacts(7.0, 0.1, soft_cap=2.0)))
    rows = BlockRows(torch.randn(2, 3, WIDTH), torch.tensor([4, 9]), torch.tensor([1, 2]), [2])
    states = BlockTexts(head).run(rows).states
    plain = read_head(written_again("dflash", tmp_path / "plain"))
    assert isinstance(plain, DFlashHead)
    plain.bind(replace(parts, embedding=parts.embedding * 3))
    torch.testing.assert_close(states, BlockTexts(plain).run(rows).states)
    torch.testing.assert_close(head.logits(states), 5 * torch.tanh(plain.logits(states) / 5))


def written_again(layout: str, folder: Path) -> Path:
    folder.mkdir()
    written(layout, folder)
    return folder


def test_hidden_states_follow_from_the_target_where_its_sizes_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = written("eagle3", tmp_path)
    change(tmp_path, eagle_config=...)
    monkeypatch.setitem(eagle.TARGET_LAYERS, (WIDTH, VOCABULARY), 8)
    found = read_head(tmp_path)
    assert found.config == head.config.changed(features=(2, 4, 5), target_layers=8)
    with pytest.raises(ConfigurationError, match="made for a target of 8 layers, and this one has 6"):
        found.bind(random_parts(found.config))


def change(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.update(values)
    (folder / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


REFUSED: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "no layers of the target": (
        "eagle3",
        lambda folder: change(folder, eagle_config=None),
        "eagle_aux_hidden_state_layer_ids",
    ),
    "several layers": ("eagle3", lambda folder: change(folder, num_hidden_layers=2), "head of 2 layers"),
    "no mask token": (
        "dflash",
        lambda folder: change(folder, dflash_config={"target_layer_ids": [1]}),
        "does not have mask_token_id",
    ),
    "a scale": ("dflash", lambda folder: change(folder, output_multiplier="x"), "output_multiplier='x'"),
    "no rank": ("dspark", lambda folder: change(folder, markov_rank=None), "does not have markov_rank"),
    "a Markov type": ("dspark", lambda folder: change(folder, markov_head_type="x"), "markov_type 'x'"),
    "a code in a pickled file": (
        "eagle",
        lambda folder: torch.save({"fc.weight": print}, folder / "pytorch_model.bin"),
        "LlamaForCausalLM|cannot be read",
    ),
    "no outputs": ("medusa", lambda folder: torch.save({}, folder / "medusa_lm_head.pt"), r"missing: 0\.1\.weight"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused_with_the_reason(case: str, tmp_path: Path) -> None:
    layout, spoil, words = REFUSED[case]
    written(layout, tmp_path)
    spoil(tmp_path)
    with pytest.raises(ModelError, match=words) as caught:
        read_head(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("name", ["eagle", "eagle3", "peagle", "dflash", "dflash2", "dspark", "xpress"])
def test_every_kind_of_speculators_is_read_as_it_was_written(name: str, tmp_path: Path) -> None:
    facts = {"target_name": "org/target", "target_architecture": "LlamaForCausalLM", "depth": 2}
    head = random_head(config_of(ALL[name], **facts))
    write_head(head, tmp_path)
    assert read_head(tmp_path).config == check_head(tmp_path) == read_config(tmp_path) == head.config


def test_a_bias_of_fc_and_a_block_without_norms_of_queries_survive_the_folder(tmp_path: Path) -> None:
    for values, others in ((EAGLE_3, {"fc_bias": True}), (FLASH, {"qk_norm": False})):
        head = random_head(config_of(values, **others))
        write_head(head, tmp_path)
        assert read_head(tmp_path).config == check_head(tmp_path) == head.config


def test_an_eagle_1_head_of_speculators_needs_no_list_of_hidden_states(tmp_path: Path) -> None:
    head = random_head(config_of(EAGLE_1))
    write_head(head, tmp_path)
    change(tmp_path, eagle_aux_hidden_state_layer_ids=..., speculators_config=...)
    assert read_head(tmp_path).config == check_head(tmp_path) == head.config


MISSING = {
    "eagle3": (("vocab_size", "intermediate_size"), "intermediate_size, vocab_size"),
    "dflash": (("block_size", "dflash_config"), "target_layer_ids, mask_token_id, block_size"),
    "dspark": (("block_size", "mask_token_id"), "mask_token_id, block_size"),
}


@pytest.mark.parametrize("layout", MISSING)
def test_all_missing_values_are_named_at_once(layout: str, tmp_path: Path) -> None:
    gone, words = MISSING[layout]
    written(layout, tmp_path)
    change(tmp_path, **dict.fromkeys(gone, ...))
    with pytest.raises(ModelLoadError, match=rf"config\.json does not have {words}"):
        read_config(tmp_path)


def test_missing_values_of_speculators_name_the_part(tmp_path: Path) -> None:
    write_head(random_head(config_of(FLASH)), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    layer = {"model_type": "qwen3", "hidden_size": WIDTH}
    change(tmp_path, transformer_layer_config=layer)
    with pytest.raises(ModelLoadError, match="transformer_layer_config does not have num_attention_heads, interm"):
        read_config(tmp_path)
    change(tmp_path, transformer_layer_config=values["transformer_layer_config"], block_size=..., mask_token_id=...)
    with pytest.raises(ModelLoadError, match="does not have mask_token_id, block_size"):
        read_config(tmp_path)


def test_a_folder_without_weights_or_configuration_is_no_head(tmp_path: Path) -> None:
    assert not is_head(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "architectures": ["LlamaForCausalLM"]}))
    assert not is_head(tmp_path)
    with pytest.raises(ModelNotFoundError, match=r"model\.safetensors"):
        read_config(tmp_path)
    written("eagle3", tmp_path)
    assert is_head(tmp_path)


@pytest.mark.parametrize("kind", ["mtp", "dflash3"])
def test_types_of_speculators_without_a_reader_are_named(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"speculators_model_type": kind}))
    with pytest.raises(ModelError, match="transformer_layer_config" if kind == "mtp" else kind):
        read_head(tmp_path)
