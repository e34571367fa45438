"""Trees of candidates: what native kernels need to grow all levels of a tree without their caller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from draftree.sampling.logits import RowNoise


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
