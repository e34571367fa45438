"""Export to the folders that SGLang reads: EAGLE-3 with `midlayer`, and DFlash, with the flags to serve them.

SGLang numbers hidden states by the layers that put them out, one less than ours. It skips tensors with unknown names
silently, so names must be exact.

Source: SGLang (`srt/models/llama_eagle3.py`, `srt/models/dflash.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftree.heads.base import Head
from draftree.heads.config import DFLASH, EAGLE3, HeadConfig
from draftree.heads.folders import write_folder
from draftree.heads.layouts import dflash, eagle
from draftree.heads.writing.common import (
    ExportTarget,
    exported_tensors,
    features_of,
    refuse,
    require_empty,
    require_width,
)

NAME = "sglang"
KINDS = (EAGLE3, DFLASH)
NUM_FEATURES = 3


def export(head: Head, target: ExportTarget, folder: Path) -> list[str]:
    """Write a head for SGLang.

    Args:
        head: the head.
        target: its target.
        folder: new or empty.

    Returns:
        Command lines that serve it.

    Raises:
        ConfigurationError: SGLang has no such heads or would read this one wrongly, or the folder is not empty.
    """
    config = head.config
    refuse(config, NAME, _reasons(config, target))
    require_width(config, target)
    require_empty(folder)
    tensors = exported_tensors(head, target, with_output=config.kind == EAGLE3)
    if config.kind == EAGLE3:
        tensors = eagle.with_their_names(tensors)
    write_folder(folder, _values(config, target), tensors)
    return flags(config, target, folder)


def flags(config: HeadConfig, target: ExportTarget, folder: Path) -> list[str]:
    """Return the command lines of SGLang."""
    start = f"python -m sglang.launch_server --model-path {target.name}"
    if config.kind == DFLASH:
        return [f"{start} --speculative-algorithm DFLASH --speculative-draft-model-path {folder}"]
    return [
        f"{start} --speculative-algorithm EAGLE3 --speculative-draft-model-path {folder} "
        f"--speculative-num-steps {config.depth} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {config.depth + 1}"
    ]


def _values(config: HeadConfig, target: ExportTarget) -> dict[str, Any]:
    changed = config.changed(features=features_of(config, target))
    if config.kind == DFLASH:
        return {**dflash.values(changed), "num_target_layers": target.num_layers}
    return eagle.values(changed)


def _reasons(config: HeadConfig, target: ExportTarget) -> dict[str, bool]:
    """Return what SGLang cannot read, and whether the head has it."""
    is_eagle, is_flash = config.kind == EAGLE3, config.kind == DFLASH
    return {
        f"it reads {', '.join(KINDS)}": config.kind not in KINDS,
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
    }
