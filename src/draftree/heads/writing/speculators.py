"""Export to the layout of speculators, for vLLM: `config.json` and `model.safetensors`.

Several values have one default in speculators and another in vLLM, so all are written. vLLM takes the number of hidden
states from the configuration of the layers, and always loads an output head for EAGLE-3.

Source: speculators 0.9.0; vLLM 0.32.0 (`transformers_utils/configs/speculators`, `model_executor/models`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftree.heads.base import Head
from draftree.heads.config import DFLASH, DSPARK, EAGLE3, PEAGLE, HeadConfig
from draftree.heads.folders import write_folder
from draftree.heads.layouts import speculators
from draftree.heads.layouts.decoder import QWEN3
from draftree.heads.writing.common import (
    ExportTarget,
    exported_tensors,
    features_of,
    refuse,
    require_empty,
    require_width,
    with_equal_biases,
)

NAME = speculators.NAME
KINDS = (EAGLE3, PEAGLE, DFLASH, DSPARK)


def export(head: Head, target: ExportTarget, folder: Path) -> list[str]:
    """Write a head for vLLM.

    Args:
        head: the head.
        target: its target.
        folder: new or empty.

    Returns:
        Command lines that serve it.

    Raises:
        ConfigurationError: vLLM has no such heads or would read this one wrongly, or the folder is not empty.
    """
    config = head.config
    refuse(config, NAME, _reasons(config))
    require_width(config, target)
    require_empty(folder)
    tensors = exported_tensors(head, target, with_output=config.kind in (EAGLE3, PEAGLE) or not config.is_full)
    tensors = with_equal_biases(tensors, config)
    write_folder(folder, _values(config, target), tensors)
    return flags(config, target, folder)


def flags(config: HeadConfig, target: ExportTarget, folder: Path) -> list[str]:
    """Return the command lines of vLLM."""
    asked: dict[str, Any] = {"model": str(folder), "num_speculative_tokens": _num_tokens(config)}
    asked["method"] = EAGLE3 if config.kind == PEAGLE else config.kind
    if config.kind == PEAGLE:
        asked["parallel_drafting"] = True
    return [f"vllm serve {target.name} --speculative-config '{json.dumps(asked)}'"]


def _num_tokens(config: HeadConfig) -> int:
    if config.is_block:
        return config.block_size - (0 if config.anchor_predicts else 1)
    return config.depth


def _values(config: HeadConfig, target: ExportTarget) -> dict[str, Any]:
    changed = config.changed(
        features=features_of(config, target),
        target_name=target.name,
        target_architecture=target.architecture,
        depth=_num_tokens(config),
        attention_bias=config.attention_bias or config.output_bias,
    )
    values = speculators.values(changed)
    if config.is_block:
        values[speculators.LAYERS]["model_type"] = QWEN3  # the layers of DFlash are those of Qwen3
    return values


def _reasons(config: HeadConfig) -> dict[str, bool]:
    """Return what vLLM or speculators cannot read, and whether the head has it."""
    return {
        f"the layout has {', '.join(KINDS)}": config.kind not in KINDS,
        "its width differs from its target's": config.hidden != config.target_hidden,
        "its product 'fc' has a bias": config.fc_bias,
        "the activation is not silu": config.activation != "silu",
        "its perceptron has biases": config.mlp_bias,
        "vLLM reads fc_norm and norm_output of EAGLE-3 only": config.kind == PEAGLE
        and (config.fc_norm or config.norm_output),
        "its queries and keys have no norm": config.is_block and not config.qk_norm,
        "its layers have windows of several widths": len({width for width in config.windows if width}) > 1,
        "vLLM's Markov head is the plain one ('vanilla')": config.kind == DSPARK
        and (not config.markov_rank or config.markov_type != "vanilla"),
        "its anchor predicts, which vLLM reads for DSpark only": config.kind == DFLASH and config.anchor_predicts,
    }
