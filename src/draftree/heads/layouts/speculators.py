"""Layout of speculators, which vLLM reads: `config.json` with `speculators_model_type`, and `model.safetensors`.

Tensors have the names of our parameters. Heads of our own are stored in this layout. Hidden states are counted as ours:
index l is `hidden_states[l]` of transformers. The map of the vocabulary is `d2t` (offsets) and `t2d` (mask).

vLLM and speculators have different defaults for values that are absent, so every value is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, final

from torch import Tensor

from draftree.core.errors import ModelLoadError
from draftree.heads.config import DFLASH, DSPARK, EAGLE, EAGLE3, PEAGLE, HeadConfig
from draftree.heads.layouts.base import (
    MASK,
    OFFSETS,
    Layout,
    Stored,
    flag,
    layer_ids,
    layer_values,
    mapping,
    required,
    vocabulary_of,
    whole,
    without,
)

TYPE = "speculators_model_type"
LAYERS = "transformer_layer_config"
FEATURES = "eagle_aux_hidden_state_layer_ids"
ARCHITECTURES = {
    EAGLE: "EagleSpeculator",
    EAGLE3: "Eagle3Speculator",
    PEAGLE: "PEagleSpeculator",
    DFLASH: "DFlashSpeculator",
    DSPARK: "DSparkSpeculator",
}
"""Kinds that can be written."""
READ = (EAGLE, EAGLE3)
"""Kinds that are read here; `heads/reading` reads the others."""
BLOCK_FEATURES = "aux_hidden_state_layer_ids"
LLAMA, QWEN3 = "llama", "qwen3"
VERSION = "0.9.0"
"""Version of speculators whose layout this is."""
SHARED = ("verifier_lm_head.weight", "verifier_norm.weight")
"""Tensors of the target that a training run may have left in the file."""


@final
class SpeculatorsLayout(Layout):
    """Folders of speculators: reads heads of the kinds in `READ`, writes those in `ARCHITECTURES`."""

    name: ClassVar[str] = "speculators"

    def matches(self, values: Mapping[str, Any]) -> bool:
        """Return whether `config.json` names a kind of head."""
        return values.get(TYPE) in READ

    def config(self, values: Mapping[str, Any]) -> HeadConfig:
        """Return the configuration."""
        kind, layers = str(values[TYPE]), mapping(values, LAYERS)
        known = layer_values(layers, LAYERS)
        model_type = layers.get("model_type")
        if model_type not in (LLAMA, QWEN3):
            raise ModelLoadError(
                f"head: {LAYERS} has model_type={model_type!r}: layers of '{LLAMA}' and '{QWEN3}' are supported"
            )
        features = layer_ids(required(values, FEATURES), FEATURES)
        reduced, target_hidden = values.get("draft_vocab_size"), values.get("target_hidden_size")
        return HeadConfig(
            **known,
            kind=kind,
            features=features,
            target_hidden=known["hidden"] if target_hidden is None else whole(values, "target_hidden_size"),
            draft_vocab_size=known["vocab_size"] if reduced is None else whole(values, "draft_vocab_size"),
            qk_norm=model_type == QWEN3,
            fc_bias=flag(values, "fusion_bias", default=False),
            fc_norm=flag(values, "fc_norm", default=False),
            norm_output=flag(values, "norm_output", default=False),
            norm_before_residual=flag(values, "norm_before_residual", default=False),
            norm_before_fc=flag(values, "norm_before_fc", default=False),
            **_proposals(values),
        )

    def stored(self, config: HeadConfig, tensors: Mapping[str, Tensor]) -> Stored:
        """Return the content; own embedding and output head, and a bias after attention, follow from the tensors."""
        vocabulary = vocabulary_of(config, tensors)
        parameters = without(tensors, (OFFSETS, MASK, *SHARED))
        config = config.changed(
            own_embedding="embed_tokens.weight" in parameters,
            own_output="lm_head.weight" in parameters,
            output_bias="layers.0.self_attn.o_proj.bias" in parameters,
        )
        return Stored(config, vocabulary, parameters)

    def values(self, config: HeadConfig) -> dict[str, Any]:
        """Return the content of `config.json` for a head of ours.

        Raises:
            ModelLoadError: the layout has no heads of this kind.
        """
        if config.kind not in ARCHITECTURES:
            raise ModelLoadError(f"head: kind '{config.kind}' cannot be written in the layout of {self.name}")
        values: dict[str, Any] = {
            "architectures": [ARCHITECTURES[config.kind]],
            TYPE: config.kind,
            "speculators_version": VERSION,
            "draft_vocab_size": config.draft_vocab_size,
            "target_hidden_size": config.target_hidden,
            BLOCK_FEATURES if config.is_block else FEATURES: list(config.features),
            LAYERS: layers_json(config),
            "speculators_config": {
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
            return {**values, "layernorms": False, "fusion_bias": config.fc_bias}
        if config.is_block:
            return {**values, **_block_values(config)}
        if config.kind == PEAGLE:
            values["mask_token_id"] = config.mask_token_id
        return {
            **values,
            "norm_before_residual": config.norm_before_residual,
            "norm_before_fc": config.norm_before_fc,
            "fc_norm": config.fc_norm,
            "norm_output": config.norm_output,
            "embed_requires_grad": config.kind == PEAGLE,
        }


def _block_values(config: HeadConfig) -> dict[str, Any]:
    """Return the values of DFlash and DSpark."""
    values: dict[str, Any] = {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.anchor_predicts,
        "sliding_window_non_causal": not config.causal_windows,
    }
    if config.kind == DSPARK:
        values |= {
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov_type,
            "enable_confidence_head": config.has_confidence,
            "confidence_head_with_markov": config.confidence_with_markov,
        }
    return values


def _proposals(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return depth and target from `speculators_config`."""
    own = mapping(values, "speculators_config")
    methods = own.get("proposal_methods")
    if not isinstance(methods, list) or not methods or not isinstance(methods[0], Mapping):
        raise ModelLoadError(f"head: speculators_config has proposal_methods={methods!r}: it must be a list of objects")
    verifier = own.get("verifier")
    verifier = verifier if isinstance(verifier, Mapping) else {}
    architectures = verifier.get("architectures") or [""]
    return {
        "depth": whole(methods[0], "speculative_tokens", where="proposal_methods"),
        "target_name": str(verifier.get("name_or_path") or ""),
        "target_architecture": str(architectures[0]) if isinstance(architectures, list) else "",
    }


def layers_json(config: HeadConfig) -> dict[str, Any]:
    """Return the configuration of the layers as transformers writes it, for its versions 4 and 5."""
    rope = dict(config.rope)
    scaling = None if rope.get("rope_type", "default") == "default" else rope
    windows: dict[str, Any] = {}
    if any(config.windows):
        windows = {
            "use_sliding_window": True,
            "sliding_window": max(config.windows),
            "layer_types": ["sliding_attention" if width else "full_attention" for width in config.windows],
        }
    return {
        "model_type": QWEN3 if config.qk_norm else LLAMA,
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.activation,
        "rms_norm_eps": config.epsilon,
        "rope_theta": rope.get("rope_theta", 10000.0),
        "rope_scaling": scaling,
        "rope_parameters": rope,
        "max_position_embeddings": config.max_length,
        "vocab_size": config.vocab_size,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": False,
        # vLLM takes the width of `fc` from here, not from the list of hidden states
        "num_aux_hidden_states": len(config.features),
        **windows,
    }
