"""Loading of the served models, with one budget of memory for the sequences of all."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Sequence

from draftree.assembly import choose_methods, require_fit
from draftree.async_llm import AsyncLLM
from draftree.core.errors import ConfigurationError
from draftree.engine.memory import SHARE
from draftree.loading.load import LoadedModel, load_model
from draftree.models.memory import free_memory
from draftree.parallel.children import start_ranks
from draftree.parallel.entry import load_divided
from draftree.serve.pool import ServedModel
from draftree.serve.served import ModelChoice
from draftree.serve.settings import ServerSettings

__all__ = ["load_models", "split_memory", "start_other_ranks"]

logger = logging.getLogger(__name__)
PREDICTION = "prediction"
"""The drafter that reads predictions; it has no weights."""
LOADING = ("dtype", "device", "kernels", "quantization", "offload", "kv_dtype")
"""Options that are used up when a model is loaded."""


def load_models(settings: ServerSettings) -> list[ServedModel]:
    """Load all models of the settings: first the weights of all, then the memory that is left is divided.

    Raises:
        DraftreeError: a model cannot be found, loaded or used with its drafters.
    """
    loaded = [_weights(settings, choice) for choice in settings.models]
    shares = _shares(settings.memory, loaded)
    return [
        _served(settings, choice, model, memory=share)
        for choice, model, share in zip(settings.models, loaded, shares, strict=True)
    ]


def start_other_ranks(settings: ServerSettings, *, threads: int | None) -> list[subprocess.Popen[bytes]]:
    """Start the processes that compute the model with this one, if it is divided; this process becomes rank 0.

    Args:
        settings: for `load_models`, which is called afterwards.
        threads: CPU threads of each process.

    Raises:
        ConfigurationError: this process belongs to a job already.
    """
    if not settings.parallel.is_parallel:
        return []
    choice = settings.models[0]
    options = settings.llm_options(choice)
    given = {name: options[name] for name in LOADING}
    return start_ranks(choice.source, settings.parallel, given, threads=threads)


def split_memory(total: int, weights: Sequence[int]) -> list[int]:
    """Divide memory in proportion to positive weights, such as bytes of a full context."""
    return [total * weight // sum(weights) for weight in weights]


def _shares(total: int | None, loaded: Sequence[LoadedModel]) -> list[int | None]:
    """Return the memory for the sequences of each model; None for a single model that takes its usual share."""
    if total is None:
        free = None if len(loaded) == 1 else free_memory(loaded[0].model.device)
        if free is None:
            return [None] * len(loaded)
        total = int(SHARE * free)
    needs = [max(1, each.model.footprint.token * each.model.max_length) for each in loaded]
    return list(split_memory(total, needs))


def _weights(settings: ServerSettings, choice: ModelChoice) -> LoadedModel:
    options = settings.llm_options(choice)
    loaded = load_divided(load_model, choice.source, settings.parallel, {name: options[name] for name in LOADING})
    if loaded.kernels_note is not None:
        logger.warning("'%s': %s", choice.name, loaded.kernels_note)
    return loaded


def _served(settings: ServerSettings, choice: ModelChoice, loaded: LoadedModel, *, memory: int | None) -> ServedModel:
    options = {name: value for name, value in settings.llm_options(choice).items() if name not in LOADING}
    draft = _with_predictions(settings, choice, loaded) or None
    llm = AsyncLLM(loaded, draft, max_waiting=settings.engine_queue, sequence_memory=memory, **options)
    if llm.llm.sampling_note:
        logger.info("'%s': %s", choice.name, llm.llm.sampling_note)
    return ServedModel(choice.name, llm, choice.aliases)


def _with_predictions(settings: ServerSettings, choice: ModelChoice, loaded: LoadedModel) -> tuple[str, ...]:
    """Return the drafters of a model, and one for requests with a `prediction` if none of them reads it and it fits."""
    each = [choose_methods(draft, settings.verify, settings.plan) for draft in choice.drafts]
    if not each or any(methods.traits.reads_predictions for methods in each):
        return choice.drafts
    try:
        require_fit(choose_methods(PREDICTION, settings.verify, settings.plan), loaded)
    except ConfigurationError:
        return choice.drafts
    return (*choice.drafts, PREDICTION)
