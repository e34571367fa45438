"""Lookahead drafters over small tables, and the contents of their trees. Not a test itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftree import SamplingParams
from draftree.core.tree import Draw, TokenTree, path
from draftree.core.types import Budget
from draftree.drafters.base import DraftContext, LoadedDraftModel, SequenceView
from draftree.drafters.lookahead import LookaheadDrafter
from draftree.models.table import TableLM, hashed
from draftree.sampling.controls import build_controls
from draftree.sampling.history import History

PLENTY = Budget(256, 64)
VOCAB = 12


def view_of(tokens: Sequence[int], *, temperature: float = 0.0, seed: int = 1) -> SequenceView:
    controls = build_controls(SamplingParams(temperature=temperature), vocab_size=VOCAB, seed=seed)
    return SequenceView(History(tokens), controls)


def drafter_of(**options: int) -> LookaheadDrafter:
    def load(name: str) -> LoadedDraftModel:
        raise AssertionError("no model is needed")

    context: Any = DraftContext(TableLM(hashed(VOCAB, seed=1)), None, Draw.FREE, True, load)
    return LookaheadDrafter(LookaheadDrafter.Config(**options), context)


def ways(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[n] for n in path(tree.parents, node)) for node in range(len(tree))}


def heads(paths: Sequence[Sequence[int]]) -> set[tuple[int, ...]]:
    return {tuple(way[:length]) for way in paths for length in range(1, len(way) + 1)}
