"""Tokens that end a text, from the settings of a transformers model."""

from __future__ import annotations

from typing import Any


def eos_ids_in(model: Any) -> tuple[int, ...]:
    """Return ids of the tokens that end a text, from the settings of a transformers model; empty for none."""
    configs = (getattr(model, "generation_config", None), model.config.get_text_config())
    known = (getattr(config, "eos_token_id", None) for config in configs)
    eos = next((token for token in known if token is not None), None)
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, (list, tuple)) else (int(eos),)
