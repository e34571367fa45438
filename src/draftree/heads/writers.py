"""Export of heads to the layouts that servers of other projects read.

An export has all tensors that the server needs, also those that a head shares with its target, and refuses heads that
the server would read wrongly. Of several values speculators and vLLM have different defaults, so all are written. vLLM
takes the number of hidden states from the configuration of the layers, and always loads an output head for EAGLE-3.
SGLang numbers hidden states by the layers that put them out, one less than ours. It skips tensors with unknown names
silently, so names must be exact.

Sources: speculators 0.9.0; vLLM 0.32.0 (`transformers_utils/configs/speculators`, `model_executor/models`); SGLang
(`srt/models/llama_eagle3.py`, `srt/models/dflash.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from draftree.core.errors import ConfigurationError
from draftree.heads.base import Head
from draftree.heads.config import DFLASH, DSPARK, EAGLE3, LAST_LAYER, PEAGLE, HeadConfig
from draftree.heads.folders import write_folder
from draftree.heads.layouts import QWEN3, dflash, eagle, speculators
from draftree.heads.vocabulary import OUTPUT, maps_of, widest_dtype


@dataclass(frozen=True, slots=True, eq=False)
class ExportTarget:
    """The target of an exported head; `output` (vocabulary, hidden) includes the logit scale."""

    name: str
    architecture: str
    num_layers: int
    hidden: int
    output: Tensor
    embedding_scale: float = 1.0


def features_of(config: HeadConfig, target: ExportTarget) -> tuple[int, ...]:
    """Return the hidden states with the last layer's by its number."""
    return tuple(target.num_layers if layer == LAST_LAYER else layer for layer in config.features)


def exported_tensors(head: Head, target: ExportTarget, *, with_output: bool) -> dict[str, Tensor]:
    """Return the tensors of a head, with the map of a reduced vocabulary.

    The target's rows of the output head are added on demand if the head has none of its own.
    """
    tensors = {name: tensor.detach().cpu() for name, tensor in head.state_dict().items()}
    if with_output and OUTPUT not in tensors:
        rows = target.output[head.vocabulary.ids.to(target.output.device)]
        tensors[OUTPUT] = rows.to("cpu", widest_dtype(tensors))
    return tensors | maps_of(head.vocabulary)


def require_exportable(config: HeadConfig, target: ExportTarget, layout: str, reasons: Mapping[str, bool]) -> None:
    """Check that no reason against a layout is true, and that the target is the one that the head was made for."""
    if failed := [reason for reason, holds in reasons.items() if holds]:
        raise ConfigurationError(f"a head of kind '{config.kind}' cannot be exported to {layout}: {'; '.join(failed)}")
    hidden = target.hidden
    vocab_size = target.output.shape[0]
    if (hidden, vocab_size) != (config.target_hidden, config.vocab_size):
        raise ConfigurationError(
            f"the head was made for hidden states of {config.target_hidden} and a vocabulary of {config.vocab_size}, "
            f"and '{target.name}' has {hidden} and {vocab_size}: name its target"
        )


def require_empty(folder: Path) -> None:
    """Check that a folder is new or empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(f"'{folder}' already exists and is not an empty folder: choose another path")


SPECULATORS = speculators.NAME
VLLM_KINDS = (EAGLE3, PEAGLE, DFLASH, DSPARK)


def export_for_vllm(head: Head, target: ExportTarget, folder: Path) -> list[str]:
    """Write a head for vLLM into a new or empty folder, and return the command lines that serve it."""
    config = head.config
    require_exportable(config, target, SPECULATORS, _vllm_reasons(config))
    require_empty(folder)
    tensors = exported_tensors(head, target, with_output=config.kind in (EAGLE3, PEAGLE) or not config.is_full)
    if config.attention_bias != config.output_bias:
        # one switch of this layout stands for the biases of all four products of attention
        for index in range(config.num_layers):
            for name in ("q", "k", "v", "o"):
                product = f"layers.{index}.self_attn.{name}_proj"
                weight = tensors[f"{product}.weight"]
                tensors.setdefault(f"{product}.bias", weight.new_zeros(weight.shape[0]))
    depth = config.depth
    if config.is_block:
        depth = config.block_size - (0 if config.anchor_predicts else 1)
    values = speculators.values(
        config.changed(
            features=features_of(config, target),
            target_name=target.name,
            target_architecture=target.architecture,
            depth=depth,
            attention_bias=config.attention_bias or config.output_bias,
        )
    )
    if config.is_block:
        values[speculators.LAYERS]["model_type"] = QWEN3  # the layers of DFlash are those of Qwen3
    write_folder(folder, values, tensors)
    options: dict[str, Any] = {"model": str(folder), "num_speculative_tokens": depth}
    options["method"] = EAGLE3 if config.kind == PEAGLE else config.kind
    if config.kind == PEAGLE:
        options["parallel_drafting"] = True
    return [f"vllm serve {target.name} --speculative-config '{json.dumps(options)}'"]


def _vllm_reasons(config: HeadConfig) -> dict[str, bool]:
    """Return what vLLM or speculators cannot read, and whether the head has it."""
    return {
        f"the layout has {', '.join(VLLM_KINDS)}": config.kind not in VLLM_KINDS,
        "its width differs from its target's": config.hidden != config.target_hidden,
        "its product 'fc' has a bias": config.fc_bias,
        "the activation is not silu": config.activation != "silu",
        "its perceptron has biases": config.mlp_bias,
        "vLLM reads fc_norm and norm_output of EAGLE-3 only": config.kind == PEAGLE
        and (config.fc_norm or config.norm_output),
        "its queries and keys have no norm": config.is_block and not config.qk_norm,
        "its blocks are causal": config.causal,
        "it scales embedding or logits itself": config.is_block and bool(config.layer),
        "its layers have windows of several widths": len({width for width in config.windows if width}) > 1,
        "vLLM's Markov head is the plain one ('vanilla')": config.kind == DSPARK
        and (not config.markov_rank or config.markov_type != "vanilla"),
        "its anchor predicts, which vLLM reads for DSpark only": config.kind == DFLASH and config.anchor_predicts,
    }


SGLANG = "sglang"
SGLANG_KINDS = (EAGLE3, DFLASH)
NUM_FEATURES = 3


def export_for_sglang(head: Head, target: ExportTarget, folder: Path) -> list[str]:
    """Write a head for SGLang into a new or empty folder, and return the command lines that serve it."""
    config = head.config
    require_exportable(config, target, SGLANG, _sglang_reasons(config, target))
    require_empty(folder)
    tensors = exported_tensors(head, target, with_output=config.kind == EAGLE3)
    start = f"python -m sglang.launch_server --model-path {target.name}"
    changed = config.changed(features=features_of(config, target))
    if config.kind == DFLASH:
        write_folder(folder, {**dflash.values(changed), "num_target_layers": target.num_layers}, tensors)
        return [f"{start} --speculative-algorithm DFLASH --speculative-draft-model-path {folder}"]
    write_folder(folder, eagle.values(changed), eagle.with_their_names(tensors))
    return [
        f"{start} --speculative-algorithm EAGLE3 --speculative-draft-model-path {folder} "
        f"--speculative-num-steps {config.depth} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {config.depth + 1}"
    ]


def _sglang_reasons(config: HeadConfig, target: ExportTarget) -> dict[str, bool]:
    """Return what SGLang cannot read, and whether the head has it."""
    is_eagle, is_flash = config.kind == EAGLE3, config.kind == DFLASH
    return {
        f"it reads {', '.join(SGLANG_KINDS)}": config.kind not in SGLANG_KINDS,
        "its width differs from its target's": config.hidden != config.target_hidden,
        "it reads the embedding as a hidden state": 0 in features_of(config, target),
        f"it does not read {NUM_FEATURES} hidden states": is_eagle and len(config.features) != NUM_FEATURES,
        "it has more than one layer": is_eagle and config.num_layers > 1,
        "it has norms of queries and keys": is_eagle and config.qk_norm,
        "it has a variant of norms (fc_norm, norm_output, norm_before_fc or norm_before_residual)": config.fc_norm
        or config.norm_output
        or config.norm_before_fc
        or config.norm_before_residual,
        "its products have biases": config.attention_bias or config.output_bias or config.fc_bias or config.mlp_bias,
        "the activation is not silu": config.activation != "silu",
        "its draft vocabulary is reduced": is_flash and not config.is_full,
        "it has its own embedding or output": is_flash and (config.own_embedding or config.own_output),
        "its anchor predicts": is_flash and config.anchor_predicts,
        "it has windows": any(config.windows),
        "its blocks are causal": config.causal,
        "it scales embedding or logits itself": config.is_block and bool(config.layer),
    }
