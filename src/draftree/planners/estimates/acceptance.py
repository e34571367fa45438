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
from draftree.planners.estimates.constants import AUTO

LOG_EDGES = tuple(math.log(edge) for edge in AUTO.score_edges)
CENTRES = tuple(
    AUTO.score_discount * (low + high) / 2
    for low, high in zip((0.0, *AUTO.score_edges), (*AUTO.score_edges, 1.0), strict=True)
)
"""Assumed acceptance of each bin."""
NO_SCORE = -1e-4
"""A conditional log-probability above this carries no information: the drafter gives none."""
FIRST_UNSCORED = 100
"""Number of the first bin of unscored guesses."""

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
        return (self.hits + AUTO.score_weight * shifted(self.assumed, odds)) / (self.tries + AUTO.score_weight)


def shifted(chance: float, odds: float) -> float:
    """The chance whose odds are so many times as high."""
    return chance * odds / (1.0 - chance + chance * odds)


@dataclass(slots=True)
class Deviation:
    """What one sequence showed: hits and misses beside those that were expected. Mutated by `Acceptance`."""

    hits: float = AUTO.sequence_weight
    expected_hits: float = AUTO.sequence_weight
    misses: float = AUTO.sequence_weight
    expected_misses: float = AUTO.sequence_weight

    @property
    def odds(self) -> float:
        """The factor of the odds of its nodes."""
        return self.hits / self.expected_hits * self.expected_misses / self.misses

    def observe(self, expected: float, hit: float, *, memory: float) -> None:
        """One node, and how likely it was."""
        # towards the prior, not towards zero: what is forgotten was as expected
        rest, keep = AUTO.sequence_weight / memory, 1.0 - 1.0 / memory
        self.hits = keep * self.hits + rest + hit
        self.expected_hits = keep * self.expected_hits + rest + expected
        self.misses = keep * self.misses + rest + 1.0 - hit
        self.expected_misses = keep * self.expected_misses + rest + 1.0 - expected


@dataclass(slots=True)
class SequenceAcceptance:
    """One sequence's shifts, by sources."""

    by_sources: dict[Sources, Deviation] = field(default_factory=dict)

    def of(self, sources: Sources) -> Deviation:
        """The shift for these."""
        found = self.by_sources.get(sources)
        if found is None:
            found = self.by_sources[sources] = Deviation()
        return found


class Acceptance:
    """Learns chances from verdicts. Mutated by `observe`.

    Args:
        memory: tries after which what a bin learned counts 1/e.
    """

    def __init__(self, memory: float) -> None:
        self._keep = 1.0 - 1.0 / memory
        self._bins: dict[Key, Bin] = {}
        self._assumed = SequenceAcceptance()

    def survivals(self, own: SequenceAcceptance, tree: TokenTree) -> list[float]:
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

    def observe(self, own: SequenceAcceptance, tree: TokenTree, path: Sequence[int]) -> None:
        """Learn from a verdict on a scored tree: from the children of the root and of accepted nodes."""
        visited = {-1, *path}
        for node, (parent, key) in enumerate(zip(tree.parents, keys_of(tree), strict=True)):
            if parent not in visited:
                continue
            bin_, hit = self._bins.get(key) or self._new(key), 1.0 if node in visited else 0.0
            # drafters that are too sure are so in all bins: few tries tell it of all that were not seen yet
            assumed = self._assumed.of(key[0])
            own.of(key[0]).observe(bin_.chance(assumed.odds), hit, memory=AUTO.sequence_memory)
            if bin_.assumed is not None:
                assumed.observe(bin_.assumed, hit, memory=AUTO.calibration_memory)
            bin_.hits = self._keep * bin_.hits + hit
            bin_.tries = self._keep * bin_.tries + 1.0

    def _new(self, key: Key) -> Bin:
        sources, kind = key
        if kind < FIRST_UNSCORED:
            self._bins[key] = Bin(0.0, 0.0, CENTRES[kind])
            return self._bins[key]
        depth, rank = divmod(kind - FIRST_UNSCORED, len(AUTO.rank_chances))
        above = self._bins.get((sources, kind - len(AUTO.rank_chances))) if depth else None
        chance = AUTO.rank_chances[rank] if above is None else above.chance(1.0)
        weight = AUTO.later_rank_weight if rank else AUTO.first_rank_weight
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
        if certainty < NO_SCORE:
            kind = bisect_left(LOG_EDGES, certainty)
        else:
            depth = (
                AUTO.depth_bins[depths[node] - 1] if depths[node] <= len(AUTO.depth_bins) else AUTO.depth_bins[-1] + 1
            )
            kind = FIRST_UNSCORED + depth * len(AUTO.rank_chances) + min(rank, len(AUTO.rank_chances) - 1)
        keys.append((sources[node] if sources else (), kind))
    return keys
