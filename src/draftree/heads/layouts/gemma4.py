"""Folders of Gemma 4 assistants, as transformers writes them.

Source: transformers 5 (`gemma4_assistant`, `gemma4_unified_assistant`).
"""

from __future__ import annotations

from torch import Tensor

from draftree.core.errors import ModelLoadError
from draftree.heads.config import FULL, GEMMA4, LAST_LAYER, SLIDING, HeadConfig
from draftree.heads.layouts import HeadFolder, layer_values
from draftree.heads.vocabulary import EMBEDDING, OUTPUT

NAME = "gemma4"
MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
MODEL = "model."
DEPTH = 4
"""Levels of a draft; configurations name none."""


def recognise(folder: HeadFolder) -> bool:
    return folder.values.get("model_type") in MODEL_TYPES


def configure(folder: HeadFolder) -> HeadConfig:
    values = folder.values
    values.require("backbone_hidden_size", "text_config")
    layer = values.part("text_config")
    known = layer_values(layer)
    kinds = layer.texts("layer_types")
    if len(kinds) != known["num_layers"] or not {SLIDING, FULL} >= set(kinds):
        raise ModelLoadError(f"{layer.place} has layer_types {list(kinds)}: it must name {SLIDING} or {FULL} per layer")
    rope = layer.part("rope_parameters")
    full = kinds.index(FULL) if FULL in kinds else None
    norm = f"{MODEL}layers.{full}.self_attn.q_norm.weight"
    clusters = values.whole("num_centroids", 2048) if values.flag("use_ordered_embeddings") else 0
    if clusters and known["vocab_size"] % clusters:
        raise ModelLoadError(f"config.json has {clusters} clusters for {known['vocab_size']} tokens: not of one size")
    return HeadConfig(
        **known
        | {
            "num_kv_heads": known["num_heads"],  # keys are the target's
            "activation": layer.text("hidden_activation", "gelu_pytorch_tanh"),
            "rope": {kind: dict(rope.part(kind).content) for kind in (SLIDING, FULL)},
        },
        kind=GEMMA4,
        features=(LAST_LAYER,),
        target_hidden=values.whole("backbone_hidden_size"),
        draft_vocab_size=known["vocab_size"],
        depth=DEPTH,
        # the last key is at distance 0, and the distance of the window is seen too
        windows=tuple(layer.whole("sliding_window", 512) + 1 if kind == SLIDING else 0 for kind in kinds),
        layer={
            "global_head_dim": next(iter(folder.shapes.get(norm, ())), known["head_dim"]),
            "num_centroids": clusters,
            "centroid_intermediate_top_k": values.whole("centroid_intermediate_top_k", 32),
        },
        own_output=False,  # it is the embedding
    )


def tensors(folder: HeadFolder) -> dict[str, Tensor]:
    """Return the tensors by our names; the output head is the embedding, which files may have twice."""
    held = {name.removeprefix(MODEL): tensor for name, tensor in folder.tensors().items()}
    output = held.pop(OUTPUT, None)
    return held if output is None else {EMBEDDING: output} | held
