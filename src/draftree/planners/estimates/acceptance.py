"""How likely drafted nodes are to be written: learned from what was, apart for every drafter and kind of guess.

A node's chance behind its parent is that of its bin. A drafter that scores its guesses has a bin for each range of its
own probability, so that a drafter that is too sure of itself is corrected: where little was seen, by what all its bins
showed together. One that does not has a bin for each depth and rank. A merged tree has such bins for every set of
drafters that guessed a node. What one sequence shows beyond that shifts the odds of its own nodes, the less it has
shown the less. Survival is the product along the path.
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
ASSUMED_MEMORY = 200.0
UNSCORED = 100

Sources = tuple[str, ...]
Key = tuple[Sources, int]


@dataclass(slots=True)
class Bin:
    """Tries and hits of one kind of guess. Mutated by `Acceptance`.

    Attributes:
        hits: seen, or assumed at first.
        tries: likewise.
        assumed: what the drafter's own probability says; None where it says nothing.
    """

    hits: float
    tries: float
    assumed: float | None = None

    def chance(self, odds: float) -> float:
        """How likely such a node is to be accepted behind its parent.

        Args:
            odds: factor of the odds of what is assumed, as all bins of these drafters showed.
        """
        if self.assumed is None:
            return self.hits / self.tries
        return (self.hits + PRIOR_WEIGHT * shifted(self.assumed, odds)) / (self.tries + PRIOR_WEIGHT)


def shifted(chance: float, odds: float) -> float:
    """The chance whose odds are so many times as high."""
    return chance * odds / (1.0 - chance + chance * odds)


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

    def observe(self, expected: float, hit: float, *, memory: float) -> None:
        """One node, and how likely it was."""
        # towards the prior, not towards zero: what is forgotten was as expected
        rest, keep = OWN_WEIGHT / memory, 1.0 - 1.0 / memory
        self.hits = keep * self.hits + rest + hit
        self.expected_hits = keep * self.expected_hits + rest + expected
        self.misses = keep * self.misses + rest + 1.0 - hit
        self.expected_misses = keep * self.expected_misses + rest + 1.0 - expected


@dataclass(slots=True)
class OwnAcceptance:
    """One sequence's shifts, by sources."""

    by_sources: dict[Sources, Own] = field(default_factory=dict)

    def of(self, sources: Sources) -> Own:
        """The shift for these."""
        found = self.by_sources.get(sources)
        if found is None:
            found = self.by_sources[sources] = Own()
        return found


class Acceptance:
    """Learns chances from verdicts. Mutated by `observe`.

    Args:
        memory: tries after which what a bin learned counts 1/e.
    """

    def __init__(self, memory: float) -> None:
        self._keep = 1.0 - 1.0 / memory
        self._bins: dict[Key, Bin] = {}
        self._assumed = OwnAcceptance()

    def survivals(self, own: OwnAcceptance, tree: TokenTree) -> list[float]:
        """How likely each node is to be written, its ancestors with it."""
        if not len(tree):
            return []
        found: list[float] = []
        bins = self._bins
        shifts = {sources: shift.odds for sources, shift in own.by_sources.items()}
        odds = {sources: shift.odds for sources, shift in self._assumed.by_sources.items()}
        for parent, key in zip(tree.parents, keys_of(tree), strict=True):
            chance = (bins.get(key) or self._new(key)).chance(odds.get(key[0], 1.0))
            shift = shifts.get(key[0])
            if shift is not None:
                chance = shifted(chance, shift)
            found.append(chance if parent < 0 else chance * found[parent])
        return found

    def observe(self, own: OwnAcceptance, tree: TokenTree, path: Sequence[int]) -> None:
        """Learn from a verdict on a scored tree: from the children of the root and of accepted nodes."""
        visited = {-1, *path}
        for node, (parent, key) in enumerate(zip(tree.parents, keys_of(tree), strict=True)):
            if parent not in visited:
                continue
            bin_, hit = self._bins.get(key) or self._new(key), 1.0 if node in visited else 0.0
            # drafters that are too sure are so in all bins: few tries tell it of all that were not seen yet
            assumed = self._assumed.of(key[0])
            own.of(key[0]).observe(bin_.chance(assumed.odds), hit, memory=OWN_MEMORY)
            if bin_.assumed is not None:
                assumed.observe(bin_.assumed, hit, memory=ASSUMED_MEMORY)
            bin_.hits = self._keep * bin_.hits + hit
            bin_.tries = self._keep * bin_.tries + 1.0

    def _new(self, key: Key) -> Bin:
        sources, kind = key
        if kind < UNSCORED:
            self._bins[key] = Bin(0.0, 0.0, CENTRES[kind])
            return self._bins[key]
        depth, rank = divmod(kind - UNSCORED, len(BY_RANK))
        above = self._bins.get((sources, kind - len(BY_RANK))) if depth else None
        chance = BY_RANK[rank] if above is None else above.chance(1.0)
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
