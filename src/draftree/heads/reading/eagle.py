"""Folders of EAGLE-1, EAGLE-2 and EAGLE-3, as their authors, SpecForge and SGLang write them.

EAGLE-3 calls its layer `midlayer`. It is recognised by that name. Folders of EAGLE-1 and EAGLE-2 are alike: EAGLE-2
changed the trees, not the weights. Hidden states in `eagle_config` are numbered by the layers that put them out, one
less than ours.

Sources: github.com/SafeAILab/EAGLE (arXiv 2401.15077, 2406.16858, 2503.01840), github.com/sgl-project/SpecForge.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from draftree.core.errors import ModelLoadError
from draftree.heads.config import EAGLE, EAGLE3, LAST_LAYER, HeadConfig
from draftree.heads.reading.folder import HeadFolder
from draftree.heads.reading.layout import TargetFacts, default_features, layer_values, needed
from draftree.heads.tensors import EMBEDDING, OUTPUT

NAME = "eagle"
THEIRS, OURS = "midlayer.", "layers.0."
DEPTHS = {EAGLE: 5, EAGLE3: 7}
"""Levels that the authors' code trains or drafts; configurations do not name them."""


def recognise(folder: HeadFolder) -> bool:
    """Return whether the folder has this layout: `fc`, and a `midlayer` or a first layer without a norm before it."""
    names = folder.shapes
    if "fc.weight" not in names or "hidden_norm.weight" in names:
        return False
    return any(name.startswith(THEIRS) for name in names) or (
        "layers.0.self_attn.q_proj.weight" in names and "layers.0.input_layernorm.weight" not in names
    )


def configure(folder: HeadFolder, target: TargetFacts | None) -> HeadConfig:
    """Return the configuration.

    Raises:
        ModelLoadError: values are missing.
    """
    names = {_renamed(name) for name in folder.shapes}
    kind = EAGLE3 if any(name.startswith(THEIRS) for name in folder.shapes) else EAGLE
    config = folder.config
    (vocab_size,) = needed(config, ("vocab_size",), folder)
    values = {
        **layer_values(config, folder),
        "kind": kind,
        "vocab_size": vocab_size,
        "draft_vocab_size": (config.get("draft_vocab_size") or vocab_size) if kind == EAGLE3 else vocab_size,
        "depth": DEPTHS[kind],
        "attention_bias": "layers.0.self_attn.q_proj.bias" in names,
        "output_bias": "layers.0.self_attn.o_proj.bias" in names,
        "fc_bias": "fc.bias" in names,
        "own_embedding": EMBEDDING in names,
        "own_output": OUTPUT in names,
    }
    values |= _eagle3(folder, target) if kind == EAGLE3 else _eagle(config)
    return HeadConfig(**values)


def tensors(folder: HeadFolder) -> dict[str, Tensor]:
    """Return the tensors by our names."""
    return {_renamed(name): tensor for name, tensor in folder.tensors().items()}


def _renamed(name: str) -> str:
    return OURS + name.removeprefix(THEIRS) if name.startswith(THEIRS) else name


def _eagle(config: dict[str, Any]) -> dict[str, Any]:
    return {"features": (LAST_LAYER,), "target_hidden": config["hidden_size"]}


def _eagle3(folder: HeadFolder, target: TargetFacts | None) -> dict[str, Any]:
    config = folder.config
    if int(config.get("num_hidden_layers") or 1) > 1:
        raise ModelLoadError(
            f"'{folder.path}' is an EAGLE-3 head of {config['num_hidden_layers']} layers: use one of 1"
        )
    ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if not ids and target is None:
        raise ModelLoadError(
            f"'{folder.path}' does not name the hidden states that it reads: for a target of N layers add "
            '"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, N // 2 - 1, N - 4]} to its config.json, with the '
            "numbers in place of N"
        )
    features = tuple(layer + 1 for layer in ids) if ids else default_features(target.num_layers if target else 0)
    wide = config.get("target_hidden_size") or (target.hidden if target else config["hidden_size"])
    return {"features": features, "target_hidden": wide}
