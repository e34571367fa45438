"""How many positions a model of transformers can be stepped through."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

UNBOUNDED = 1 << 20
"""Stands for the context of models that name none, such as those with linear biases."""


def context_length(config: Any) -> int:
    """Positions whose keys stay valid, whatever is read behind them.

    A model with "longrope" scaling turns all its keys by other angles once a pass goes beyond the length it was
    first trained for: stored keys no longer fit, and one long sequence would change the others of its batch. Its
    context ends there.

    Args:
        config: the text configuration of a transformers model.
    """
    names = ("max_position_embeddings", "max_seq_len")
    known = next((int(value) for name in names if (value := getattr(config, name, None))), UNBOUNDED)
    scaled = [rope for rope in _ropes(config) if rope.get("rope_type") == "longrope"]
    limit = min([known, *(int(rope["original_max_position_embeddings"]) for rope in scaled)])
    if limit < known:
        logger.info("context limited to %d of %d positions: beyond it 'longrope' changes stored keys", limit, known)
    return limit


def turning_length(config: Any) -> int | None:
    """Positions beyond which the rotary angles of all keys depend on how long the text is; None where they never do.

    Under `generate` keys that are stored keep the angles of the pass that made them, one pass a token. Passes over
    drafts would give them other angles.
    """
    limits = []
    for rope in _ropes(config):
        if rope.get("rope_type") == "longrope":
            limits.append(int(rope["original_max_position_embeddings"]))
        elif rope.get("rope_type") == "dynamic":
            limits.append(int(config.max_position_embeddings))
    return min(limits, default=None)


def _ropes(config: Any) -> list[Mapping[str, Any]]:
    """The rotary settings: one of all layers, or one for each kind of layer."""
    settings = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in settings:
        return [settings]
    return [rope for rope in settings.values() if isinstance(rope, Mapping)]
