"""Acceptance probabilities of drafted nodes, learned for every drafter and kind of node.

The probability of a node, given that its parent is accepted, is that of its bin. A drafter with scores has a bin for
each range of its own probability, which corrects overconfidence; bins with few nodes are corrected by all bins of the
drafter. A drafter without scores has a bin for each depth and rank. In a merged tree every set of drafters of a node
has its own bins. A sequence's deviation from its bins shifts the odds of its own nodes, in proportion to its
observations. Survival is the product along the path.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

from draftree.core.tree import TokenTree
from draftree.planners.estimates.constants import AUTO

LOG_EDGES = tuple(math.log(edge) for edge in AUTO.score_edges)
CENTRES = tuple((low + high) / 2 for low, high in zip((0.0, *AUTO.score_edges), (*AUTO.score_edges, 1.0), strict=True))
"""Centre of each bin."""
NO_SCORE = -1e-4
"""Conditional log-probabilities above this mean that the drafter has no scores."""
FIRST_UNSCORED = 100
"""Number of the first bin of unscored nodes."""

Sources = tuple[str, ...]
Key = tuple[Sources, int]


@dataclass(slots=True)
class Bin:
    """Nodes and accepted nodes of one kind. Mutated by `Acceptance`.

    Attributes:
        hits: number of accepted nodes, observed or initially assumed.
        tries: number of nodes, likewise.
        assumed: acceptance by the drafter's probability; None without one.
        weight: weight in guesses of `assumed`.
    """

    hits: float
    tries: float
    assumed: float | None = None
    weight: float = AUTO.score_weight

    def chance(self, odds: float) -> float:
        """Return the acceptance probability of such a node, given its parent.

        Args:
            odds: factor of the assumed odds, from all bins of these drafters.
        """
        if self.assumed is None:
            return self.hits / self.tries
        return (self.hits + self.weight * shifted(self.assumed, odds)) / (self.tries + self.weight)


def shifted(chance: float, odds: float) -> float:
    """Return the chance with odds multiplied by `odds`."""
    return chance * odds / (1.0 - chance + chance * odds)


@dataclass(slots=True)
class Deviation:
    """Observed and expected hits and misses of one sequence. Mutated by `Acceptance`."""

    hits: float = AUTO.sequence_weight
    expected_hits: float = AUTO.sequence_weight
    misses: float = AUTO.sequence_weight
    expected_misses: float = AUTO.sequence_weight

    @property
    def odds(self) -> float:
        """Factor of the odds of its nodes."""
        return self.hits / self.expected_hits * self.expected_misses / self.misses

    def observe(self, expected: float, hit: float, *, memory: float) -> None:
        """Add one node and its expected acceptance."""
        # decays towards the prior, not towards zero
        rest, keep = AUTO.sequence_weight / memory, 1.0 - 1.0 / memory
        self.hits = keep * self.hits + rest + hit
        self.expected_hits = keep * self.expected_hits + rest + expected
        self.misses = keep * self.misses + rest + 1.0 - hit
        self.expected_misses = keep * self.expected_misses + rest + 1.0 - expected


@dataclass(slots=True)
class SequenceAcceptance:
    """One sequence's deviations, by sources."""

    by_sources: dict[Sources, Deviation] = field(default_factory=dict)

    def of(self, sources: Sources) -> Deviation:
        """Return the deviation for these sources."""
        found = self.by_sources.get(sources)
        if found is None:
            found = self.by_sources[sources] = Deviation()
        return found


class Acceptance:
    """Learns acceptance from verdicts. Mutated by `observe`.

    Args:
        memory: number of nodes after which an observation of a bin has weight 1/e.
        calibrated: names of the drafters whose scores are fitted probabilities.
    """

    def __init__(self, memory: float, calibrated: Sequence[str] = ()) -> None:
        self._keep = 1.0 - 1.0 / memory
        self._calibrated = frozenset(calibrated)
        self._bins: dict[Key, Bin] = {}
        self._assumed = SequenceAcceptance()

    def survivals(self, own: SequenceAcceptance, tree: TokenTree) -> list[float]:
        """Return the probability of each node that it and its ancestors are accepted."""
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
        """Learn from the verdict on a scored tree: on the children of the root and of accepted nodes."""
        visited = {-1, *path}
        for node, (parent, key) in enumerate(zip(tree.parents, keys_of(tree), strict=True)):
            if parent not in visited:
                continue
            bin_, hit = self._bins.get(key) or self._new(key), 1.0 if node in visited else 0.0
            # overconfidence is common to all bins, so it also corrects bins without observations
            assumed = self._assumed.of(key[0])
            own.of(key[0]).observe(bin_.chance(assumed.odds), hit, memory=AUTO.sequence_memory)
            if bin_.assumed is not None:
                assumed.observe(bin_.assumed, hit, memory=AUTO.calibration_memory)
            bin_.hits = self._keep * bin_.hits + hit
            bin_.tries = self._keep * bin_.tries + 1.0

    def _new(self, key: Key) -> Bin:
        sources, kind = key
        if kind < FIRST_UNSCORED:
            if self._calibrated.issuperset(sources) and self._calibrated:
                self._bins[key] = Bin(0.0, 0.0, CENTRES[kind], AUTO.calibrated_weight)
            else:
                self._bins[key] = Bin(0.0, 0.0, AUTO.score_discount * CENTRES[kind])
            return self._bins[key]
        depth, rank = divmod(kind - FIRST_UNSCORED, len(AUTO.rank_chances))
        above = self._bins.get((sources, kind - len(AUTO.rank_chances))) if depth else None
        chance = AUTO.rank_chances[rank] if above is None else above.chance(1.0)
        weight = AUTO.later_rank_weight if rank else AUTO.first_rank_weight
        self._bins[key] = Bin(weight * chance, weight)
        return self._bins[key]


def keys_of(tree: TokenTree) -> list[Key]:
    """Return the bin of every node."""
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
