"""A clock that tests control, and models whose passes advance it. Not a test itself.

A pass takes what it takes where weights are read from memory: a fixed time, and little more for each row. So the
default planner drafts wherever drafts are accepted, by the same numbers on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from draftree import LLM
from draftree.drafters import drafts
from draftree.loading.load import load_model
from draftree.loading.loaded import LoadedModel
from draftree.models.base import Edit, LanguageModel, Pass, PassResult, Slot
from draftree.models.memory import Footprint
from draftree.options import ModelOptions

Cost = Callable[[int], float]
"""Seconds of a pass over so many rows."""
PASS_SECONDS = 0.02
TICK = 1e-6


def memory_bound(rows: int) -> float:
    """Weights are read once a pass; each row beyond the first adds 2%."""
    return PASS_SECONDS * (1 + 0.02 * (rows - 1))


def compute_bound(rows: int) -> float:
    """Every row takes as long as the first, so that no draft pays."""
    return PASS_SECONDS * rows


class FakeClock:
    """Advances by a tick whenever it is read, and by given amounts."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += TICK
        return self.seconds


class PacedModel(LanguageModel):
    """A model whose passes move a clock on.

    Args:
        inner: computes the passes.
        clock: what moves.
        cost: by how much.
    """

    def __init__(self, inner: LanguageModel, clock: FakeClock, cost: Cost = memory_bound) -> None:
        self.inner, self._clock, self._cost = inner, clock, cost
        self.vocab_size, self.max_length, self.supports_trees = inner.vocab_size, inner.max_length, inner.supports_trees
        self.device, self.dtype = inner.device, inner.dtype
        self.is_exact = inner.is_exact
        self.fingerprint, self.self_check = inner.fingerprint, inner.self_check

    def run(self, pass_: Pass) -> PassResult:
        self._clock.seconds += self._cost(sum(len(job.tokens) for job in pass_.jobs))
        return self.inner.run(pass_)

    @property
    def footprint(self) -> Footprint:
        return self.inner.footprint

    @property
    def num_open(self) -> int:
        return self.inner.num_open

    def check_integrity(self) -> None:
        self.inner.check_integrity()

    def reserve(self, num_slots: int, length: int) -> None:
        self.inner.reserve(num_slots, length)

    def open(self) -> Slot:
        return self.inner.open()

    def apply(self, edits: Sequence[Edit]) -> list[Slot]:
        return self.inner.apply(edits)


def steady(draft: str | None) -> str | None:
    """The plan that drafts in every round, for tests of what drafts do to texts; None where nothing drafts."""
    return "fixed" if drafts(draft) else None


def paced(loaded: LoadedModel, clock: FakeClock, cost: Cost = memory_bound) -> LoadedModel:
    """The same model, whose passes move the clock on."""
    return replace(loaded, model=PacedModel(loaded.model, clock, cost))


def paced_llm(model: Any, draft: str | None = None, *, cost: Cost = memory_bound, **options: Any) -> LLM:
    """An `LLM` by a clock of its own, which passes of the target alone move on: a draft costs next to nothing."""
    clock = FakeClock()
    given = model if isinstance(model, ModelOptions) else ModelOptions(model, draft, **options)
    return LLM(given.over(paced(load_model(given), clock, cost), clock=clock))
