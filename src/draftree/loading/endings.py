"""Tokens that end a text, from the settings of a transformers model."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any


def eos_ids_in(model: Any) -> tuple[int, ...]:
    """Return ids of the tokens that end a text, from the settings of a transformers model; empty for none."""
    configs = (getattr(model, "generation_config", None), model.config.get_text_config())
    known = (getattr(config, "eos_token_id", None) for config in configs)
    eos = next((token for token in known if token is not None), None)
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, (list, tuple)) else (int(eos),)


def eos_ids_from(folder: Path, model: Any) -> tuple[int, ...]:
    """Return ids of the tokens that end a text, as `eos_ids_in`, for a model built from the configuration of a folder.

    Args:
        folder: folder with the configuration, whose generation settings come first.
        model: the model, which does not have them.
    """
    from transformers import GenerationConfig

    # as transformers reads a model: without the file, or with a damaged one, config.json decides
    with contextlib.suppress(OSError, ValueError):
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return eos_ids_in(model)
