"""Perplexity of a model on a text, with its own and with other weights.

Also counts how often the most likely token changes. The text is read through our own passes, in windows that
overlap by half: each token is predicted once, after at least half a window of text except for the first ones.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftree.core.errors import ConfigurationError
from draftree.core.host import apply_threads
from draftree.lab.bench.benchmark import read_tokens, run_header, tokenizer_of
from draftree.lab.bench.records import PerplexityRecord
from draftree.loading.load import load_model
from draftree.loading.loaded import LoadedModel
from draftree.loading.options import resolve_place
from draftree.loading.resolve import prepared_folder
from draftree.models.base import LanguageModel
from draftree.options import QUANTIZATIONS, ModelOptions

ROWS = 256
"""Tokens per pass; limits the memory of their logits."""
WINDOW = 1024
"""Maximum tokens per window."""
KV = "+kv-"
"""Between a kind of weights and one of keys and values."""


@dataclass(frozen=True, slots=True)
class PerplexitySettings:
    """The text and the models of a measurement.

    Attributes:
        weights: one or several of the dtypes and quantizations; the others are compared with the first. With
            "+kv-int8" after its name, keys and values have 8 bits.
        options: its dtype is that of keys and values of quantized models.
    """

    options: ModelOptions
    text: Path
    weights: tuple[str, ...] = ("auto",)
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 2:
            raise ConfigurationError(f"limit is {self.limit}: it must be at least 2")
        resolve_place(self.options)
        for weights in self.weights:
            resolve_place(self.options_of(weights))
        if len(set(self.weights)) < len(self.weights) or not self.weights:
            raise ConfigurationError(f"weights are {list(self.weights)}: name each once")

    def options_of(self, weights: str) -> ModelOptions:
        """Return the options of the model with these weights."""
        kind, separator, kv_dtype = weights.partition(KV)
        values: dict[str, Any] = {"quantization": kind} if kind in QUANTIZATIONS else {"dtype": kind}
        return replace(self.options, **values, kv_dtype=kv_dtype if separator else None)


@dataclass(frozen=True, slots=True)
class Reading:
    """A model's predictions of every token of a text except the first: minus log-probabilities, and the best tokens."""

    losses: Tensor
    likeliest: Tensor


def measure(
    settings: PerplexitySettings, *, fetch: Callable[[str], object] = prepared_folder
) -> tuple[dict[str, Any], Iterator[PerplexityRecord]]:
    """Return the header, and an iterator of one record per kind of weights."""
    text = _text(settings.text)
    fetch(settings.options.model)
    apply_threads(settings.options.threads)
    first = load_model(settings.options_of(settings.weights[0]))
    tokenizer = tokenizer_of(first)
    ids = tokenizer.encode(text, add_special_tokens=False)[: settings.limit]
    if len(ids) < 2:
        raise ConfigurationError(f"text '{settings.text}' has {len(ids)} tokens: give a text of at least two tokens")
    header = {
        **run_header("perplexity", first, settings.options.model),
        "dtype": ", ".join(settings.weights),
        "quantization": None,
        "text": {"name": settings.text.name, "sha256": hashlib.sha256(text.encode()).hexdigest()[:16]},
        "num_tokens": len(ids),
        "window": min(WINDOW, first.model.max_length),
    }
    return header, _records(settings, first, ids, tokenizer.start_ids)


def _records(
    settings: PerplexitySettings, first: LoadedModel, ids: Sequence[int], start: Sequence[int]
) -> Iterator[PerplexityRecord]:
    window = min(WINDOW, first.model.max_length)
    base = None
    loaded: LoadedModel | None = first
    for weights in settings.weights:
        loaded = loaded or load_model(settings.options_of(weights))
        reading = read_text(loaded.model, ids, start=start, window=window)
        base = base or reading
        count = len(reading.losses)
        differences = (reading.losses - base.losses).double()
        ratio = math.exp(float(differences.mean()))
        yield PerplexityRecord(
            weights=weights,
            kernels=loaded.kernels,
            num_tokens=count,
            perplexity=math.exp(float(reading.losses.double().mean())),
            ratio=ratio,
            ratio_error=ratio * float(differences.std() / math.sqrt(count)) if count > 1 else 0.0,
            num_other_tokens=int((reading.likeliest != base.likeliest).sum()),
            fallback_reason=loaded.fallback_reason,
        )
        loaded = None  # before the next one is loaded


@torch.inference_mode()
def read_text(model: LanguageModel, ids: Sequence[int], *, start: Sequence[int], window: int) -> Reading:
    """Predict every token of a text except the first, in windows of at most `window` tokens that begin with `start`."""
    room = window - len(start)
    step = max(1, room // 2)
    losses, likeliest = [], []
    slot = model.open()
    try:
        known = 1  # tokens that are predicted, or need not be
        for begin in range(0, max(1, len(ids) - step), step):
            part = ids[begin : begin + room]
            tokens = [*start, *part]
            first = len(start) + known - begin - 1  # its logits predict the first token without a prediction
            places = range(first, len(tokens) - 1)
            for rows, result in read_tokens(model, slot, tokens, logits_at=places, size=ROWS):
                if rows:
                    logits = result.logits.tensor()
                    coming = torch.tensor([tokens[row + 1] for row in rows], device=logits.device)
                    losses.append(-logits.log_softmax(dim=-1)[torch.arange(len(coming)), coming])
                    likeliest.append(logits.argmax(dim=-1))
            known = begin + len(part)
            model.truncate(slot, 0)
    finally:
        model.close(slot)
    return Reading(torch.cat(losses).cpu(), torch.cat(likeliest).cpu())


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigurationError(f"text '{path}' cannot be read: {reason}") from error
