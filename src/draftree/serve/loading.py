"""Loading of the served models, with one budget of memory for the sequences of all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftree.async_llm import AsyncLLM
from draftree.engine.memory import SHARE, UNKNOWN
from draftree.loading.load import LoadedModel
from draftree.loading.targets import load_target
from draftree.models.memory import free_memory
from draftree.serve.pool import ServedModel
from draftree.serve.served import ModelChoice
from draftree.serve.settings import ServerSettings

__all__ = ["load_models", "split_memory"]

LOADING = ("dtype", "device", "kernels", "quantization")
"""Options of `LLM` that apply when a model is loaded, not to a loaded one."""


def load_models(settings: ServerSettings) -> list[ServedModel]:
    """Load all models of the settings.

    Raises:
        DraftreeError: a model cannot be found, loaded or used with its drafters.
    """
    if len(settings.models) == 1:
        (choice,) = settings.models
        options = settings.llm_options(choice)
        return [_served(settings, choice, choice.source, {**options, "sequence_memory": settings.memory})]
    # all weights are loaded before the free memory is measured
    loaded = [_load(settings, choice) for choice in settings.models]
    shares = split_memory(loaded, settings.memory)
    models = []
    for choice, model, share in zip(settings.models, loaded, shares, strict=True):
        options = {name: value for name, value in settings.llm_options(choice).items() if name not in LOADING}
        models.append(_served(settings, choice, model, {**options, "sequence_memory": share}))
    return models


def split_memory(models: Sequence[LoadedModel], total: int | None) -> list[int]:
    """Split the memory for sequences, so that each model has room for the same number of tokens.

    Args:
        models: the loaded models.
        total: bytes for all; None for half of the memory that is free now.
    """
    if total is None:
        free = free_memory(models[0].model.device)
        total = int(SHARE * (UNKNOWN if free is None else free))
    sizes = [max(1, loaded.model.footprint.token) for loaded in models]
    return [total * size // sum(sizes) for size in sizes]


def _load(settings: ServerSettings, choice: ModelChoice) -> LoadedModel:
    options = settings.llm_options(choice)
    return load_target(
        choice.source,
        options["dtype"],
        options["device"],
        kernels=options["kernels"],
        quantization=options["quantization"],
    )


def _served(settings: ServerSettings, choice: ModelChoice, model: Any, options: dict[str, Any]) -> ServedModel:
    draft: Any = None if not choice.drafts else choice.drafts[0] if len(choice.drafts) == 1 else choice.drafts
    llm = AsyncLLM(model, draft, max_waiting=settings.engine_queue, **options)
    return ServedModel(choice.name, llm, choice.aliases)
