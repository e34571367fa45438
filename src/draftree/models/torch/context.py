"""Maximum context length of a transformers model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger(__name__)

UNBOUNDED = 1 << 20
"""Context length of models that have no limit, such as those with linear biases."""


def context_length(config: Any) -> int:
    """Return the number of positions whose keys stay valid, whatever follows.

    A model with "longrope" scaling rotates all its keys by other angles once a pass exceeds its original context:
    stored keys would be invalid, and one long sequence would change the others of its batch. The context ends there.

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
    """Return the length beyond which rotary angles of all keys depend on the length of the text; None if never.

    Under `generate` stored keys keep the angles of the pass that computed them, one pass per token. Passes over drafts
    would give them other angles.
    """
    limits = []
    for rope in _ropes(config):
        if rope.get("rope_type") == "longrope":
            limits.append(int(rope["original_max_position_embeddings"]))
        elif rope.get("rope_type") == "dynamic":
            limits.append(int(config.max_position_embeddings))
    return min(limits, default=None)


def _ropes(config: Any) -> list[Mapping[str, Any]]:
    """Return the rotary settings: one for all layers, or one for each layer type."""
    settings = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in settings:
        return [settings]
    return [rope for rope in settings.values() if isinstance(rope, Mapping)]
