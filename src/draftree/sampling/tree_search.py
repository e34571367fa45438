"""Trees of candidates: what a model needs to grow all levels of a tree without its caller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from draftree.sampling.logits import RowNoise

MOST_SURE = 1e-6  # shares are mapped as if they were at least this, and at most 1 minus this


class Kept(NamedTuple):
    """The filters of a row, applied in this order after the temperature."""

    min_p: float = 0.0  # least probability relative to the largest; 0 for none
    top_k: int = 0  # number of largest logits; 0 for all
    top_p: float = 1.0  # mass of the most likely tokens; 1 for all


UNFILTERED = Kept()


@dataclass(frozen=True, slots=True)
class TreeSearch:
    """How the nodes of one tree are chosen."""

    num_nodes: int  # maximum number of nodes
    noise: RowNoise  # for each level, the noise of its rows; all of one temperature. Its length is the maximum depth.
    # for each level, slope and offset of the map from shares to probabilities (`heads/calibration.py`); empty for
    # shares as they are
    maps: Sequence[tuple[float, float]]
    least_confidence: float  # probability that a node with children has, given its parent; for mapped shares only
    least_score: float  # least score of a node with children
    kept: Kept = UNFILTERED


@dataclass(frozen=True, slots=True)
class TreeWidths:
    """Shape of trees that grow together."""

    widths: Sequence[int]  # number of children of a node by level
    is_best: bool  # whether the nodes of the highest scores stay; otherwise the first ones

    def sizes(self, search: TreeSearch) -> TreeSizes:
        """Return bounds of the sizes of a tree while it grows."""
        rows, nodes, most, read = 1, 0, 1, 0
        for level in range(len(search.noise)):
            if level:
                most, read = max(most, rows), read + rows
            nodes += rows * self.widths[level]
            rows = min(rows * self.widths[level], search.num_nodes)
        return TreeSizes(nodes if self.is_best else min(nodes, search.num_nodes), most, read)


class TreeSizes(NamedTuple):
    """Bounds of the sizes of a tree while it grows."""

    nodes: int  # nodes, also those that do not stay
    rows: int  # nodes that are read in one pass
    read: int  # nodes that are read in all passes


class FoundTree(NamedTuple):
    """A tree. A score is the sum of the logarithms of the probabilities, or shares, on a node's path."""

    tokens: list[int]  # token ids
    parents: list[int]  # index of each node's parent, -1 for the root
    scores: list[float]  # score of each node
    read: Sequence[int] = ()  # place of each among the nodes that are read, or -1; empty where nothing is kept of them

    def parents_of_read(self) -> list[int]:
        """Return the parents of the nodes that are read, by place; -1 for places without a node."""
        parents = [-1] * (max(self.read, default=-1) + 1)
        for place, parent in zip(self.read, self.parents, strict=False):
            if place >= 0 <= parent:
                parents[place] = self.read[parent]
        return parents

    def tokens_of_read(self) -> list[int]:
        """Return the tokens of the nodes that are read, by place; -1 for places without a node."""
        tokens = [-1] * (max(self.read, default=-1) + 1)
        for place, token in zip(self.read, self.tokens, strict=False):
            if place >= 0:
                tokens[place] = token
        return tokens
