"""Any drafter under a grammar: what the grammar forbids goes, and what it forces comes for free.

A drafted token that the grammar does not allow cannot be accepted; where children are free, it is taken out before
the tree is scored. Where the grammar leaves one token, or tokens that spell one text, they need no drafter: they are
put after the root and after the likeliest leaf, beyond the budget if need be, and where they fill it the drafter is
not asked. Where children are drawn from distributions nothing is taken out, since a draw that is looked at must count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch

from draftree.core.node_map import NodeMap
from draftree.core.tree import EMPTY, ROOT, Draw, TokenTree, depths, first_children, path
from draftree.core.types import Budget, Verdict
from draftree.drafters.base import Drafter, DraftTraits, Observation, SequenceView
from draftree.models.memory import Footprint
from draftree.sampling.grammar.guide import Guide

NAME = "grammar"
"""Source of forced tokens in statistics."""
LONGEST_RUN = 32
"""Maximum number of forced tokens after the root: each is a row of the pass."""
LONGEST_TAIL = 8
"""Maximum number of forced tokens after a leaf: they are of use only if the leaf is accepted."""
LEAST_TRUST, MEMORY, RECOVERY = 0.4, 0.7, 0.02
"""A model that cuts forced texts in other ways than into the longest tokens is not guessed at below this share of right
guesses; how much of the share is older ones; and how much it grows in a round without such a guess."""


@dataclass(slots=True)
class ForcedTokenSequence:
    """A sequence of the wrapped drafter, and its last tree. Mutated by `ForcedTokenDrafter` only."""

    own: Any
    view: SequenceView
    drafted: TokenTree = EMPTY
    """The tree of the wrapped drafter."""
    nodes: NodeMap | None = None
    """Where its nodes are in the tree that was returned; None if there was none."""
    trust: float = 1.0
    """How often the longest of several spellings was the model's, lately."""
    guess: int | None = None
    """The node after the root that is such a guess."""

    @property
    def guide(self) -> Guide | None:
        """The grammar's guide; None without one."""
        return self.view.controls.guide


@final
class ForcedTokenDrafter(Drafter[ForcedTokenSequence]):
    """Wraps a drafter; sequences without a grammar are left to it as they are.

    Args:
        may_branch: whether a forced run may stand beside a drafted one.
    """

    class Config:
        """A wrapper has no options of its own."""

    def __init__(self, drafter: Drafter[Any], name: str, *, draw: Draw, may_branch: bool, vocab_size: int) -> None:
        self._drafter = drafter
        self._name = name
        self._draw = draw
        self._grafts = may_branch and draw is Draw.FREE
        self._vocab_size = vocab_size

    @classmethod
    def describe(cls, config: DraftTraits) -> DraftTraits:
        """Those of the wrapped drafter, which are all that there is to configure."""
        return config

    def reserve(self, num_sequences: int, length: int) -> None:
        """Make room in what is wrapped."""
        self._drafter.reserve(num_sequences, length)

    @property
    def footprint(self) -> Footprint:
        """That of what is wrapped."""
        return self._drafter.footprint

    def open(self, sequence: SequenceView) -> ForcedTokenSequence:
        """The wrapped drafter's state, and the view."""
        return ForcedTokenSequence(self._drafter.open(sequence), sequence)

    def fork(self, state: ForcedTokenSequence, sequence: SequenceView, length: int) -> ForcedTokenSequence:
        """A fork of the wrapped state; `trust` begins anew."""
        return ForcedTokenSequence(self._drafter.fork(state.own, sequence, length), sequence)

    def detach(self, state: ForcedTokenSequence, length: int) -> ForcedTokenSequence | None:
        """Detach the wrapped state."""
        own = self._drafter.detach(state.own, length)
        return None if own is None else ForcedTokenSequence(own, state.view)

    def attach(self, state: ForcedTokenSequence, sequence: SequenceView, length: int) -> ForcedTokenSequence:
        """Attach the wrapped state."""
        return ForcedTokenSequence(self._drafter.attach(state.own, sequence, length), sequence)

    def draft(self, states: Sequence[ForcedTokenSequence], budgets: Sequence[Budget]) -> list[TokenTree]:
        """Trees of the wrapped drafter, made to fit."""
        runs = [self._run_after_root(state, budget) for state, budget in zip(states, budgets, strict=True)]
        asked = [
            i
            for i, (run, budget) in enumerate(zip(runs, budgets, strict=True))
            if len(run) < min(budget.num_nodes, budget.depth)
        ]
        for state in states:
            state.drafted = EMPTY
        if asked:
            trees = self._drafter.draft([states[i].own for i in asked], [budgets[i] for i in asked])
            self.part_seconds = self._drafter.part_seconds
            for i, tree in zip(asked, trees, strict=True):
                states[i].drafted = tree
        return [
            state.drafted if state.guide is None else self._fitted(state, state.guide, run, budget)
            for state, run, budget in zip(states, runs, budgets, strict=True)
        ]

    def _run_after_root(self, state: ForcedTokenSequence, budget: Budget) -> list[int]:
        if state.guide is None:
            return []
        return self._forced(state, state.guide, (), min(LONGEST_RUN, budget.room))

    def _forced(self, state: ForcedTokenSequence, guide: Guide, path: Sequence[int], most: int) -> list[int]:
        return guide.forced(state.view.history, path, most, certain=state.trust < LEAST_TRUST)

    def _fitted(self, state: ForcedTokenSequence, guide: Guide, run: Sequence[int], budget: Budget) -> TokenTree:
        tree = state.drafted
        nodes = NodeMap.identity(tree.parents)
        if self._draw in (Draw.FREE, Draw.POINT):
            nodes = NodeMap.keeping(tree.parents, self._allowed(guide, state.view, tree))
            tree = nodes.cut(tree)
        growing = _Growing(tree, self._name)
        if self._grafts or not len(tree):
            growing.graft(ROOT, run)
        state.guess = _guess(state, guide, growing, run)
        leaf = _likeliest_leaf(growing)
        room = budget.room - max(len(growing.tokens), growing.depth_of(leaf))
        tail = [] if leaf == ROOT else self._forced(state, guide, growing.path(leaf), min(LONGEST_TAIL, room))
        growing.graft(leaf, tail)
        state.nodes = nodes.widened(len(growing.tokens))
        return growing.tree(self._draw, self._vocab_size)

    def _allowed(self, guide: Guide, view: SequenceView, tree: TokenTree) -> list[int]:
        allowed = guide.allowed(view.history, tree.token_paths()[1:])
        return [node for node, may_follow in enumerate(allowed) if may_follow is not None]

    def observe(self, observations: Sequence[Observation[ForcedTokenSequence]]) -> None:
        """Tell the wrapped drafter how far the text went along its own trees."""
        self._drafter.observe([self._own(observation) for observation in observations])
        for observation in observations:
            state = observation.state
            state.drafted, state.nodes, state.guess = EMPTY, None, None

    def _own(self, whole: Observation[ForcedTokenSequence]) -> Observation[Any]:
        state = whole.state
        if whole.verdict is None or state.guide is None:
            return replace(whole, state=state.own)
        return replace(whole, state=state.own, tree=state.drafted, verdict=self._own_verdict(state, whole.verdict))

    def _own_verdict(self, state: ForcedTokenSequence, verdict: Verdict) -> Verdict:
        if state.guess is None:
            state.trust = min(1.0, state.trust + RECOVERY)
        else:
            state.trust = MEMORY * state.trust + (1 - MEMORY) * (state.guess in verdict.path)
        return verdict if state.nodes is None else state.nodes.verdict_on_source(verdict)

    @property
    def note(self) -> str:
        """The decisions of the wrapped drafter."""
        return self._drafter.note

    def close(self, state: ForcedTokenSequence) -> None:
        """Close what is wrapped."""
        self._drafter.close(state.own)

    def check_integrity(self, states: Sequence[ForcedTokenSequence]) -> None:
        """Check what is wrapped."""
        self._drafter.check_integrity([state.own for state in states])

    def forget(self) -> None:
        """Let the wrapped drafter forget."""
        self._drafter.forget()


def _guess(state: ForcedTokenSequence, guide: Guide, growing: _Growing, run: Sequence[int]) -> int | None:
    """The node of the run's first token, where others would spell the same text."""
    if not run or guide.forced(state.view.history, (), 1, certain=True):
        return None
    return growing.first.get((ROOT, run[0]))


class _Growing:
    """A tree to which certain tokens are added."""

    def __init__(self, tree: TokenTree, name: str) -> None:
        self._tree = tree
        self.tokens = list(tree.tokens)
        self.parents = list(tree.parents)
        self.scores = list(tree.scores)
        self.sources = list(tree.sources or [(name,)] * len(tree))
        self.first = first_children(tree)
        self._depths = depths(tree.parents)

    def depth_of(self, node: int) -> int:
        return 0 if node == ROOT else self._depths[node]

    def path(self, node: int) -> list[int]:
        return [self.tokens[n] for n in path(self.parents, node)]

    def graft(self, node: int, run: Sequence[int]) -> None:
        """Put a run of tokens below a node, along what is there already."""
        for token in run:
            found = self.first.get((node, token))
            if found is None:
                found = self.first[node, token] = len(self.tokens)
                # as likely as the node before it
                if self.scores or not self._tree.tokens:
                    self.scores.append(0.0 if node == ROOT else self.scores[node])
                self.tokens.append(token)
                self.parents.append(node)
                self.sources.append((NAME,))
                self._depths.append(self.depth_of(node) + 1)
            node = found

    def tree(self, draw: Draw, vocab_size: int) -> TokenTree:
        distributions = self._tree.distributions
        new = self.tokens[len(self._tree) :]
        if new and draw in (Draw.IID, Draw.WITHOUT_REPLACEMENT):
            certain = torch.zeros(len(new), vocab_size).scatter_(-1, torch.tensor(new)[:, None], 1.0)
            distributions = (
                certain
                if distributions is None
                else torch.cat((distributions, certain.to(distributions.device, distributions.dtype)))
            )
        return TokenTree(
            tuple(self.tokens), tuple(self.parents), tuple(self.scores), draw, distributions, tuple(self.sources)
        )


def _likeliest_leaf(growing: _Growing) -> int:
    """The leaf with the highest score, the first drafted of equals; without scores the first; the root of nothing."""
    inner = set(growing.parents)
    leaves = [node for node in range(len(growing.tokens)) if node not in inner]
    if not growing.scores:
        return leaves[0] if leaves else ROOT
    return max(leaves, key=lambda node: growing.scores[node], default=ROOT)
