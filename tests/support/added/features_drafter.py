"""Drafts what followed the earlier token whose hidden states in three layers are nearest to those of the last one.

An example of a drafter that reads features of prompt and text. It keeps a row for every token that the target has read.
Costs one product of a row with all rows. Loses where nothing is repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, final

import torch
from torch import Tensor

from draftree.core.tree import Draw, TokenTree, chain
from draftree.core.types import Budget
from draftree.drafters.base import DraftContext, Drafter, DraftTraits, Observation, SequenceView


@dataclass(slots=True)
class FeatureRows:
    """A sequence and the features of what the target has read of it."""

    view: SequenceView
    start: int
    """Position of the first row: what was read before the state was opened has none."""
    rows: list[Tensor] = field(default_factory=list)
    """Each of shape (tokens, layers, hidden)."""


@final
class FeaturesDrafter(Drafter[FeatureRows]):
    """One chain."""

    seen: ClassVar[list[tuple[list[int], int, Tensor]]] = []
    """For tests: tokens that were read, position of the first row, and rows, at every draft."""

    @dataclass(frozen=True, slots=True)
    class Config:
        """`k`: length of the chain."""

        k: int = 3

    @classmethod
    def describe(cls, config: Config) -> DraftTraits:
        """Three layers: the embedding, the input of layer 1 and the output of the last layer."""
        return DraftTraits(draws=frozenset({Draw.FREE}), depth=config.k, nodes=config.k, features=(0, 1, -1))

    def __init__(self, config: Config, context: DraftContext) -> None:
        self._config = config

    def open(self, sequence: SequenceView) -> FeatureRows:
        """No rows yet."""
        return FeatureRows(sequence, 0 if sequence.slot is None else sequence.slot.length)

    def fork(self, state: FeatureRows, sequence: SequenceView, length: int) -> FeatureRows:
        """The first rows."""
        return FeatureRows(sequence, state.start, _first(state, length))

    def detach(self, state: FeatureRows, length: int) -> FeatureRows | None:
        """Keep the rows of a cached prefix."""
        state.rows = _first(state, length)
        return state

    def observe(self, observations: Sequence[Observation[FeatureRows]]) -> None:
        """Append the rows of every token that the target's slot gained."""
        for observation in observations:
            assert observation.hidden is not None
            observation.state.rows.append(observation.hidden)

    def draft_one(self, state: FeatureRows, budget: Budget) -> TokenTree:
        """The continuation of the nearest earlier token."""
        tokens = state.view.history.tokens.tolist()
        read = tokens[:-1]
        if not state.rows:
            return chain(())
        rows = torch.cat(state.rows)
        self.seen.append((read, state.start, rows))
        flat = torch.nn.functional.normalize(rows.flatten(1), dim=-1)
        if len(flat) < 2:
            return chain(())
        nearest = state.start + int((flat[:-1] @ flat[-1]).argmax())
        return chain(tokens[nearest + 1 :][1 : 1 + min(self._config.k, budget.num_nodes, budget.depth)])


def _first(state: FeatureRows, length: int) -> list[Tensor]:
    return [torch.cat(state.rows)[: max(0, length - state.start)]] if state.rows else []
