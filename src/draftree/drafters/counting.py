"""A token tree out of what followed before: the likeliest ways on, by weighted counts, best first.

Every earlier place votes for the tokens that followed it. The longer it matches the text, the more it counts, and
behind a drafted token those that agree with it match by one more. What was never seen has a share as well, so that
one short match is no certainty.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from draftree.core.tree import ROOT, Draw, TokenTree
from draftree.core.types import MAX_NODES
from draftree.drafters.base import SequenceView

ESCAPE = 2.5
"""Votes for what was never seen. With `VOTES` it gives one match of 1, 2, 4, 8, 16 tokens a chance of 0.29, 0.53,
0.76, 0.90, 0.96; counted on prompts of many kinds were 0.30, 0.48, 0.69, 0.84, 0.97."""
MEAN_LUCK = 1.781
"""e to Euler's constant: the factor of a token whose noise is not known."""
LONGEST = 64
"""Length of a match at most."""
VOTES = tuple(length**1.5 for length in range(LONGEST + MAX_NODES + 1))
"""What a match of each length counts."""


class Voter(NamedTuple):
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


Luck = Callable[[int, Sequence[int]], Mapping[int, float]]
"""(level, tokens) to the factor that the noise gives each token there: e to its Gumbel number."""


def luck_of(view: SequenceView) -> Luck | None:
    """The luck that the request's own noise gives at the coming positions; None at temperature 0, which has none."""
    controls, start = view.controls, len(view.history)
    if controls.temperature == 0:
        return None

    def factors(level: int, tokens: Sequence[int]) -> Mapping[int, float]:
        numbers = controls.noise.gumbel_of_few(start + level, tokens)
        return {token: math.exp(number) for token, number in zip(tokens, numbers, strict=True)}

    return factors


def grow(voters: Sequence[Voter], limits: Limits, *, draw: Draw, luck: Luck | None = None) -> TokenTree:
    """The tree of the nodes with the highest estimated survival.

    Args:
        voters: earlier places, those that win a draw first.
        limits: of the tree.
        draw: what its children count as.
        luck: the noise that will choose, where the drafter may know it; else candidates go by counts alone.

    Returns:
        A tree with the logarithm of the estimated survival as score; siblings stand best first.
    """
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    # (minus survival, number of the candidate, parent, token, chance behind it, voters that agree, level)
    heap: list[tuple[float, int, int, int, float, list[Voter], int]] = []
    num_candidates = 0
    node, survival, chance, level, agreeing = ROOT, 1.0, 1.0, 0, list(voters)
    while True:
        if level < limits.depth and chance >= limits.min_confidence:
            for token, share, followers in _children(agreeing, level, limits.width, luck):
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
    voters: Sequence[Voter], level: int, width: int, luck: Luck | None
) -> list[tuple[int, float, list[Voter]]]:
    """Tokens that may come next, with their chances and the voters for them; the likeliest first."""
    groups: dict[int, list[Voter]] = {}
    votes: dict[int, float] = {}
    for voter in voters:
        token = voter.followers[level]
        if token >= 0:
            groups.setdefault(token, []).append(voter)
            votes[token] = votes.get(token, 0.0) + voter.weight * VOTES[voter.length + level]
    unseen = ESCAPE
    if luck is not None and votes:
        factors = luck(level, tuple(votes))
        votes = {token: count * factors[token] for token, count in votes.items()}
        unseen *= MEAN_LUCK
    total = sum(votes.values()) + unseen
    best = sorted(votes, key=lambda token: -votes[token])[:width]
    return [(token, votes[token] / total, groups[token]) for token in best]
