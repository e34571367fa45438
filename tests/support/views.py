"""Texts as drafters see them, and what a drafter without a model is built with. Not a test itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftree.core.tree import Draw
from draftree.drafters.base import DraftContext, LoadedDraftModel, SequenceView
from draftree.models.table import TableLM, hashed
from draftree.sampling.controls import build_controls
from draftree.sampling.history import History
from draftree.sampling.params import SamplingParams


def view_of(tokens: Sequence[int], *, vocab_size: int, seed: int = 1, draft: str = "", **params: Any) -> SequenceView:
    """The view of a text whose request has these sampling parameters."""
    controls = build_controls(SamplingParams(**params), vocab_size=vocab_size, seed=seed)
    return SequenceView(History(tokens), controls, draft=draft)


def context_of(vocab_size: int, draw: Draw = Draw.FREE, *, shares_noise: bool = False) -> DraftContext:
    """The context of a drafter that must not load a model."""

    def load(name: str) -> LoadedDraftModel:
        raise AssertionError("no model is needed")

    return DraftContext(TableLM(hashed(vocab_size, seed=1)), None, draw, shares_noise, load)
