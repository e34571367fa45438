"""How likely drafted nodes are to be written: learned from what was, apart for every drafter and kind of guess.

A node's chance behind its parent is that of its bin. A drafter that scores its guesses has a bin for each range of its
own probability, so that a drafter that is too sure of itself is corrected; one that does not has a bin for each depth
and rank. A merged tree has such bins for every set of drafters that guessed a node. What one sequence shows beyond that
shifts the odds of its own nodes, the less it has shown the less. Survival is the product along the path.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from draftree.core.tree import TokenTree

EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.87, 0.93, 0.97, 0.99)
"""Of a drafter's own probability behind the parent."""
LOG_EDGES = tuple(math.log(edge) for edge in EDGES)
CENTRES = tuple(0.95 * (low + high) / 2 for low, high in zip((0.0, *EDGES), (*EDGES, 1.0), strict=True))
"""What a bin counts as before anything was seen: drafters are a little too sure."""
CERTAIN = -1e-4
"""A log-probability above says nothing: the drafter gives none."""
BY_RANK = (0.6, 0.15, 0.06, 0.04, 0.02)
DEPTHS = (0, 1, 2, 3, 3, 4, 4, 4, 4)
"""The bin of each depth; deeper ones share one more."""
PRIOR_WEIGHT = 2.5
FIRST_WEIGHT = 1.5
LATER_WEIGHT = 4.0
"""Tries that what is assumed counts: less for first guesses, which are seen often, more for later ones, which a few
misses would cut for good."""
OWN_WEIGHT = 6.0
OWN_MEMORY = 32.0
UNSCORED = 100

Sources = tuple[str, ...]
Key = tuple[Sources, int]


@dataclass(slots=True)
class Bin:
    """Tries and hits of one kind of guess, the prior among them. Mutated by `Acceptance`."""

    hits: float
    tries: float

    @property
    def chance(self) -> float:
        """How likely such a node is to be accepted behind its parent."""
        return self.hits / self.tries


@dataclass(slots=True)
class Own:
    """What one sequence showed: hits and misses beside those that were expected. Mutated by `Acceptance`."""

    hits: float = OWN_WEIGHT
    expected_hits: float = OWN_WEIGHT
    misses: float = OWN_WEIGHT
    expected_misses: float = OWN_WEIGHT

    @property
    def odds(self) -> float:
        """The factor of the odds of its nodes."""
        return self.hits / self.expected_hits * self.expected_misses / self.misses


@dataclass(slots=True)
class OwnAcceptance:
    """One sequence's shifts, by sources."""

    by_sources: dict[Sources, Own] = field(default_factory=dict)


class Acceptance:
    """Learns chances from verdicts. Mutated by `observe`.

    Args:
        memory: tries after which what a bin learned counts 1/e.
    """

    def __init__(self, memory: float) -> None:
        self._keep = 1.0 - 1.0 / memory
        self._bins: dict[Key, Bin] = {}

    def survivals(self, own: OwnAcceptance, tree: TokenTree) -> list[float]:
        """How likely each node is to be written, its ancestors with it."""
        found: list[float] = []
        bins = self._bins
        shifts = {sources: shift.odds for sources, shift in own.by_sources.items()}
        for parent, key in zip(tree.parents, keys_of(tree), strict=True):
            chance = (bins.get(key) or self._new(key)).chance
            odds = shifts.get(key[0])
            if odds is not None:
                chance = chance * odds / (1.0 - chance + chance * odds)
            found.append(chance if parent < 0 else chance * found[parent])
        return found

    def observe(self, own: OwnAcceptance, tree: TokenTree, path: Sequence[int]) -> None:
        """Learn from a verdict on a scored tree: from the children of the root and of accepted nodes."""
        visited = {-1, *path}
        for node, (parent, key) in enumerate(zip(tree.parents, keys_of(tree), strict=True)):
            if parent not in visited:
                continue
            bin_, hit = self._bins.get(key) or self._new(key), 1.0 if node in visited else 0.0
            self._observe_own(own, key, chance=bin_.chance, hit=hit)
            bin_.hits = self._keep * bin_.hits + hit
            bin_.tries = self._keep * bin_.tries + 1.0

    @staticmethod
    def _observe_own(own: OwnAcceptance, key: Key, *, chance: float, hit: float) -> None:
        shift = own.by_sources.get(key[0])
        if shift is None:
            shift = own.by_sources[key[0]] = Own()
        # towards the prior, not towards zero: what is forgotten was as expected
        rest = OWN_WEIGHT / OWN_MEMORY
        keep = 1.0 - 1.0 / OWN_MEMORY
        shift.hits = keep * shift.hits + rest + hit
        shift.expected_hits = keep * shift.expected_hits + rest + chance
        shift.misses = keep * shift.misses + rest + 1.0 - hit
        shift.expected_misses = keep * shift.expected_misses + rest + 1.0 - chance

    def _new(self, key: Key) -> Bin:
        sources, kind = key
        weight = PRIOR_WEIGHT
        if kind < UNSCORED:
            chance = CENTRES[kind]
        else:
            depth, rank = divmod(kind - UNSCORED, len(BY_RANK))
            above = self._bins.get((sources, kind - len(BY_RANK))) if depth else None
            chance = BY_RANK[rank] if above is None else above.chance
            weight = LATER_WEIGHT if rank else FIRST_WEIGHT
        self._bins[key] = Bin(weight * chance, weight)
        return self._bins[key]


def keys_of(tree: TokenTree) -> list[Key]:
    """The bin of every node."""
    scores, sources = tree.scores, tree.sources
    keys: list[Key] = []
    depths: list[int] = []
    num_children = [0] * (len(tree) + 1)
    for node, parent in enumerate(tree.parents):
        depths.append(1 if parent < 0 else depths[parent] + 1)
        rank = num_children[parent + 1]
        num_children[parent + 1] += 1
        certainty = scores[node] - (scores[parent] if parent >= 0 else 0.0) if scores else 0.0
        if certainty < CERTAIN:
            kind = bisect_left(LOG_EDGES, certainty)
        else:
            depth = DEPTHS[depths[node] - 1] if depths[node] <= len(DEPTHS) else DEPTHS[-1] + 1
            kind = UNSCORED + depth * len(BY_RANK) + min(rank, len(BY_RANK) - 1)
        keys.append((sources[node] if sources else (), kind))
    return keys
