"""Layout of speculators, which vLLM reads: `config.json` with `speculators_model_type`, and `model.safetensors`.

Tensors have the names of our parameters, and hidden states are counted as ours: index l is `hidden_states[l]` of
transformers. Draftree stores its own heads in this layout. vLLM and speculators have different defaults for values that
are absent: every value is written, and an absent one has the default of speculators when it is read.

Source: speculators 0.9.0, github.com/vllm-project/speculators.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from draftree.core.errors import ModelLoadError, suggestion
from draftree.heads.config import (
    DFLASH,
    DFLASH2,
    DSPARK,
    EAGLE,
    EAGLE3,
    FLASH_KINDS,
    LAST_LAYER,
    MTP,
    NORMS,
    PEAGLE,
    XPRESS,
    HeadConfig,
)
from draftree.heads.layouts import (
    LLAMA,
    QWEN3,
    HeadFolder,
    Values,
    layer_values,
    layers_json,
    mtp,
    selector_json,
    selector_values,
    windows_of,
)
from draftree.heads.vocabulary import EMBEDDING, OUTPUT

NAME = "speculators"
TYPE = "speculators_model_type"
LAYERS, METHODS = "transformer_layer_config", "speculators_config"
FEATURES, BLOCK_FEATURES = "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"
ARCHITECTURES = {
    EAGLE: "EagleSpeculator",
    EAGLE3: "Eagle3Speculator",
    PEAGLE: "PEagleSpeculator",
    DFLASH: "DFlashSpeculator",
    DFLASH2: "DFlash2DraftModel",
    DSPARK: "DSparkSpeculator",
    XPRESS: "XPressSpeculator",
}
"""Kinds that can be written."""
KINDS = (*ARCHITECTURES, MTP)
"""Kinds that can be read."""
VERSION = "0.9.0"
"""Version of speculators whose layout this is."""
TARGETS_OWN = ("verifier_lm_head.weight", "verifier_norm.weight")
"""Copies of the target's tensors that older versions saved; the target's own are used."""
DEPTH = 3
"""Levels of a draft if the configuration names none."""


def recognise(folder: HeadFolder) -> bool:
    return TYPE in folder.values


def configure(folder: HeadFolder) -> HeadConfig:
    """Return the configuration; own embedding, own output head and biases follow from the tensors."""
    values = folder.values
    kind = values.text(TYPE)
    if kind not in KINDS:
        raise ModelLoadError(f"config.json has {TYPE} '{kind}': {suggestion(kind, KINDS)}")
    layer = values.part(LAYERS)
    if kind == MTP:
        return mtp.layer_config(layer, mtp.shapes_of(folder, *mtp.OF_SPECULATORS), **_method(values))
    names = folder.shapes
    model_type = layer.text("model_type", LLAMA)
    if model_type not in (LLAMA, QWEN3):
        raise ModelLoadError(f"{LAYERS} has model_type={model_type!r}: layers of '{LLAMA}' and '{QWEN3}' are supported")
    known = layer_values(layer)
    known["attention_bias"] |= "layers.0.self_attn.q_proj.bias" in names
    if kind in FLASH_KINDS:
        known |= _block(values, layer, kind)
    else:
        has_default = kind == EAGLE and values.get(FEATURES) is None
        known["features"] = (LAST_LAYER,) if has_default else values.layers(FEATURES)
        known |= {name: values.flag(name) for name in NORMS}
    return HeadConfig(
        **known,
        **_method(values),
        kind=kind,
        target_hidden=values.whole("target_hidden_size", known["hidden"]),
        draft_vocab_size=values.whole("draft_vocab_size", known["vocab_size"]),
        qk_norm=model_type == QWEN3 or "layers.0.self_attn.q_norm.weight" in names,
        output_bias="layers.0.self_attn.o_proj.bias" in names,
        fc_bias="fc.bias" in names or values.flag("fusion_bias"),
        own_embedding=EMBEDDING in names,
        own_output=OUTPUT in names,
        mask_token_id=None if values.get("mask_token_id") is None else values.whole("mask_token_id"),
    )


def tensors(folder: HeadFolder) -> dict[str, Tensor]:
    """Return the tensors, whose names are ours."""
    if folder.values.get(TYPE) == MTP:
        return mtp.renamed(folder, *mtp.OF_SPECULATORS)
    return folder.tensors(lambda name: name not in TARGETS_OWN)


def values(config: HeadConfig) -> dict[str, Any]:
    """Return the content of `config.json` for a head."""
    if config.kind not in ARCHITECTURES:
        raise ModelLoadError(f"heads of kind '{config.kind}' cannot be written in the layout '{NAME}'")
    content: dict[str, Any] = {
        "architectures": [ARCHITECTURES[config.kind]],
        TYPE: config.kind,
        "speculators_version": VERSION,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden,
        BLOCK_FEATURES if config.is_block else FEATURES: list(config.features),
        # vLLM takes the width of `fc` from the layers, not from the list of hidden states
        LAYERS: {**layers_json(config), "num_aux_hidden_states": len(config.features)},
        METHODS: {
            "algorithm": config.kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": config.depth,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": config.target_name,
                "architectures": [config.target_architecture] if config.target_architecture else [],
            },
        },
    }
    if config.kind == EAGLE:
        return content | {"layernorms": False, "fusion_bias": config.fc_bias}
    if config.kind == PEAGLE or config.is_block:
        content["mask_token_id"] = config.mask_token_id
    if not config.is_block:
        norms = {name: getattr(config, name) for name in NORMS}
        return content | norms | {"embed_requires_grad": config.kind == PEAGLE}
    content |= {
        "block_size": config.block_size,
        "sample_from_anchor": config.anchor_predicts,
        "sliding_window_non_causal": not config.causal_windows,
        "is_causal": config.causal,
    }
    if config.kind == DFLASH2:
        content |= selector_json(config)
    if config.kind == XPRESS:
        content |= {
            "xpress_rank": config.markov_rank,
            "xpress_mlp_ratio": config.refiner_width // config.markov_rank,
            "num_jacobi_passes": config.block_size,
        }
    if config.kind == DSPARK:
        content |= {
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov_type,
            "enable_confidence_head": config.has_confidence,
            "confidence_head_with_markov": config.confidence_with_markov,
        }
    return content


def _block(values: Values, layer: Values, kind: str) -> dict[str, Any]:
    """Return the values of DFlash and its variants."""
    values.require(BLOCK_FEATURES, "mask_token_id", "block_size")
    block = {
        "features": values.layers(BLOCK_FEATURES),
        "block_size": values.whole("block_size"),
        "anchor_predicts": values.flag("sample_from_anchor", default=kind == DSPARK),
        "windows": windows_of(layer),
        "causal": values.flag("is_causal"),  # of our own folders
        "causal_windows": not values.flag("sliding_window_non_causal", default=kind == DFLASH2),
    }
    if kind == DFLASH:
        return block
    if kind == DFLASH2:
        return block | selector_values(values)
    if kind == XPRESS:
        rank = values.whole("xpress_rank", 256)
        return block | {"markov_rank": rank, "refiner_width": rank * values.whole("xpress_mlp_ratio", 2)}
    has_confidence = values.flag("enable_confidence_head", default=True)
    return block | {
        "markov_rank": values.whole("markov_rank", 256),
        "markov_type": values.text("markov_head_type", "vanilla"),
        "has_confidence": has_confidence,
        "confidence_with_markov": values.flag("confidence_head_with_markov", default=True) and has_confidence,
    }


def _method(values: Values) -> dict[str, Any]:
    """Return depth and target."""
    method = values.part(METHODS, optional=True)
    target = method.part("verifier", optional=True)
    proposals = method.parts("proposal_methods")
    depth = values.whole("block_size", DEPTH)
    return {
        "depth": proposals[0].whole("speculative_tokens", depth) if proposals else depth,
        "target_name": target.text("name_or_path"),
        "target_architecture": next(iter(target.texts("architectures")), ""),
    }
