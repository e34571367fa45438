"""Folders of DFlash and DFlash2 as the authors, transformers and SGLang have them, and of JetSpec.

The blocks of JetSpec are causal. Layers in `target_layer_ids` are numbered by their outputs, one less than ours.
Transformers has other names for two tensors (`muse_glimmer_assistant`). The form of the authors is also written, for
SGLang.

Source: github.com/z-lab/dflash (arXiv 2602.06036), transformers 5, github.com/hao-ai-lab/JetSpec (arXiv 2606.18394).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from draftree.heads.config import DFLASH, DFLASH2, HeadConfig
from draftree.heads.layouts import QWEN3, HeadFolder, Values, layer_values, layers_json, selector_values, windows_of

NAME = "dflash"
ARCHITECTURE, SETTINGS = "DFlashDraftModel", "dflash_config"
OF_TRANSFORMERS = "muse_glimmer_assistant"
RENAMED = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
CAUSAL = ("is_causal", "causal", "causal_head")
"""Settings of one meaning, as z-lab, vLLM and JetSpec call it."""
FACTS = {
    "input_embedding_scale": "embedding_scale",
    "output_multiplier": "logit_scale",
    "final_logit_softcapping": "soft_cap",
}
"""Settings that replace what the target does with its embedding and output, with our names."""


def recognise(folder: HeadFolder) -> bool:
    values = folder.values
    classes = values.texts("architectures")
    return SETTINGS in values or ARCHITECTURE in classes or values.get("model_type") == OF_TRANSFORMERS


def configure(folder: HeadFolder) -> HeadConfig:
    values = folder.values
    settings = Values({**values.content, **values.part(SETTINGS, optional=True).content})
    if settings.get("num_target_layers") is None:
        settings.require("target_layer_ids", "mask_token_id", "block_size")
    settings.require("mask_token_id", "block_size")
    facts = {ours: settings.number(name, 1.0) for name, ours in FACTS.items() if settings.get(name) not in (None, 0)}
    # the window of transformers is the largest distance, ours the number of positions
    of_transformers = values.get("model_type") == OF_TRANSFORMERS
    windows = tuple(width + of_transformers if width else 0 for width in windows_of(values))
    known: dict[str, Any] = layer_values(values)
    has_layers = settings.get("target_layer_ids") is not None
    layers = settings.layers("target_layer_ids") if has_layers else _spread(settings, known["num_layers"])
    causal = _is_causal(settings)
    is_second = settings.get("selector_rank") is not None
    if is_second:
        known |= selector_values(settings)
    return HeadConfig(
        **known,
        layer=facts,
        kind=DFLASH2 if is_second else DFLASH,
        features=tuple(layer + 1 for layer in layers),
        target_hidden=known["hidden"],
        draft_vocab_size=known["vocab_size"],
        depth=settings.whole("block_size") - 1,
        block_size=settings.whole("block_size"),
        mask_token_id=settings.whole("mask_token_id"),
        anchor_predicts=settings.flag("sample_from_anchor"),
        qk_norm=True,
        output_bias=known["attention_bias"],
        own_output=False,
        windows=windows,
        # transformers' blocks are bidirectional in every layer; the authors' are causal in layers with a window
        causal=bool(causal),
        causal_windows=causal is None and bool(windows) and not of_transformers,
    )


def tensors(folder: HeadFolder) -> dict[str, Tensor]:
    """Return the tensors by our names."""
    return {RENAMED.get(name, name): tensor for name, tensor in folder.tensors().items()}


def values(config: HeadConfig) -> dict[str, Any]:
    """Return the content of `config.json` for a head whose features are not negative."""
    return {
        **layers_json(config),
        "architectures": [ARCHITECTURE],
        "model_type": QWEN3,
        "block_size": config.block_size,
        SETTINGS: {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": [layer - 1 for layer in config.features],
        },
    }


def _is_causal(settings: Values) -> bool | None:
    """Return whether rows of a block see only earlier rows of it in every layer; None for layers with a window only."""
    name = next((name for name in CAUSAL if settings.get(name) is not None), None)
    return None if name is None else settings.flag(name)


def _spread(settings: Values, num_layers: int) -> tuple[int, ...]:
    """Return the layers of the target that a configuration without a list of them means."""
    last = settings.whole("num_target_layers") - 3
    if num_layers == 1:
        return ((last + 3) // 2,)
    return tuple(round(1 + index * (last - 1) / (num_layers - 1)) for index in range(num_layers))
