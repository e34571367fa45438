"""Export of drafters to GGUF files that llama.cpp loads beside its target.

A head's file has the architecture `eagle3` or `dflash` (DSpark included), a whole model's `llama`. Tokens are copied
from the target's GGUF file, since llama.cpp takes the vocabulary size and the token of masked slots from them. Matrices
keep their dtype, vectors become float32. Queries and keys of EAGLE-3 and of Llama models rotate neighbours, so their
rows are interleaved; those of DFlash rotate halves, as ours do.

Source: llama.cpp of llama-cpp-python 0.3.36 (`src/models/eagle3.cpp`, `src/models/dflash.cpp`, `conversion`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftree.core.errors import ConfigurationError, WeightsError, import_extra
from draftree.heads.base import Head
from draftree.heads.config import DFLASH, DSPARK, EAGLE3, HeadConfig
from draftree.heads.layers import Rotary
from draftree.heads.vocabulary import MASK, OFFSETS
from draftree.heads.writers import NUM_FEATURES, ExportTarget, exported_tensors, features_of, require_exportable

LLAMA_CPP = "llama.cpp"
LLAMA_CPP_KINDS = (EAGLE3, DFLASH, DSPARK)
LLAMA = "llama"
PURPOSE = "files for llama.cpp need"
COPIED = "tokenizer.ggml."
NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "fc": "fc",
    "input_norm": "enc.output_norm",
    "hidden_norm": "enc.output_norm",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
LAYER = re.compile(r"layers\.(\d+)\.(.+)")


def export_for_llama_cpp(head: Head, target: ExportTarget, path: Path, *, tokens: Path) -> list[str]:
    """Write a head into a new GGUF file, and return the command lines that serve it.

    Args:
        tokens: GGUF file of the target.
    """
    config = head.config
    require_exportable(config, target, LLAMA_CPP, _reasons(config, target))
    # a bias by the token before is added to logits with the target's scale, which only own rows have
    tensors = exported_tensors(head, target, with_output=config.kind == DSPARK or not config.is_full)
    tensors.pop(MASK, None)
    if OFFSETS in tensors:
        tensors[OFFSETS] = head.vocabulary.ids.cpu()
    keys: dict[str, Any] = {"target_layers": list(features_of(config, target))}
    if config.kind == EAGLE3:
        architecture = method = EAGLE3
        depth = config.depth
        keys |= {name: getattr(config, name) for name in ("norm_before_residual", "norm_before_fc")}
        keys["target_hidden_size"] = config.target_hidden
    else:
        architecture, method = DFLASH, config.kind
        depth = config.block_size - (0 if config.anchor_predicts else 1)
        if not config.confidence_with_markov:
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("confidence_head.")}
        keys |= {
            "block_size": config.block_size,
            "sample_from_anchor": config.anchor_predicts,
            "attention.causal": config.causal,
            "has_confidence_head": any(name.startswith("confidence_head.") for name in tensors),
        }
        if target.embedding_scale != 1.0:
            keys["embedding_scale"] = target.embedding_scale
    _write(path, architecture, config, tensors, keys=keys, tokens=tokens)
    return [f"llama-server -m {tokens} -md {path} --spec-type draft-{method} --spec-draft-n-max {depth}"]


def _reasons(config: HeadConfig, target: ExportTarget) -> dict[str, bool]:
    """Return what llama.cpp cannot read, and whether the head has it."""
    is_eagle = config.kind == EAGLE3
    return {
        f"it reads {', '.join(LLAMA_CPP_KINDS)}": config.kind not in LLAMA_CPP_KINDS,
        "its width differs from its target's": config.hidden != config.target_hidden,
        "it reads the output of the last layer": target.num_layers in features_of(config, target),
        f"it does not read {NUM_FEATURES} hidden states": is_eagle and len(config.features) != NUM_FEATURES,
        "it has more than one layer": is_eagle and config.num_layers > 1,
        "it has norms of queries and keys": is_eagle and config.qk_norm,
        "its queries and keys have no norm": config.is_block and not config.qk_norm,
        "it has a variant of norms (fc_norm or norm_output)": config.fc_norm or config.norm_output,
        "its products have biases": config.attention_bias or config.output_bias or config.fc_bias or config.mlp_bias,
        "the activation is not silu": config.activation != "silu",
        "it has windows": any(config.windows),
        "it scales embedding or logits itself": config.is_block and bool(config.layer),
        "llama.cpp's Markov head is the plain one ('vanilla')": config.kind == DSPARK
        and (not config.markov_rank or config.markov_type != "vanilla"),
        "its anchor predicts, which llama.cpp reads for DSpark only": config.kind == DFLASH and config.anchor_predicts,
    }


def export_llama(values: Mapping[str, Any], tensors: Mapping[str, Tensor], path: Path, *, tokens: Path) -> list[str]:
    """Write a whole Llama model into a new GGUF file, and return the command lines that serve it.

    Args:
        values: content of its `config.json`.
        tensors: weights with the names of transformers.
        tokens: GGUF file of the target.
    """
    if values.get("model_type") != LLAMA:
        raise ConfigurationError(
            f"a model of type '{values.get('model_type')}' cannot be exported to {LLAMA_CPP}: only '{LLAMA}' can; "
            "convert the folder with llama.cpp's convert_hf_to_gguf.py"
        )
    heads, width = values["num_attention_heads"], values["hidden_size"]
    config = HeadConfig(
        kind=EAGLE3,  # only the sizes are used
        features=(0,),
        target_hidden=width,
        hidden=width,
        vocab_size=values["vocab_size"],
        draft_vocab_size=values["vocab_size"],
        depth=1,
        num_layers=values["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=values.get("num_key_value_heads") or heads,
        head_dim=values.get("head_dim") or width // heads,
        intermediate=values["intermediate_size"],
        epsilon=values["rms_norm_eps"],
        rope=values.get("rope_parameters") or {"rope_theta": values.get("rope_theta", 10000.0)},
        max_length=values["max_position_embeddings"],
    )
    named = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    if values.get("tie_word_embeddings"):
        named.pop("lm_head.weight", None)
    _write(path, LLAMA, config, named, keys={}, tokens=tokens)
    return [f"llama-server -m {tokens} -md {path} --spec-type draft-simple"]


def _write(
    path: Path,
    architecture: str,
    config: HeadConfig,
    tensors: Mapping[str, Tensor],
    *,
    keys: Mapping[str, Any],
    tokens: Path,
) -> None:
    gguf = import_extra("gguf", PURPOSE, error=WeightsError)
    if path.exists():
        raise ConfigurationError(f"'{path}' already exists: choose another path")
    copied = [field for name, field in gguf.GGUFReader(tokens).fields.items() if name.startswith(COPIED)]
    count = next((len(field.data) for field in copied if field.name == f"{COPIED}tokens"), 0)
    if count != config.vocab_size:
        raise ConfigurationError(
            f"'{tokens}' has {count} tokens, and the drafter was made for {config.vocab_size}: name its target's file"
        )
    rotary = Rotary(config.rope, config.head_dim, config.max_length)
    theta = config.rope.get("rope_theta", 10000.0)
    plain = Rotary({"rope_theta": theta}, config.head_dim, config.max_length)
    if rotary.scaling != 1.0 or 0.0 in rotary.frequencies:
        raise ConfigurationError(f"rotary positions {dict(config.rope)} cannot be exported to {LLAMA_CPP}")
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture)
    for field in copied:
        if field.name == f"{COPIED}mask_token_id":
            continue
        is_list = field.types[0] == gguf.GGUFValueType.ARRAY
        writer.add_key_value(
            field.name, field.contents(), field.types[0], sub_type=field.types[-1] if is_list else None
        )
    if config.mask_token_id is not None:
        writer.add_mask_token_id(config.mask_token_id)
    writer.add_context_length(config.max_length)
    writer.add_embedding_length(config.hidden)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.epsilon)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(theta)
    writer.add_vocab_size(config.vocab_size)
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    for key, value in keys.items():
        adders[type(value)](f"{architecture}.{key}", value)
    if rotary.frequencies != plain.frequencies:
        factors = torch.tensor(plain.frequencies) / torch.tensor(rotary.frequencies)
        writer.add_tensor("rope_freqs.weight", factors.numpy())
    for name, tensor in tensors.items():
        if architecture != DFLASH:
            tensor = _interleaved(name, tensor, config)
        _add(gguf, writer, gguf_name(name), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    """Return llama.cpp's name of a tensor of a head or a Llama model."""
    if name == OFFSETS:
        return name
    stem, _, end = name.rpartition(".")
    if match := LAYER.fullmatch(stem):
        return f"blk.{match[1]}.{LAYER_NAMES[match[2]]}.{end}"
    return f"{NAMES[stem]}.{end}"


def _interleaved(name: str, tensor: Tensor, config: HeadConfig) -> Tensor:
    """Return rows of queries and keys with both numbers of a rotated pair beside each other, and others as they are."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return tensor
    halves = tensor.unflatten(0, (-1, 2, config.head_dim // 2))
    return halves.transpose(1, 2).flatten(0, 2)


def _add(gguf: Any, writer: Any, name: str, tensor: Tensor) -> None:
    kinds = gguf.GGMLQuantizationType
    if tensor.dim() == 1 and tensor.is_floating_point():
        tensor = tensor.float()
    if tensor.dtype == torch.bfloat16:  # numpy lacks it
        writer.add_tensor(name, tensor.contiguous().view(torch.uint8).numpy(), raw_dtype=kinds.BF16)
    else:
        writer.add_tensor(name, tensor.contiguous().numpy())
