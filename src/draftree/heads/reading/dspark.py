"""Folders of DSpark as its authors write them: a DFlash head with its own embedding, output and Markov heads.

Layers in `target_layer_ids` are numbered by their outputs, one less than ours; -1 is the embedding.

Source: github.com/deepseek-ai/DeepSpec.
"""

from __future__ import annotations

from torch import Tensor

from draftree.heads.config import DSPARK, HeadConfig
from draftree.heads.reading.folder import HeadFolder
from draftree.heads.reading.layout import TargetFacts, layer_values, needed, windows_of
from draftree.heads.tensors import EMBEDDING, OUTPUT

NAME = "dspark"


def recognise(folder: HeadFolder) -> bool:
    """Return whether the folder has this layout."""
    return any("DSpark" in name for name in folder.architectures) or "markov_rank" in folder.config


def configure(folder: HeadFolder, target: TargetFacts | None) -> HeadConfig:
    """Return the configuration.

    Raises:
        ModelLoadError: values are missing.
    """
    config, held = folder.config, folder.shapes
    layers, mask_token, block_size, rank, vocab_size = needed(
        config, ("target_layer_ids", "mask_token_id", "block_size", "markov_rank", "vocab_size"), folder
    )
    has_confidence = bool(config.get("enable_confidence_head", False))
    values = {
        **layer_values(config, folder),
        "kind": DSPARK,
        "features": tuple(layer + 1 for layer in layers),
        "target_hidden": config["hidden_size"],
        "vocab_size": vocab_size,
        "draft_vocab_size": config.get("draft_vocab_size") or vocab_size,
        "depth": block_size,
        "block_size": block_size,
        "mask_token_id": mask_token,
        "anchor_predicts": bool(config.get("sample_from_anchor", True)),
        "qk_norm": True,
        "output_bias": bool(config.get("attention_bias") or False),
        "own_embedding": EMBEDDING in held,
        "own_output": OUTPUT in held,
        "windows": windows_of(config),
        "markov_rank": rank,
        "markov_type": config.get("markov_head_type") or "vanilla",
        "has_confidence": has_confidence,
        "confidence_with_markov": has_confidence and bool(config.get("confidence_head_with_markov", False)),
    }
    return HeadConfig(**values)


def tensors(folder: HeadFolder) -> dict[str, Tensor]:
    """Return the tensors, whose names are ours."""
    return folder.tensors()
