"""Folders of DSpark as its authors write them: a DFlash head with its own embedding, output and Markov heads.

Layers in `target_layer_ids` are numbered by their outputs, one less than ours; -1 is the embedding.

Source: github.com/deepseek-ai/DeepSpec.
"""

from __future__ import annotations

from torch import Tensor

from draftree.heads.config import DSPARK, HeadConfig
from draftree.heads.layouts import HeadFolder, layer_values, windows_of
from draftree.heads.vocabulary import EMBEDDING, OUTPUT

NAME = "dspark"


def recognise(folder: HeadFolder) -> bool:
    return any("DSpark" in name for name in folder.values.texts("architectures")) or "markov_rank" in folder.values


def configure(folder: HeadFolder) -> HeadConfig:
    values = folder.values
    held = folder.shapes
    values.require("target_layer_ids", "mask_token_id", "block_size", "markov_rank")
    known = layer_values(values)
    has_confidence = values.flag("enable_confidence_head")
    return HeadConfig(
        **known,
        kind=DSPARK,
        features=tuple(layer + 1 for layer in values.layers("target_layer_ids")),
        target_hidden=known["hidden"],
        draft_vocab_size=values.whole("draft_vocab_size", known["vocab_size"]),
        depth=values.whole("block_size"),
        block_size=values.whole("block_size"),
        mask_token_id=values.whole("mask_token_id"),
        anchor_predicts=values.flag("sample_from_anchor", default=True),
        qk_norm=True,
        output_bias=known["attention_bias"],
        own_embedding=EMBEDDING in held,
        own_output=OUTPUT in held,
        windows=windows_of(values),
        markov_rank=values.whole("markov_rank"),
        markov_type=values.text("markov_head_type", "vanilla"),
        has_confidence=has_confidence,
        confidence_with_markov=values.flag("confidence_head_with_markov") and has_confidence,
    )


def tensors(folder: HeadFolder) -> dict[str, Tensor]:
    """Return the tensors, whose names are ours."""
    return folder.tensors()
