"""Loading of the served models, with one budget of memory for the sequences of all."""

from __future__ import annotations

from typing import Any

from draftree.async_llm import AsyncLLM
from draftree.serve.pool import ServedModel
from draftree.serve.served import ModelChoice
from draftree.serve.settings import ServerSettings

__all__ = ["load_models"]


def load_models(settings: ServerSettings) -> list[ServedModel]:
    """Load all models of the settings.

    Raises:
        DraftreeError: a model cannot be found, loaded or used with its drafters.
    """
    return [_load(settings, choice) for choice in settings.models]


def _load(settings: ServerSettings, choice: ModelChoice) -> ServedModel:
    draft: Any = None if not choice.drafts else choice.drafts[0] if len(choice.drafts) == 1 else choice.drafts
    options = settings.llm_options(choice)
    llm = AsyncLLM(choice.source, draft, max_waiting=settings.engine_queue, **options)
    return ServedModel(choice.name, llm, choice.aliases, choice.drafts)
