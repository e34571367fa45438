"""Token trees of the most likely continuations by weighted counts of earlier occurrences, grown best first.

Every earlier occurrence votes for the tokens that followed it, with a weight that grows with the length of the match;
after a drafted token the matches that agree with it are longer by one. Unseen tokens have a share too, so one short
match is not certain.
"""

from __future__ import annotations

import heapq
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from draftree.core.tree import EMPTY, ROOT, Draw, TokenTree
from draftree.core.types import MAX_NODES, Budget
from draftree.drafters.base import DraftContext, Drafter, DraftTraits, SequenceView, require_range
from draftree.drafters.lookup.occurrences import Match

ESCAPE = 2.5
"""Votes for unseen tokens. With `VOTES`, one match of 1, 2, 4, 8, 16 tokens has probability 0.29, 0.53, 0.76, 0.90,
0.96; measured on prompts of many kinds: 0.30, 0.48, 0.69, 0.84, 0.97."""
RATE = 0.1
"""Learning rate: increase of the logarithm of the votes for unseen tokens by one failed certain token. No mean gain on
texts of many kinds, but copies are drafted longer and open text less; predictions gain 3%."""
LEAST, MOST = ESCAPE / 16, ESCAPE * 4
"""Bounds of the learned logarithm."""
NOWHERE = -2
MEAN_FACTOR = 1.781
"""e to Euler's constant: the factor of a token with unknown noise."""
LONGEST = 64
"""Maximum length of a match."""
VOTES = tuple(length**1.5 for length in range(LONGEST + MAX_NODES + 1))
"""Votes of a match by length."""


NoiseFactors = Callable[[int, Sequence[int]], Mapping[int, float]]
"""(level, tokens) to the factor of each token's noise: e to its Gumbel variable."""


class NoveltyPrior:
    """Prior of unseen tokens in a text, learned from the outcomes of earlier drafts.

    Each drafted token has an estimated probability. If the text continues with it, the votes for unseen tokens
    decrease, otherwise they increase. The written text is the evidence, so tokens that were never scored count too.
    """

    def __init__(self) -> None:
        self.unseen = ESCAPE
        self._tree, self._length = EMPTY, 0

    def remember(self, tree: TokenTree, length: int) -> None:
        """Store a tree that was drafted after `length` tokens."""
        self._tree, self._length = tree, length

    def learn(self, tokens: np.ndarray) -> None:
        """Compare the last draft with the text, given from its start."""
        tree, node, survival = self._tree, ROOT, 1.0
        for token in tokens[self._length : self._length + len(tree) + 1].tolist():
            children = [child for child, parent in enumerate(tree.parents) if parent == node]
            if not children:
                break
            expected = sum(math.exp(tree.scores[child]) for child in children) / survival
            node = next((child for child in children if tree.tokens[child] == token), NOWHERE)
            error = expected - (node != NOWHERE)
            self.unseen = min(max(self.unseen * math.exp(RATE * error), LEAST), MOST)
            if node == NOWHERE:
                break
            survival = math.exp(tree.scores[node])
        self._tree = EMPTY


def noise_factors(view: SequenceView) -> NoiseFactors | None:
    """Return the factors of the request's noise at the next positions; None at temperature 0."""
    controls, start = view.controls, len(view.history)
    if controls.temperature == 0:
        return None

    def factors(level: int, tokens: Sequence[int]) -> Mapping[int, float]:
        numbers = controls.noise.gumbel_of_few(start + level, tokens)
        return {token: math.exp(number) for token, number in zip(tokens, numbers, strict=True)}

    return factors


def grow(
    matches: Sequence[Match],
    budget: Budget,
    *,
    width: int,
    floor: float,
    draw: Draw,
    noise: NoiseFactors | None = None,
    unseen: float = ESCAPE,
) -> TokenTree:
    """Return the tree of the nodes with the highest estimated survival.

    Args:
        matches: earlier occurrences; earlier entries win ties.
        width: maximum number of children.
        floor: minimum estimated survival of a node, whose logarithm is its score.
        noise: factors of the request's noise, if shared; otherwise candidates are ranked by counts.
    """
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    # (minus survival, number of the candidate, parent, token, probability, agreeing matches, level)
    heap: list[tuple[float, int, int, int, float, list[Match], int]] = []
    num_candidates = 0
    node, survival, chance, level, agreeing = ROOT, 1.0, 1.0, 0, list(matches)
    while True:
        if level < budget.depth and chance >= budget.min_confidence:
            for token, share, followers in _children(agreeing, level, width, noise, unseen):
                if survival * share >= floor:
                    num_candidates += 1
                    heapq.heappush(heap, (-survival * share, num_candidates, node, token, share, followers, level + 1))
        if not heap or len(tokens) == budget.num_nodes:
            break
        negative, _, parent, token, chance, agreeing, level = heapq.heappop(heap)
        node, survival = len(tokens), -negative
        tokens.append(token)
        parents.append(parent)
        scores.append(math.log(survival))
    return TokenTree(tuple(tokens), tuple(parents), tuple(scores), draw)


def _children(
    matches: Sequence[Match], level: int, width: int, noise: NoiseFactors | None, unseen: float
) -> list[tuple[int, float, list[Match]]]:
    """Return next tokens with probabilities and agreeing matches, in descending order."""
    groups: dict[int, list[Match]] = {}
    votes: dict[int, float] = {}
    for match in matches:
        token = match.followers[level]
        if token >= 0:
            groups.setdefault(token, []).append(match)
            votes[token] = votes.get(token, 0.0) + match.weight * VOTES[match.length + level]
    if noise is not None and votes:
        factors = noise(level, tuple(votes))
        votes = {token: count * factors[token] for token, count in votes.items()}
        unseen *= MEAN_FACTOR
    total = sum(votes.values()) + unseen
    best = sorted(votes, key=lambda token: -votes[token])[:width]
    return [(token, votes[token] / total, groups[token]) for token in best]


def require_tree(drafter: str, config: object) -> None:
    """Check the limits of a tree."""
    require_range(drafter, config, "k", "nodes", "width")
    require_range(drafter, config, "floor", least=0, most=1)


@dataclass(slots=True)
class CountedText:
    """Sequence and its prior of unseen tokens."""

    view: SequenceView
    prior: NoveltyPrior = field(default_factory=NoveltyPrior, kw_only=True)


Text = TypeVar("Text", bound=CountedText)


class CountingDrafter(Drafter[Text]):
    """Drafter that grows trees from earlier occurrences, which a method finds in `_matches`."""

    def __init__(self, config: Any, context: DraftContext) -> None:
        super().__init__(config, context)
        self._traits = self.describe(config)
        self._shares_noise = context.shares_noise and context.draw is Draw.FREE

    @classmethod
    def describe(cls, config: Any) -> DraftTraits:
        depth, branches = min(config.k, config.nodes), config.width > 1
        return DraftTraits(
            draws=frozenset({Draw.FREE} if branches else {Draw.FREE, Draw.POINT}),
            depth=depth,
            nodes=config.nodes if branches else depth,
            branches=branches,
            gives_confidence=True,
        )

    @abstractmethod
    def _matches(self, state: Text, depth: int) -> list[Match]:
        """Return earlier occurrences with `depth` tokens after each; earlier entries win ties."""

    def draft_one(self, state: Text, budget: Budget) -> TokenTree:
        tokens = state.view.history.tokens
        state.prior.learn(tokens)
        held = budget.within(self._traits.nodes, self._traits.depth)
        if not held.num_nodes or not held.depth:
            return EMPTY
        tree = grow(
            self._matches(state, held.depth),
            held,
            width=self._config.width,
            floor=self._config.floor,
            draw=self._draw,
            noise=noise_factors(state.view) if self._shares_noise else None,
            unseen=state.prior.unseen,
        )
        state.prior.remember(tree, len(tokens))
        return tree
