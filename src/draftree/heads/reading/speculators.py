"""Layout of the speculators library, which vLLM reads: `config.json` with `speculators_model_type`, and safetensors.

Tensor names are ours. Hidden states are numbered as in transformers (`hidden_states`), so as ours. Absent flags have
the defaults of the library, which are not those of vLLM.

Source: speculators 0.9.0, github.com/vllm-project/speculators.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from draftree.core.errors import ModelLoadError, suggestion
from draftree.heads.config import DFLASH, DSPARK, EAGLE3, MTP, PEAGLE, HeadConfig
from draftree.heads.reading import mtp
from draftree.heads.reading.folder import HeadFolder
from draftree.heads.reading.layout import (
    TargetFacts,
    default_features,
    layer_values,
    needed,
    windows_of,
)
from draftree.heads.tensors import EMBEDDING, OUTPUT

NAME = "speculators"
TYPE = "speculators_model_type"
KINDS = (EAGLE3, PEAGLE, DFLASH, DSPARK, MTP)
TARGETS_OWN = ("verifier_lm_head.weight", "verifier_norm.weight")
"""Copies of the target's tensors that older versions saved; the target's own are used."""


def recognise(folder: HeadFolder) -> bool:
    """Return whether the folder has this layout."""
    return TYPE in folder.config


def configure(folder: HeadFolder, target: TargetFacts | None) -> HeadConfig:
    """Return the configuration.

    Raises:
        ModelLoadError: the type is not supported, or values are missing.
    """
    kind = folder.config[TYPE]
    if kind not in KINDS:
        raise ModelLoadError(f"'{folder.path}' has {TYPE} '{kind}': {suggestion(str(kind), KINDS)}")
    layer = folder.config.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        raise ModelLoadError(f"'{folder.path}' has a config.json without transformer_layer_config: it is needed")
    if kind == MTP:
        return mtp.layer_config(folder, layer, depth=_depth(folder), target_name=target_name(folder))
    names = folder.shapes
    values = {
        **layer_values(layer, folder),
        "kind": kind,
        "target_hidden": folder.config.get("target_hidden_size") or layer["hidden_size"],
        "vocab_size": needed(layer, ("vocab_size",), folder)[0],
        "depth": _depth(folder),
        "qk_norm": layer.get("model_type") == "qwen3" or kind in (DFLASH, DSPARK),
        "attention_bias": "layers.0.self_attn.q_proj.bias" in names,
        "output_bias": "layers.0.self_attn.o_proj.bias" in names,
        "own_embedding": EMBEDDING in names,
        "own_output": OUTPUT in names,
        "target_name": target_name(folder),
    }
    values["draft_vocab_size"] = folder.config.get("draft_vocab_size") or values["vocab_size"]
    values |= _eagle3(folder, target) if kind in (EAGLE3, PEAGLE) else _block(folder, layer, kind)
    if folder.config.get("mask_token_id") is not None:
        values["mask_token_id"] = folder.config["mask_token_id"]
    return HeadConfig(**values)


def tensors(folder: HeadFolder) -> dict[str, Tensor]:
    """Return the tensors, whose names are ours."""
    if folder.config[TYPE] == MTP:
        return mtp.renamed(folder, "mtp_layers.0.", mtp.SPECULATORS)
    return folder.tensors(lambda name: name not in TARGETS_OWN)


def target_name(folder: HeadFolder) -> str:
    """Return the name of the target in the configuration; empty without one."""
    verifier = (folder.config.get("speculators_config") or {}).get("verifier") or {}
    return str(verifier.get("name_or_path") or "")


def _depth(folder: HeadFolder) -> int:
    methods = (folder.config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return int(methods[0].get("speculative_tokens") or folder.config.get("block_size") or 3)


def _eagle3(folder: HeadFolder, target: TargetFacts | None) -> dict[str, Any]:
    config, features = folder.config, folder.config.get("eagle_aux_hidden_state_layer_ids")
    if not features and target is None:
        raise ModelLoadError(
            f"'{folder.path}' does not name its hidden states: add eagle_aux_hidden_state_layer_ids to its config.json"
        )
    return {
        "features": tuple(features or default_features(target.num_layers if target else 0)),
        **{
            name: bool(config.get(name))
            for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        },
    }


def _block(folder: HeadFolder, layer: Mapping[str, Any], kind: str) -> dict[str, Any]:
    config = folder.config
    features, _, block_size = needed(config, ("aux_hidden_state_layer_ids", "mask_token_id", "block_size"), folder)
    rank = int(config.get("markov_rank", 256)) if kind == DSPARK else 0
    has_confidence = kind == DSPARK and bool(config.get("enable_confidence_head", True))
    return {
        "features": tuple(features),
        "block_size": block_size,
        "anchor_predicts": bool(config.get("sample_from_anchor", kind == DSPARK)),
        "windows": windows_of(layer),
        "causal_windows": not config.get("sliding_window_non_causal", False),
        "markov_rank": rank,
        "markov_type": config.get("markov_head_type") or "vanilla",
        "has_confidence": has_confidence,
        "confidence_with_markov": has_confidence and bool(config.get("confidence_head_with_markov", True)),
    }
