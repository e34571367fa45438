"""Tensors of heads have the names of other projects; exports avoid every trap of the two layouts, and are read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from block_samples import (
    ALL,
    DRAFTED,
    EAGLE_1,
    EAGLE_3,
    FLASH,
    LAYERS,
    MEDUSA,
    PARALLEL,
    SPARK,
    VOCABULARY,
    WIDTH,
    config_of,
    random_head,
    random_parts,
)
from draftree.core.errors import ConfigurationError
from draftree.heads.config import HeadConfig
from draftree.heads.folders import read_head
from draftree.heads.writers import ExportTarget, export_for_sglang, export_for_vllm

Shapes = dict[str, tuple[int, ...]]


def tensor_shapes(config: HeadConfig) -> Shapes:
    """Shape of each tensor of a head, by name; MTP has none here, since its layers are those of its target."""
    if config.kind == "eagle":
        found = _eagle(config)
    elif config.kind in ("eagle3", "peagle"):
        found = _eagle3(config)
    elif config.kind == "medusa":
        found = _medusa(config)
    else:
        found = _block(config)
    if config.own_embedding:
        found["embed_tokens.weight"] = (config.vocab_size, config.hidden)
    if config.own_output and config.kind != "medusa":
        found["lm_head.weight"] = (config.draft_vocab_size, config.hidden)
    return found


def layer_shapes(config: HeadConfig, index: int, width: int) -> Shapes:
    """Shapes of a decoder layer without norms before it; `width` is that of the input of its attention."""
    at, inner = f"layers.{index}.", config.intermediate
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    found: Shapes = {
        f"{at}self_attn.q_proj.weight": (queries, width),
        f"{at}self_attn.k_proj.weight": (keys, width),
        f"{at}self_attn.v_proj.weight": (keys, width),
        f"{at}self_attn.o_proj.weight": (config.hidden, queries),
        f"{at}mlp.gate_proj.weight": (inner, config.hidden),
        f"{at}mlp.up_proj.weight": (inner, config.hidden),
        f"{at}mlp.down_proj.weight": (config.hidden, inner),
        f"{at}post_attention_layernorm.weight": (config.hidden,),
    }
    if config.attention_bias:
        sizes = {"q": queries, "k": keys, "v": keys}
        found |= {f"{at}self_attn.{name}_proj.bias": (size,) for name, size in sizes.items()}
    if config.output_bias:
        found[f"{at}self_attn.o_proj.bias"] = (config.hidden,)
    if config.mlp_bias:
        sizes = {"gate": inner, "up": inner, "down": config.hidden}
        found |= {f"{at}mlp.{name}_proj.bias": (size,) for name, size in sizes.items()}
    if config.qk_norm:
        found |= {f"{at}self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
    return found


def _eagle(config: HeadConfig) -> Shapes:
    found: Shapes = {"fc.weight": (config.hidden, config.hidden + config.target_hidden)}
    if config.fc_bias:
        found["fc.bias"] = (config.hidden,)
    for index in range(config.num_layers):
        found |= layer_shapes(config, index, config.hidden)
        if index:
            found[f"layers.{index}.input_layernorm.weight"] = (config.hidden,)
    return found


def _eagle3(config: HeadConfig) -> Shapes:
    width, total = config.hidden, len(config.features) * config.target_hidden
    found: Shapes = {"fc.weight": (width, total), "norm.weight": (width,)}
    if config.fc_bias:
        found["fc.bias"] = (width,)
    for index in range(config.num_layers):
        found |= layer_shapes(config, index, width if index else 2 * width)
        found[f"layers.{index}.input_layernorm.weight"] = (width,)
    found["layers.0.hidden_norm.weight"] = (width,)
    if config.norm_before_fc:
        found["input_norm.weight"] = (total,)
    if config.fc_norm:
        found |= {f"fc_norm.{index}.weight": (config.target_hidden,) for index in range(len(config.features))}
    if config.kind == "peagle":
        found["mask_hidden"] = (1, 1, total)
    return found


def _block(config: HeadConfig) -> Shapes:
    width, rank = config.hidden, config.markov_rank
    found: Shapes = {
        "fc.weight": (width, len(config.features) * config.target_hidden),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    for index in range(config.num_layers):
        found |= layer_shapes(config, index, width)
        found[f"layers.{index}.input_layernorm.weight"] = (width,)
        if config.kind == "dflash2":
            groups = width // config.conv_group
            for part in ("attention", "mlp"):
                found[f"layers.{index}.{part}_conv.base_kernel"] = (2, config.conv_taps, width)
                found[f"layers.{index}.{part}_conv.kernel_projection.weight"] = (2 * config.conv_taps * groups, width)
    if config.kind == "dflash2":
        found["candidate_selector.predecessor_codebook"] = (config.vocab_size, rank)
        found["candidate_selector.successor_codebook"] = (config.vocab_size, rank)
        found["candidate_selector.hidden_projection.weight"] = (rank, width)
    elif config.kind == "xpress":
        inner = config.refiner_width
        sizes = {"token_embed": (config.vocab_size, rank), "down_h": (rank, width), "down_g": (rank, width)}
        sizes |= {"in_proj": (rank, 3 * rank), "mlp_gate": (inner, rank), "mlp_up": (inner, rank)}
        sizes |= {"mlp_down": (rank, inner), "readout": (config.draft_vocab_size, rank)}
        found |= {f"refiner_head.{name}.weight": shape for name, shape in sizes.items()}
        found["refiner_head.mix_l"] = (rank, config.block_size, config.block_size)
    elif rank:
        found["markov_head.markov_w1.weight"] = (config.vocab_size, rank)
        found["markov_head.markov_w2.weight"] = (config.draft_vocab_size, rank)
        if config.markov_type == "gated":
            found["markov_head.gate_proj.weight"] = (rank, width + rank)
            found["markov_head.gate_proj.bias"] = (rank,)
        elif config.markov_type == "rnn":
            found["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + width)
            found["markov_head.joint_proj.bias"] = (3 * rank,)
    if config.has_confidence:
        found["confidence_head.proj.weight"] = (1, width + (rank if config.confidence_with_markov else 0))
        found["confidence_head.proj.bias"] = (1,)
    return found


def _medusa(config: HeadConfig) -> Shapes:
    width, found = config.hidden, Shapes()
    for head in range(config.block_size):
        for index in range(config.head_layers):
            found[f"medusa_head.{head}.{index}.linear.weight"] = (width, width)
            found[f"medusa_head.{head}.{index}.linear.bias"] = (width,)
        found[f"medusa_head.{head}.{config.head_layers}.weight"] = (config.draft_vocab_size, width)
    return found


VARIANTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *((values, {}) for values in ALL.values()),
    (EAGLE_3, {"fc_norm": True, "norm_output": True, "num_layers": 2}),
    (EAGLE_3, {"norm_before_fc": True, "qk_norm": True, "own_embedding": True, "own_output": False}),
    (EAGLE_3, {"attention_bias": True, "output_bias": True, "mlp_bias": True, "fc_bias": True}),
    (EAGLE_1, {"num_layers": 2, "fc_bias": False, "attention_bias": True}),
    (PARALLEL, {"own_embedding": True}),
    (FLASH, {"attention_bias": True, "output_bias": True, "own_output": True, "draft_vocab_size": DRAFTED}),
    (SPARK, {"markov_type": "gated", "confidence_with_markov": False}),
    (SPARK, {"markov_type": "rnn", "has_confidence": False, "confidence_with_markov": False, "own_embedding": True}),
    (SPARK, {"markov_rank": 0, "confidence_with_markov": False}),
]


@pytest.mark.parametrize(("values", "others"), VARIANTS)
def test_parameters_have_the_names_and_shapes_of_other_projects(values: dict[str, Any], others: dict[str, Any]) -> None:
    config = config_of(values, **others)
    found = {name: tuple(tensor.shape) for name, tensor in random_head(config).state_dict().items()}
    assert found == tensor_shapes(config)


LAYER = "transformer_layer_config"


def target_of(config: HeadConfig) -> ExportTarget:
    return ExportTarget("org/target", "LlamaForCausalLM", LAYERS, config.target_hidden, random_parts(config).output)


def exported(
    values: dict[str, Any], folder: Path, writer: Any = export_for_vllm, **others: Any
) -> tuple[dict[str, Any], dict[str, torch.Tensor], list[str]]:
    config = config_of(values, **others)
    lines = writer(random_head(config), target_of(config), folder / "out")
    return json.loads((folder / "out/config.json").read_text()), load_file(folder / "out/model.safetensors"), lines


def test_values_with_other_defaults_in_vllm_are_always_written(tmp_path: Path) -> None:
    values, _, _ = exported(EAGLE_3, tmp_path / "eagle3")
    assert values["norm_before_residual"] is False
    assert {values[name] for name in ("norm_before_fc", "fc_norm", "norm_output")} == {False}
    values, _, _ = exported(FLASH, tmp_path / "dflash")
    assert (values["sample_from_anchor"], values["sliding_window_non_causal"]) == (False, True)
    values, _, _ = exported(SPARK, tmp_path / "dspark")
    assert (values["sample_from_anchor"], values["sliding_window_non_causal"]) == (True, True)
    values, _, _ = exported(FLASH, tmp_path / "windows", windows=(8, 0), causal_windows=True)
    assert values["sliding_window_non_causal"] is False
    assert values[LAYER]["layer_types"] == ["sliding_attention", "full_attention"]
    assert values[LAYER]["sliding_window"] == 8


def test_the_number_of_hidden_states_is_written_where_vllm_reads_it(tmp_path: Path) -> None:
    values, tensors, _ = exported(EAGLE_3, tmp_path, features=(2, 4))
    assert values[LAYER]["num_aux_hidden_states"] == 2
    assert tensors["fc.weight"].shape == (WIDTH, 2 * WIDTH)


def test_hidden_states_are_numbered_as_each_layout_does(tmp_path: Path) -> None:
    values, _, _ = exported(EAGLE_3, tmp_path / "a", features=(2, 3, -1))
    assert values["eagle_aux_hidden_state_layer_ids"] == [2, 3, LAYERS]
    values, _, _ = exported(FLASH, tmp_path / "b")
    assert values["aux_hidden_state_layer_ids"] == [2, 3, 5]
    values, _, _ = exported(EAGLE_3, tmp_path / "c", export_for_sglang)
    assert values["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [1, 2, 4], "use_aux_hidden_state": True}
    values, _, _ = exported(FLASH, tmp_path / "d", export_for_sglang)
    assert values["dflash_config"] == {"mask_token_id": 47, "target_layer_ids": [1, 2, 4]}
    assert (values["architectures"], values["num_target_layers"], values["block_size"]) == (
        ["DFlashDraftModel"], LAYERS, 4,
    )  # fmt: skip


def test_maps_are_offsets_and_masks_of_the_target(tmp_path: Path) -> None:
    for writer in (export_for_vllm, export_for_sglang):
        values, tensors, _ = exported(EAGLE_3, tmp_path / writer.__name__, writer)
        ids = torch.arange(DRAFTED) + tensors["d2t"]
        assert tensors["d2t"].dtype == torch.int64
        assert tensors["t2d"].dtype == torch.bool
        assert ids.tolist() == tensors["t2d"].nonzero()[:, 0].tolist()
        layer = values.get(LAYER, values)
        assert (layer["vocab_size"], values["draft_vocab_size"]) == (VOCABULARY, DRAFTED)
        assert layer["tie_word_embeddings"] is False
    _, tensors, _ = exported(EAGLE_3, tmp_path / "full", draft_vocab_size=VOCABULARY)
    assert "d2t" not in tensors
    assert tensors["lm_head.weight"].shape == (VOCABULARY, WIDTH)


def test_a_shared_output_is_written_as_the_targets_rows(tmp_path: Path) -> None:
    config = config_of(EAGLE_3, own_output=False)
    for writer in (export_for_vllm, export_for_sglang):
        _, tensors, _ = exported(EAGLE_3, tmp_path / writer.__name__, writer, own_output=False)
        expected = target_of(config).output[torch.arange(DRAFTED) * 2]
        torch.testing.assert_close(tensors["lm_head.weight"], expected)
    _, tensors, _ = exported(FLASH, tmp_path / "flash")
    assert not {"lm_head.weight", "embed_tokens.weight", "mask_hidden"} & set(tensors)


def test_names_for_sglang_are_those_of_its_modules(tmp_path: Path) -> None:
    values, tensors, lines = exported(EAGLE_3, tmp_path, export_for_sglang)
    products = [f"self_attn.{name}_proj.weight" for name in "qkvo"]
    products += [f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    norms = ["input_layernorm.weight", "hidden_norm.weight", "post_attention_layernorm.weight"]
    assert set(tensors) == {
        *(f"midlayer.{name}" for name in (*products, *norms)),
        "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d",
    }  # fmt: skip
    assert (values["architectures"], values["num_hidden_layers"]) == (["LlamaForCausalLMEagle3"], 1)
    assert lines == [
        "python -m sglang.launch_server --model-path org/target --speculative-algorithm EAGLE3 "
        f"--speculative-draft-model-path {tmp_path / 'out'} --speculative-num-steps 3 --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens 4"
    ]


@pytest.mark.parametrize("values", [EAGLE_3, PARALLEL, FLASH, SPARK])
def test_an_export_to_speculators_is_read_back_with_equal_logits(values: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(values)
    head = random_head(config)
    export_for_vllm(head, target_of(config), tmp_path / "out")
    found = read_head(tmp_path / "out")
    assert found.config.changed(target_name="", target_architecture="", depth=config.depth) == config
    assert found.vocabulary == head.vocabulary
    for name, tensor in head.state_dict().items():
        assert torch.equal(tensor, found.state_dict()[name]), name
    assert {n: tuple(t.shape) for n, t in found.state_dict().items()} == tensor_shapes(config)


@pytest.mark.parametrize("values", [EAGLE_3, FLASH])
def test_an_export_to_sglang_is_read_back_with_equal_tensors(values: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(values)
    head = random_head(config)
    export_for_sglang(head, target_of(config), tmp_path / "out")
    found = read_head(tmp_path / "out")
    assert found.config.features == config.features
    assert found.vocabulary == head.vocabulary
    assert found.state_dict().keys() == head.state_dict().keys()
    assert all(torch.equal(tensor, found.state_dict()[name]) for name, tensor in head.state_dict().items())


def test_one_switch_for_all_biases_of_attention(tmp_path: Path) -> None:
    values, tensors, _ = exported(EAGLE_3, tmp_path, attention_bias=True)
    assert values[LAYER]["attention_bias"] is True
    assert tensors["layers.0.self_attn.o_proj.bias"].eq(0).all()


REFUSALS: list[tuple[Any, dict[str, Any], dict[str, Any], str]] = [
    (export_for_vllm, EAGLE_1, {}, "the layout has eagle3"),
    (export_for_vllm, MEDUSA, {}, "the layout has eagle3"),
    (export_for_vllm, EAGLE_3, {"hidden": 8, "own_embedding": True}, "width differs"),
    (export_for_vllm, PARALLEL, {"fc_norm": True}, "of EAGLE-3 only"),
    (export_for_vllm, SPARK, {"markov_type": "rnn"}, "vanilla"),
    (export_for_vllm, FLASH, {"anchor_predicts": True}, "for DSpark only"),
    (export_for_vllm, FLASH, {"windows": (8, 4)}, "several widths"),
    (export_for_sglang, SPARK, {}, "it reads eagle3, dflash"),
    (export_for_sglang, EAGLE_3, {"features": (2, 3)}, "3 hidden states"),
    (export_for_sglang, EAGLE_3, {"features": (0, 2, 3)}, "embedding as a hidden state"),
    (export_for_sglang, EAGLE_3, {"norm_output": True}, "variant of norms"),
    (export_for_sglang, EAGLE_3, {"num_layers": 2}, "more than one layer"),
    (export_for_sglang, EAGLE_3, {"qk_norm": True}, "norms of queries"),
    (export_for_sglang, FLASH, {"own_output": True, "draft_vocab_size": DRAFTED}, "vocabulary is reduced"),
]


@pytest.mark.parametrize(("writer", "values", "others", "words"), REFUSALS)
def test_heads_that_a_server_would_read_wrongly_are_refused(
    writer: Any, values: dict[str, Any], others: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        exported(values, tmp_path, writer, **others)
    assert not (tmp_path / "out").exists()


def test_another_target_and_a_full_folder_are_refused(tmp_path: Path) -> None:
    config = config_of(EAGLE_3)
    other = ExportTarget("org/other", "LlamaForCausalLM", LAYERS, WIDTH, torch.zeros(VOCABULARY + 1, WIDTH))
    with pytest.raises(ConfigurationError, match="org/other"):
        export_for_vllm(random_head(config), other, tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/kept").write_text("")
    with pytest.raises(ConfigurationError, match="not an empty folder"):
        export_for_vllm(random_head(config), target_of(config), tmp_path / "out")
