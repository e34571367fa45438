"""A token tree out of what followed before: the likeliest ways on, by weighted counts, best first.

Every earlier place votes for the tokens that followed it. The longer it matches the text, the more it counts, and
behind a drafted token those that agree with it match by one more. What was never seen has a share as well, so that
one short match is no certainty.
"""

from __future__ import annotations

import heapq
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from draftree.core.errors import ConfigurationError
from draftree.core.tree import EMPTY, ROOT, Draw, TokenTree
from draftree.core.types import MAX_NODES, Budget
from draftree.drafters.base import DraftContext, DraftTraits, SequenceDrafter, SequenceView

ESCAPE = 2.5
"""Votes for what was never seen. With `VOTES` it gives one match of 1, 2, 4, 8, 16 tokens a chance of 0.29, 0.53,
0.76, 0.90, 0.96; counted on prompts of many kinds were 0.30, 0.48, 0.69, 0.84, 0.97."""
RATE = 0.1
"""Of learning: what one certain guess that failed adds to the logarithm of the votes for what was never seen. Texts of
many kinds gain nothing in the mean by it, but copies are drafted longer and open text less; predictions gain 3%."""
LEAST, MOST = ESCAPE / 16, ESCAPE * 4
"""Bounds of what is learned."""
NOWHERE = -2
MEAN_LUCK = 1.781
"""e to Euler's constant: the factor of a token whose noise is not known."""
LONGEST = 64
"""Length of a match at most."""
VOTES = tuple(length**1.5 for length in range(LONGEST + MAX_NODES + 1))
"""What a match of each length counts."""


class Match(NamedTuple):
    """An earlier place; hundreds are made for a draft, so it is a tuple.

    Attributes:
        length: how many last tokens of the text match.
        followers: the tokens behind it; a negative one ends them.
        weight: what its votes count.
    """

    length: int
    followers: Sequence[int]
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Limits:
    """How far a tree goes.

    Attributes:
        num_nodes: nodes at most.
        depth: levels at most.
        width: children of a node at most.
        floor: a node whose estimated survival is below is left out.
        min_confidence: nothing grows below a node that is less likely than this behind its parent.
    """

    num_nodes: int
    depth: int
    width: int
    floor: float
    min_confidence: float = 0.0


NoiseFactors = Callable[[int, Sequence[int]], Mapping[int, float]]
"""(level, tokens) to the factor that the noise gives each token there: e to its Gumbel number."""


class NoveltyPrior:
    """How much a text is like what came before, learned from what became of earlier drafts.

    Every guess said how likely it was; where the text went on as guessed, less is left for what was never seen, else
    more. What is written is the evidence, so guesses that were never scored count as well.
    """

    def __init__(self) -> None:
        self.unseen = ESCAPE
        self._tree, self._length = EMPTY, 0

    def remember(self, tree: TokenTree, length: int) -> None:
        """A tree that was drafted behind so many tokens."""
        self._tree, self._length = tree, length

    def learn(self, tokens: np.ndarray) -> None:
        """See what became of the last draft; `tokens` are the whole text."""
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


def luck_of(view: SequenceView) -> NoiseFactors | None:
    """The luck that the request's own noise gives at the coming positions; None at temperature 0, which has none."""
    controls, start = view.controls, len(view.history)
    if controls.temperature == 0:
        return None

    def factors(level: int, tokens: Sequence[int]) -> Mapping[int, float]:
        numbers = controls.noise.gumbel_of_few(start + level, tokens)
        return {token: math.exp(number) for token, number in zip(tokens, numbers, strict=True)}

    return factors


def grow(
    voters: Sequence[Match], limits: Limits, *, draw: Draw, luck: NoiseFactors | None = None, unseen: float = ESCAPE
) -> TokenTree:
    """The tree of the nodes with the highest estimated survival.

    Args:
        voters: earlier places, those that win a draw first.
        limits: of the tree.
        draw: what its children count as.
        luck: the noise that will choose, where the drafter may know it; else candidates go by counts alone.
        unseen: votes for what was never seen.

    Returns:
        A tree with the logarithm of the estimated survival as score; siblings stand best first.
    """
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    # (minus survival, number of the candidate, parent, token, chance behind it, voters that agree, level)
    heap: list[tuple[float, int, int, int, float, list[Match], int]] = []
    num_candidates = 0
    node, survival, chance, level, agreeing = ROOT, 1.0, 1.0, 0, list(voters)
    while True:
        if level < limits.depth and chance >= limits.min_confidence:
            for token, share, followers in _children(agreeing, level, limits.width, luck, unseen):
                if survival * share >= limits.floor:
                    num_candidates += 1
                    heapq.heappush(heap, (-survival * share, num_candidates, node, token, share, followers, level + 1))
        if not heap or len(tokens) == limits.num_nodes:
            break
        negative, _, parent, token, chance, agreeing, level = heapq.heappop(heap)
        node, survival = len(tokens), -negative
        tokens.append(token)
        parents.append(parent)
        scores.append(math.log(survival))
    return TokenTree(tuple(tokens), tuple(parents), tuple(scores), draw)


def _children(
    voters: Sequence[Match], level: int, width: int, luck: NoiseFactors | None, unseen: float
) -> list[tuple[int, float, list[Match]]]:
    """Tokens that may come next, with their chances and the voters for them; the likeliest first."""
    groups: dict[int, list[Match]] = {}
    votes: dict[int, float] = {}
    for voter in voters:
        token = voter.followers[level]
        if token >= 0:
            groups.setdefault(token, []).append(voter)
            votes[token] = votes.get(token, 0.0) + voter.weight * VOTES[voter.length + level]
    if luck is not None and votes:
        factors = luck(level, tuple(votes))
        votes = {token: count * factors[token] for token, count in votes.items()}
        unseen *= MEAN_LUCK
    total = sum(votes.values()) + unseen
    best = sorted(votes, key=lambda token: -votes[token])[:width]
    return [(token, votes[token] / total, groups[token]) for token in best]


def require_tree(drafter: str, config: Any) -> None:
    """Refuse sizes of a tree that are out of range.

    Raises:
        ConfigurationError: `k`, `nodes`, `width` or `floor` is.
    """
    for name in ("k", "nodes", "width"):
        if not 1 <= getattr(config, name) <= MAX_NODES:
            raise ConfigurationError(
                f"option {name} of drafter '{drafter}' is {getattr(config, name)}: it must be from 1 to {MAX_NODES}"
            )
    if not 0 <= config.floor <= 1:
        raise ConfigurationError(f"option floor of drafter '{drafter}' is {config.floor}: it must be from 0 to 1")


@dataclass(slots=True)
class CountedText:
    """A sequence, and how far it is like what came before."""

    view: SequenceView
    trust: NoveltyPrior = field(default_factory=NoveltyPrior, kw_only=True)


Text = TypeVar("Text", bound=CountedText)


class CountingDrafter(SequenceDrafter[Text]):
    """Grows trees from earlier places, which a method finds in `_voters`."""

    def __init__(self, config: Any, context: DraftContext) -> None:
        self._config = config
        self._traits = self.describe(config)
        self._draw = context.draw
        self._shares_noise = context.shares_noise and context.draw is Draw.FREE

    @classmethod
    def describe(cls, config: Any) -> DraftTraits:
        """Chosen by counts; with a width of 1 one certain child per node."""
        depth, branches = min(config.k, config.nodes), config.width > 1
        return DraftTraits(
            draws=frozenset({Draw.FREE} if branches else {Draw.FREE, Draw.POINT}),
            depth=depth,
            nodes=config.nodes if branches else depth,
            branches=branches,
            gives_confidence=True,
        )

    @abstractmethod
    def _voters(self, state: Text, depth: int) -> list[Match]:
        """Earlier places with `depth` tokens behind each; those first that win a draw."""

    def draft_one(self, state: Text, budget: Budget) -> TokenTree:
        """The likeliest ways on."""
        config, tokens = self._config, state.view.history.tokens
        state.trust.learn(tokens)
        held = budget.within(self._traits.nodes, self._traits.depth)
        if not held.num_nodes or not held.depth:
            return EMPTY
        limits = Limits(held.num_nodes, held.depth, config.width, config.floor, held.min_confidence)
        luck = luck_of(state.view) if self._shares_noise else None
        voters = self._voters(state, held.depth)
        tree = grow(voters, limits, draw=self._draw, luck=luck, unseen=state.trust.unseen)
        state.trust.remember(tree, len(tokens))
        return tree
