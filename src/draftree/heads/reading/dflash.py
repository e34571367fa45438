"""Folders of DFlash as its authors and transformers write them.

Layers in `target_layer_ids` are numbered by their outputs, one less than ours. Transformers calls two tensors otherwise
(`muse_glimmer_assistant`).

Source: github.com/z-lab/dflash (arXiv 2602.06036), transformers 5.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from draftree.core.errors import ModelLoadError
from draftree.heads.config import DFLASH, HeadConfig
from draftree.heads.reading.folder import HeadFolder
from draftree.heads.reading.layout import TargetFacts, layer_values, needed, windows_of

NAME = "dflash"
ARCHITECTURE = "DFlashDraftModel"
OF_TRANSFORMERS = "muse_glimmer_assistant"
RENAMED = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
NEUTRAL = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None}
"""Values of optional settings with which they change nothing."""


def recognise(folder: HeadFolder) -> bool:
    """Return whether the folder has this layout."""
    config = folder.config
    is_named = ARCHITECTURE in folder.architectures or config.get("model_type") == OF_TRANSFORMERS
    return is_named or ("dflash_config" in config and "selector_rank" not in config["dflash_config"])


def configure(folder: HeadFolder, target: TargetFacts | None) -> HeadConfig:
    """Return the configuration.

    Raises:
        ModelLoadError: values are missing, or a setting is not supported.
    """
    config = folder.config
    settings: dict[str, Any] = {**config, **(config.get("dflash_config") or {})}
    layers, mask_token, block_size = needed(settings, ("target_layer_ids", "mask_token_id", "block_size"), folder)
    for name, neutral in NEUTRAL.items():
        if settings.get(name) not in (None, neutral):
            raise ModelLoadError(f"'{folder.path}' has {name} {settings[name]!r}, which is not supported")
    # the window of transformers is the largest distance, ours the number of positions
    of_transformers = config.get("model_type") == OF_TRANSFORMERS
    windows = tuple(width + of_transformers if width else 0 for width in windows_of(config))
    causal = settings.get("causal", settings.get("is_causal"))
    if causal and not windows:
        raise ModelLoadError(f"'{folder.path}' has causal blocks without windows, which are not supported")
    values = {
        **layer_values(config, folder),
        "kind": DFLASH,
        "features": tuple(layer + 1 for layer in layers),
        "target_hidden": config["hidden_size"],
        "vocab_size": _vocabulary(folder, target),
        "depth": block_size - 1,
        "block_size": block_size,
        "mask_token_id": mask_token,
        "anchor_predicts": bool(settings.get("sample_from_anchor", False)),
        "qk_norm": True,
        "output_bias": bool(config.get("attention_bias") or False),
        "own_output": False,
        "windows": windows,
        # transformers' blocks are bidirectional in every layer; the authors' are causal in layers with a window
        "causal_windows": bool(windows) and not of_transformers and causal is not False,
    }
    values["draft_vocab_size"] = values["vocab_size"]
    return HeadConfig(**values)


def tensors(folder: HeadFolder) -> dict[str, Tensor]:
    """Return the tensors by our names."""
    return {RENAMED.get(name, name): tensor for name, tensor in folder.tensors().items()}


def _vocabulary(folder: HeadFolder, target: TargetFacts | None) -> int:
    found = target.vocab_size if target else folder.config.get("vocab_size")
    if not found:
        raise ModelLoadError(
            f"'{folder.path}' does not name the size of the vocabulary: add vocab_size to its config.json"
        )
    return int(found)
