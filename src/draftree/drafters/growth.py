"""How any drafter that steps a model grows a tree: level by level, one batched pass a level.

The model's slot of a sequence holds a committed prefix of the history. It lags behind: it has not seen the
bonus, nor the last level that was drafted, whose logits nobody needed. A model with a shorter context than the
history sees the first token and a window of the last ones; when the window has run full it starts again from its
younger half, so that a token is read twice on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftree.core.noise import Noise
from draftree.core.tree import ROOT, Draw, TokenTree
from draftree.core.types import Budget, Verdict
from draftree.drafters.base import SequenceView
from draftree.models.base import Extend, LanguageModel, Slot
from draftree.sampling.laws import Laws, LawRows

PREFILL_ROWS = 512
"""Tokens of one sequence that one pass reads at most."""


@dataclass(slots=True)
class GrowthState:
    """What a stepped model knows of a sequence. Mutated by `Growth` only."""

    view: SequenceView
    slot: Slot
    covered: int = 0
    """Tokens of the history up to which the slot's prefix reaches."""
    fed: dict[int, int] = field(default_factory=dict)
    """Nodes of the last tree that were fed to the model: tree index to tentative index."""


@dataclass(slots=True)
class _Growing:
    """One sequence's tree while it grows."""

    state: GrowthState
    budget: Budget
    noise: Noise
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    laws: list[Tensor] = field(default_factory=list)
    frontier: list[int] = field(default_factory=lambda: [ROOT])

    def path(self, node: int) -> list[int]:
        tokens: list[int] = []
        while node != ROOT:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]


class Growth:
    """Grows trees with a model.

    Args:
        model: the model that is stepped.
        draw: how children are drawn; `IID` and `POINT` give chains here.
        shares_noise: rank with the request's own noise, or with a stream of this round alone.
    """

    def __init__(self, model: LanguageModel, *, draw: Draw, shares_noise: bool) -> None:
        self.model = model
        self._draw = draw
        self._shares_noise = shares_noise
        self._window = model.max_length // 2

    def reserve(self, num_sequences: int, length: int) -> None:
        """Make room in the model's slots."""
        self.model.reserve(num_sequences, min(length, self.model.max_length))

    def open(self, view: SequenceView) -> GrowthState:
        """State for a new sequence."""
        return GrowthState(view, self.model.open())

    def close(self, state: GrowthState) -> None:
        """Free the slot."""
        self.model.close(state.slot)

    def grow(self, states: Sequence[GrowthState], budgets: Sequence[Budget]) -> list[TokenTree]:
        """A tree for every sequence, within its budget."""
        growing = [_Growing(s, self._held(b), self._noise(s)) for s, b in zip(states, budgets, strict=True)]
        active = [g for g in growing if g.budget.num_nodes and g.budget.depth]
        level = 0
        logits = self._catch_up([g.state for g in active], [g.budget.depth for g in active]) if active else None
        while active and logits is not None:
            self._choose(active, logits)
            level += 1
            active = [g for g in active if g.frontier and level < g.budget.depth and len(g.tokens) < g.budget.num_nodes]
            logits = self._feed(active) if active else None
        return [self._tree(g) for g in growing]

    def _held(self, budget: Budget) -> Budget:
        return budget.within(budget.num_nodes, self.model.max_length - self._window - 2)

    def _noise(self, state: GrowthState) -> Noise:
        noise = state.view.controls.noise
        return noise if self._shares_noise else noise.stream("draft", len(state.view.history))

    def _catch_up(self, states: Sequence[GrowthState], depths: Sequence[int]) -> Tensor:
        """Feed every sequence what its slot has not seen; logits behind its last token, one row a sequence."""
        pending = [self._pending(state, depth) for state, depth in zip(states, depths, strict=True)]
        while any(len(tokens) > PREFILL_ROWS for tokens in pending):
            long = [i for i, tokens in enumerate(pending) if len(tokens) > PREFILL_ROWS]
            self._read([states[i] for i in long], [pending[i][:PREFILL_ROWS] for i in long], [])
            for i in long:
                pending[i] = pending[i][PREFILL_ROWS:]
        logits = self._read(states, pending, [-1])
        for state in states:
            state.covered = len(state.view.history)
        return logits

    def _pending(self, state: GrowthState, depth: int) -> list[int]:
        history = state.view.history.tokens
        unseen = len(history) - state.covered
        if state.slot.length + unseen + depth <= self.model.max_length:
            return list(map(int, history[state.covered :]))
        self.model.close(state.slot)
        state.slot = self.model.open()
        # the first token is kept in sight: models lean on it, and many have never been without
        return [int(history[0]), *map(int, history[-self._window :])]

    def _read(self, states: Sequence[GrowthState], tokens: Sequence[list[int]], at: Sequence[int]) -> Tensor:
        jobs = [
            Extend(state.slot, row, range(-1, len(row) - 1), logits_at=[len(row) + i for i in at])
            for state, row in zip(states, tokens, strict=True)
        ]
        logits = self.model.extend(jobs).logits
        self.model.commit_many([state.slot for state in states], [range(len(row)) for row in tokens])
        return logits

    def _choose(self, active: Sequence[_Growing], logits: Tensor) -> None:
        """Children of every frontier node; rows of `logits` stand in the order of the frontiers."""
        rows = [LawRows(g.state.view.history, g.state.view.controls, [g.path(n) for n in g.frontier]) for g in active]
        laws = Laws(logits, rows)
        best = laws.perturbed([g.noise for g in active]).max(dim=-1)
        log_probs = laws.logits.log_softmax(dim=-1).gather(-1, best.indices.unsqueeze(-1)).squeeze(-1)
        chosen, confidence = best.indices.tolist(), log_probs.exp().tolist()
        for index, g in enumerate(active):
            span, frontier = laws.span(index), []
            for row, node in zip(range(span.start, span.stop), g.frontier, strict=True):
                frontier.append(len(g.tokens))
                g.tokens.append(chosen[row])
                g.parents.append(node)
                g.scores.append(float(best.values[row]))
                if self._draw is Draw.IID:
                    g.laws.append(laws.of(index).probs()[row - span.start])
                if confidence[row] < g.budget.min_confidence:
                    frontier.pop()
            g.frontier = frontier

    def _feed(self, active: Sequence[_Growing]) -> Tensor:
        """One pass over all frontiers."""
        jobs = []
        for g in active:
            fed = g.state.fed
            parents = [fed[g.parents[n]] if g.parents[n] != ROOT else ROOT for n in g.frontier]
            for node in g.frontier:
                fed[node] = len(fed)
            jobs.append(Extend(g.state.slot, [g.tokens[n] for n in g.frontier], parents))
        return self.model.extend(jobs).logits

    def _tree(self, g: _Growing) -> TokenTree:
        laws = torch.stack(g.laws) if g.laws else None
        return TokenTree(tuple(g.tokens), tuple(g.parents), tuple(g.scores), self._draw, laws)

    def observe(self, states: Sequence[GrowthState], verdicts: Sequence[Verdict]) -> None:
        """Keep what was accepted of what was fed; the histories already hold the written tokens."""
        touched = [(state, verdict) for state, verdict in zip(states, verdicts, strict=True) if state.fed]
        if not touched:
            return
        kept = [[state.fed[n] for n in verdict.path if n in state.fed] for state, verdict in touched]
        self.model.commit_many([state.slot for state, _ in touched], kept)
        for (state, _), nodes in zip(touched, kept, strict=True):
            state.covered += len(nodes)
            state.fed.clear()
