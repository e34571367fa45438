"""Shell completion of names of models and methods. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from draftree.core.registry import Registry
from draftree.drafters import AUTO_DRAFT, DRAFTERS, NO_DRAFT
from draftree.planners import PLANNERS
from draftree.verifiers import VERIFIERS
from draftree.weights.cache import Cache
from draftree.weights.catalogue import CATALOGUE

__all__ = ["complete_cached", "complete_draft", "complete_model", "complete_plan", "complete_verify"]

NEEDS_MODEL = "model"
"""The drafter whose name is completed together with its colon."""

Completed = list[tuple[str, str]]


def complete_model(incomplete: str) -> Completed:
    """Return names of the catalogue and of the cache; for a path nothing, so that the shell completes files."""
    others = {name: "in the cache" for name in Cache().names() if name not in CATALOGUE}
    return starting(incomplete, [*((e.name, e.description) for e in CATALOGUE.values()), *others.items()])


def complete_cached(incomplete: str) -> Completed:
    """Return names of models in the cache."""
    return starting(incomplete, [(name, "in the cache") for name in Cache().names()])


def complete_draft(incomplete: str) -> Completed:
    """Return drafters, also after a plus sign, and models after `model:`."""
    before, plus, last = incomplete.rpartition("+")
    head = before + plus
    if last.startswith(f"{NEEDS_MODEL}:"):
        return [(f"{head}{NEEDS_MODEL}:{name}", text) for name, text in complete_model(last[len(NEEDS_MODEL) + 1 :])]
    known = [(f"{name}:" if name == NEEDS_MODEL else name, text) for name, text in summaries(DRAFTERS)]
    if not head:
        known += [(AUTO_DRAFT, "Chosen for the model."), (NO_DRAFT, "Plain decoding.")]
    return [(head + name, text) for name, text in starting(last, known)]


def complete_verify(incomplete: str) -> Completed:
    """Verifiers."""
    return starting(incomplete, summaries(VERIFIERS))


def complete_plan(incomplete: str) -> Completed:
    """Planners."""
    return starting(incomplete, summaries(PLANNERS))


def summaries(registry: Registry[Any]) -> Completed:
    return [(method.name, method.summary) for method in registry.methods()]


def starting(incomplete: str, known: Iterable[tuple[str, str]]) -> Completed:
    return [(name, text) for name, text in known if name.startswith(incomplete)]
