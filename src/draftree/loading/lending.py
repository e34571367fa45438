"""Temporary use of a caller's transformers model, which is restored afterwards.

The result of the self-check of a model (does our attention score it exactly, with trees?) is cached for the life of the
model, so that borrowing it again costs nothing. The cache holds no reference to the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

from draftree.loading.loaded import LoadedModel
from draftree.loading.transformers_model import wrap_checked, wrap_encoder_decoder
from draftree.models.torch.hf import HFModel
from draftree.models.torch.hf_cache import CachedModel
from draftree.models.torch.inspection import padding_counts
from draftree.models.torch.seq2seq.model import HFEncoderDecoder
from draftree.sampling.decoding_rules import DecodingRules


@dataclass(slots=True)
class _Loan:
    """Cached facts about a model. Mutated under its lock."""

    lock: Any = field(default_factory=RLock)
    wrapped: HFModel | CachedModel | HFEncoderDecoder | None = None
    facts: tuple[Any, ...] = ()
    depth: int = 0
    padding_counts: bool | None = None


_LOANS: WeakKeyDictionary[Any, _Loan] = WeakKeyDictionary()
_LOANS_LOCK = RLock()


@contextmanager
def borrowed(model: Any) -> Iterator[LoadedModel]:
    """Wrap a transformers model as a `LanguageModel` inside the block; it is restored afterwards.

    The attention implementation and the training flags are restored, the memory of slots is freed; weights are never
    changed. Other threads that want the same model wait.
    """
    with _LOANS_LOCK:
        loan = _LOANS.setdefault(model, _Loan())
    with loan.lock:
        implementations = _implementations(model)
        training = [module for module in model.modules() if module.training]
        loan.depth += 1
        try:
            yield LoadedModel(_wrapped(model, loan), None, (), type(model).__name__)
        finally:
            loan.depth -= 1
            if loan.depth == 0 and loan.wrapped is not None:
                loan.wrapped.release()
            for config, implementation in implementations:
                config._attn_implementation = implementation
            for module in training:
                module.training = True


def is_padding_counted(model: Any) -> bool:
    """Return whether padding before a prompt changes a borrowed model's output; measured once, then cached."""
    loan = _LOANS[model]
    with loan.lock:
        if loan.padding_counts is None:
            loan.padding_counts = padding_counts(model)
        return loan.padding_counts


def _wrapped(model: Any, loan: _Loan) -> HFModel | CachedModel | HFEncoderDecoder:
    facts = _facts(model)
    if loan.depth > 1 and loan.wrapped is not None:
        return loan.wrapped  # nested borrowing: one wrapper serves both
    if loan.wrapped is None or loan.facts != facts:
        loan.wrapped = loan.padding_counts = None
        name = type(model).__name__
        if model.config.is_encoder_decoder:
            # the settings of a call are those of its own generation configuration, in the processors of transformers
            loan.wrapped = wrap_encoder_decoder(model, name, rules=DecodingRules(start_ids=(0,)))
        else:
            loan.wrapped = wrap_checked(model, name)
        loan.facts = facts
    else:
        loan.wrapped.attach(model)
    return loan.wrapped


def _facts(model: Any) -> tuple[Any, ...]:
    """Return the facts that the self-check depends on: if any changes, the model is checked again."""
    first = next(model.parameters())
    return (first.dtype, model.device, len(list(model.modules())), str(model.config._attn_implementation))


def _implementations(model: Any) -> list[tuple[Any, Any]]:
    """Return all nested configurations, outermost first, with their attention implementations."""
    configs: dict[int, Any] = {}
    waiting = [model.config, *(module.config for module in model.modules() if hasattr(module, "config"))]
    for config in waiting:
        if id(config) not in configs and hasattr(config, "_attn_implementation"):
            configs[id(config)] = config
            waiting.extend(getattr(config, key, None) for key in getattr(config, "sub_configs", None) or ())
    return [(config, config._attn_implementation) for config in configs.values()]
