"""Drafts from a script of the test; a method like any other, except for its place outside the package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, final

import numpy as np

from draftree.core.tree import Draw, TokenTree
from draftree.core.types import Budget
from draftree.drafters.base import DraftContext, Drafter, DraftTraits, SequenceView

Script = Callable[[np.ndarray, Budget], TokenTree]


@final
class ScriptedDrafter(Drafter[SequenceView]):
    """Draft the tree that the script of its name returns for the tokens so far."""

    scripts: ClassVar[dict[str, Script]] = {}

    @dataclass(frozen=True, slots=True)
    class Config:
        """`scripted:NAME`: which script; `k`: tokens ahead at most."""

        name: str = field(metadata={"argument": True})
        k: int = 6

    @classmethod
    def describe(cls, config: Config) -> DraftTraits:
        draws = frozenset({Draw.FREE, Draw.POINT})
        return DraftTraits(draws=draws, depth=config.k, nodes=config.k, branches=config.name.startswith("tree"))

    def __init__(self, config: Config, context: DraftContext) -> None:
        self._script = self.scripts[config.name]

    def draft_one(self, state: SequenceView, budget: Budget) -> TokenTree:
        return self._script(state.history.tokens, budget)
