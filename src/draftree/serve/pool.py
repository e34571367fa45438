"""The served models: their names, the clients that may use them, and their loading."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from draftree.async_llm import AsyncLLM
from draftree.build import choose_methods, require_fit
from draftree.core.errors import ConfigurationError
from draftree.engine.engine import MAX_BATCH
from draftree.engine.memory import SHARE
from draftree.loading.loaded import LoadedModel
from draftree.models.base import LanguageModel
from draftree.models.memory import free_memory
from draftree.parallel.children import start_ranks
from draftree.parallel.entry import load_divided
from draftree.serve.errors import ApiError, unavailable
from draftree.serve.logprobs import TokenTexts, token_texts
from draftree.serve.records import ApiKey
from draftree.serve.settings import ModelChoice, ServerSettings
from draftree.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    llm: AsyncLLM
    aliases: tuple[str, ...] = ()
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def drafts(self) -> tuple[str, ...]:
        """The loaded drafters; the first is the default."""
        return self.llm.llm.drafts

    @property
    def default_draft(self) -> str:
        return (self.drafts or ("none",))[0]

    def named_draft(self, draft: str | None) -> str | None:
        """Return the drafter that a request named, with what stands for `auto` in its place."""
        return self.llm.llm.requests.named_draft(draft)

    def reads_predictions(self, draft: str) -> bool:
        """Return whether a loaded drafter, or "none", uses the prediction of a request."""
        return draft in self.drafts and self.llm.llm.engine.parts.traits_of(draft).reads_predictions

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.llm.llm.tokenizer

    @property
    def texts(self) -> TokenTexts:
        """Written form of its tokens. The first call takes up to a second: see `prepare_texts`."""
        return token_texts(self.tokenizer)

    async def prepare_texts(self) -> None:
        await self.llm.prompts.with_tokenizer(token_texts)

    @property
    def max_context(self) -> int:
        return self.llm.llm.model.max_length

    @property
    def supports_chat(self) -> bool:
        return self.tokenizer is not None and self.tokenizer.has_chat_template

    @property
    def chat_template(self) -> str:
        return (self.tokenizer.chat_template if self.tokenizer is not None else None) or ""


class ModelPool:
    def __init__(self, models: Sequence[ServedModel] | None = None) -> None:
        self._models: tuple[ServedModel, ...] = ()
        self._by_name: dict[str, ServedModel] = {}
        if models is not None:
            self.open(models)

    @property
    def is_open(self) -> bool:
        return bool(self._models)

    def open(self, models: Sequence[ServedModel]) -> None:
        """Offer models that have distinct names and aliases; once."""
        if not models:
            raise ConfigurationError("a server needs at least one model")
        self._models = tuple(models)
        for model in models:
            for name in model.names:
                if name in self._by_name:
                    raise ConfigurationError(f"two served models have the name '{name}': give one an alias instead")
                self._by_name[name] = model

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    def visible(self, viewer: ApiKey | None = None) -> list[ServedModel]:
        return [model for model in self._models if viewer is None or viewer.allows(model.names)]

    def get(self, name: str | None, viewer: ApiKey | None = None) -> ServedModel:
        """Return a model by name or alias; for None the first one that the client may use."""
        if not self.is_open:
            raise unavailable("loading")
        if name is None:
            name = next((model.name for model in self.visible(viewer)), "")
        model = self._by_name.get(name)
        if model is None or (viewer is not None and not viewer.allows(model.names)):
            known = ", ".join(repr(other.name) for other in self.visible(viewer))
            message = f"the model {name[:100]!r} is not served here; served: {known or 'none'}"
            raise ApiError(404, message, type="invalid_request_error", param="model", code="model_not_found")
        return model

    async def drain(self) -> None:
        """Accept no more requests, and return when all accepted requests are finished."""
        await asyncio.gather(*(model.llm.drain() for model in self._models))

    async def close(self) -> None:
        await asyncio.gather(*(model.llm.close() for model in self._models))


logger = logging.getLogger(__name__)
PREDICTION_DRAFTS = ("prediction", "prediction,width=1")
"""Drafters that read predictions, without weights; chains are for verifiers and models that take no branches."""


def load_models(settings: ServerSettings) -> list[ServedModel]:
    """Load all models of the settings: first the weights of all, then the memory that is left is divided."""
    loaded = [load_divided(settings.options_of(choice)) for choice in settings.models]
    for choice, model in zip(settings.models, loaded, strict=True):
        if model.kernels_note is not None:
            logger.warning("'%s': %s", choice.name, model.kernels_note)
    shares = _shares(settings.memory, loaded)
    return [
        _served(settings, choice, model, memory=share)
        for choice, model, share in zip(settings.models, loaded, shares, strict=True)
    ]


def start_other_ranks(settings: ServerSettings, *, threads: int | None) -> list[subprocess.Popen[bytes]]:
    """Start the processes that compute the model with this one, if it is divided; this process becomes rank 0."""
    if not settings.options.is_parallel:
        return []
    return start_ranks(replace(settings.options_of(settings.models[0]), threads=threads))


def _shares(total: int | None, loaded: Sequence[LoadedModel]) -> list[int | None]:
    """Return the memory for the sequences of each model; None for a single model that takes its usual share."""
    if total is None:
        free = None if len(loaded) == 1 else free_memory(loaded[0].model.device)
        if free is None:
            return [None] * len(loaded)
        total = int(SHARE * free)
    needs = [_need(each.model) for each in loaded]
    return [total * need // sum(needs) for need in needs]


def _need(model: LanguageModel) -> int:
    """Return the bytes of a text of the longest length, with recurrent states for a batch of texts."""
    footprint = model.footprint
    return max(1, footprint.token * model.max_length + footprint.state * MAX_BATCH)


def _served(settings: ServerSettings, choice: ModelChoice, loaded: LoadedModel, *, memory: int | None) -> ServedModel:
    draft = _with_predictions(settings, choice, loaded) or None
    llm = AsyncLLM(settings.options_of(choice).over(loaded, draft=draft, sequence_memory=memory))
    if llm.llm.sampling_note:
        logger.info("'%s': %s", choice.name, llm.llm.sampling_note)
    return ServedModel(choice.name, llm, choice.aliases)


def _with_predictions(settings: ServerSettings, choice: ModelChoice, loaded: LoadedModel) -> tuple[str, ...]:
    """Return the drafters of a model, and one for requests with a `prediction` if none of them reads it and it fits."""
    each = [choose_methods(draft, settings.options.verify, settings.options.plan) for draft in choice.drafts]
    if not each or any(methods.traits.reads_predictions for methods in each):
        return choice.drafts
    for draft in PREDICTION_DRAFTS:
        with contextlib.suppress(ConfigurationError):
            require_fit(choose_methods(draft, settings.options.verify, settings.options.plan), loaded)
            return (*choice.drafts, draft)
    return choice.drafts
