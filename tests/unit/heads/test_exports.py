"""Tensors of heads have the names of other projects; exports avoid every trap of the two layouts, and are read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
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
from draftree.heads.llama_cpp import export_for_llama_cpp, export_llama
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


def tokens_file(path: Path, count: int = VOCABULARY) -> Path:
    """A GGUF file with tokens only."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{index}" for index in range(count)])
    writer.add_token_types([1] * count)
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def written(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Keys and tensors of a GGUF file, bfloat16 as such."""
    reader = gguf.GGUFReader(path)
    tensors = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(np.array(tensor.data))
        is_bfloat16 = tensor.tensor_type == gguf.GGMLQuantizationType.BF16
        tensors[tensor.name] = values.view(torch.bfloat16) if is_bfloat16 else values
    return {name: field.contents() for name, field in reader.fields.items()}, tensors


def rotated_pairs(values: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of heads with number i and number i + half of it beside each other."""
    half = head_dim // 2
    rows = [at + i + part * half for at in range(0, len(values), head_dim) for i in range(half) for part in (0, 1)]
    return values[rows]


def to_llama_cpp(values: dict[str, Any], folder: Path, *, dtype: torch.dtype = torch.float32, **others: Any) -> Any:
    config = config_of(values, **others)
    head = random_head(config).to(dtype)
    tokens = tokens_file(folder / "target.gguf")
    lines = export_for_llama_cpp(head, target_of(config), folder / "out.gguf", tokens=tokens)
    return head, *written(folder / "out.gguf"), lines


LAYER_TENSORS = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_eagle3_head_for_llama_cpp_has_its_names_and_our_values(dtype: torch.dtype, tmp_path: Path) -> None:
    head, keys, tensors, lines = to_llama_cpp(EAGLE_3, tmp_path, dtype=dtype, norm_before_fc=True, own_output=False)
    mine = head.state_dict()
    names = {f"layers.0.{name}.weight": f"blk.0.{short}.weight" for name, short in LAYER_TENSORS.items()}
    names["layers.0.hidden_norm.weight"] = "blk.0.attn_norm_2.weight"
    names |= {"fc.weight": "fc.weight", "norm.weight": "output_norm.weight"}
    names["input_norm.weight"] = "enc.output_norm.weight"
    assert mine.keys() == names.keys()
    assert tensors.keys() == {*names.values(), "d2t", "output.weight"}
    for name, short in names.items():
        expected = mine[name] if mine[name].dim() > 1 else mine[name].float()
        expected = rotated_pairs(expected, 8) if name.endswith(("q_proj.weight", "k_proj.weight")) else expected
        assert tensors[short].dtype == expected.dtype
        assert torch.equal(tensors[short], expected), name
    assert torch.equal(tensors["d2t"], head.vocabulary.ids)  # llama.cpp wants token ids, not offsets
    assert torch.equal(tensors["output.weight"], target_of(head.config).output[head.vocabulary.ids].to(dtype))
    assert keys["general.architecture"] == "eagle3"
    assert keys["eagle3.target_layers"] == [2, 3, 5]
    assert (keys["eagle3.norm_before_fc"], keys["eagle3.norm_before_residual"]) == (True, False)
    assert (keys["eagle3.target_hidden_size"], keys["eagle3.block_count"]) == (WIDTH, 1)
    assert len(keys["tokenizer.ggml.tokens"]) == VOCABULARY
    assert keys["tokenizer.ggml.eos_token_id"] == 2
    assert lines[0].endswith("--spec-type draft-eagle3 --spec-draft-n-max 3")


@pytest.mark.parametrize(("values", "depth"), [(FLASH, 3), (SPARK, 4)])
def test_a_block_head_for_llama_cpp_has_its_names_and_our_values(
    values: dict[str, Any], depth: int, tmp_path: Path
) -> None:
    head, keys, tensors, lines = to_llama_cpp(values, tmp_path)
    mine = head.state_dict()
    layers = {**LAYER_TENSORS, "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
    names = {f"layers.{i}.{name}.weight": f"blk.{i}.{short}.weight" for i in (0, 1) for name, short in layers.items()}
    names |= {"fc.weight": "fc.weight", "hidden_norm.weight": "enc.output_norm.weight"}
    names["norm.weight"] = "output_norm.weight"
    is_spark = head.config.kind == "dspark"
    if is_spark:
        names |= {f"markov_head.markov_w{i}.weight": f"markov_w{i}.weight" for i in (1, 2)}
        names |= {f"confidence_head.proj.{end}": f"conf_proj.{end}" for end in ("weight", "bias")}
        names["lm_head.weight"] = "output.weight"
    assert mine.keys() == names.keys()
    assert tensors.keys() == {*names.values(), *(["d2t"] if is_spark else [])}
    for name, short in names.items():
        assert torch.equal(tensors[short], mine[name]), name
    assert keys["general.architecture"] == "dflash"
    assert keys["dflash.target_layers"] == [2, 3, 5]
    assert (keys["dflash.block_size"], keys["tokenizer.ggml.mask_token_id"]) == (4, 47)
    assert (keys["dflash.sample_from_anchor"], keys["dflash.has_confidence_head"]) == (is_spark, is_spark)
    assert lines[0].endswith(f"--spec-type draft-{head.config.kind} --spec-draft-n-max {depth}")


def test_scaled_positions_are_factors_for_llama_cpp(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    _, keys, tensors, _ = to_llama_cpp(EAGLE_3, tmp_path, rope=rope)
    assert tensors["rope_freqs.weight"].tolist() == [4.0] * 4
    assert keys["eagle3.rope.freq_base"] == 10000.0


def test_a_small_llama_for_llama_cpp_is_a_llama(tmp_path: Path) -> None:
    values = {
        "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "tie_word_embeddings": True,
    }  # fmt: skip
    weights = {"model.embed_tokens.weight": torch.randn(VOCABULARY, WIDTH), "model.norm.weight": torch.rand(WIDTH)}
    weights |= {
        f"model.{name}": torch.randn(shape) for name, shape in layer_shapes(config_of(EAGLE_3), 0, WIDTH).items()
    }
    weights["model.layers.0.input_layernorm.weight"] = torch.rand(WIDTH)
    tokens = tokens_file(tmp_path / "target.gguf")
    export_llama(values, weights, tmp_path / "out.gguf", tokens=tokens)
    keys, tensors = written(tmp_path / "out.gguf")
    assert keys["general.architecture"] == "llama"
    assert tensors.keys() == {
        "token_embd.weight", "output_norm.weight", *(f"blk.0.{name}.weight" for name in LAYER_TENSORS.values()),
    }  # fmt: skip
    assert torch.equal(
        tensors["blk.0.attn_k.weight"], rotated_pairs(weights["model.layers.0.self_attn.k_proj.weight"], 8)
    )
    assert torch.equal(tensors["token_embd.weight"], weights["model.embed_tokens.weight"])
    with pytest.raises(ConfigurationError, match="convert_hf_to_gguf"):
        export_llama({**values, "model_type": "qwen3"}, weights, tmp_path / "other.gguf", tokens=tokens)


LLAMA_CPP_REFUSALS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (PARALLEL, {}, "it reads eagle3, dflash, dspark"),
    (EAGLE_3, {"features": (2, 3)}, "3 hidden states"),
    (EAGLE_3, {"features": (2, 3, -1)}, "the output of the last layer"),
    (EAGLE_3, {"qk_norm": True}, "norms of queries"),
    (EAGLE_3, {"norm_output": True}, "variant of norms"),
    (FLASH, {"anchor_predicts": True}, "for DSpark only"),
    (FLASH, {"windows": (8, 0)}, "windows"),
    (SPARK, {"markov_type": "rnn"}, "vanilla"),
    (EAGLE_3, {"rope": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "rotary positions"),
]


@pytest.mark.parametrize(("values", "others", "words"), LLAMA_CPP_REFUSALS)
def test_heads_that_llama_cpp_would_read_wrongly_are_refused(
    values: dict[str, Any], others: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        to_llama_cpp(values, tmp_path, **others)
    assert not (tmp_path / "out.gguf").exists()


def test_tokens_of_another_target_are_refused(tmp_path: Path) -> None:
    config = config_of(EAGLE_3)
    tokens = tokens_file(tmp_path / "target.gguf", VOCABULARY + 1)
    with pytest.raises(ConfigurationError, match="has 49 tokens"):
        export_for_llama_cpp(random_head(config), target_of(config), tmp_path / "out.gguf", tokens=tokens)
