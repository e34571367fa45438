"""Trees of candidates: what native kernels need to grow all levels of a tree without their caller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from draftree.sampling.logits import RowNoise


@dataclass(frozen=True, slots=True)
class TreeSearch:
    """How the nodes of one tree are chosen.

    Attributes:
        num_nodes: maximum number of nodes.
        noise: for each level, the noise of its rows; all of one temperature. Its length is the maximum depth.
        maps: for each level, slope and offset of the map from shares to probabilities (`heads/calibration.py`); empty
            for shares as they are.
        least_confidence: probability that a node with children has, given its parent; for mapped shares only.
        least_score: least score of a node with children.
    """

    num_nodes: int
    noise: RowNoise
    maps: Sequence[tuple[float, float]]
    least_confidence: float
    least_score: float


@dataclass(frozen=True, slots=True)
class TreeWidths:
    """Shape of trees that grow together.

    Attributes:
        widths: number of children of a node by level.
        is_best: whether the nodes of the highest scores stay; otherwise the first ones.
    """

    widths: Sequence[int]
    is_best: bool

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
    """Bounds of the sizes of a tree while it grows.

    Attributes:
        nodes: nodes, also those that do not stay.
        rows: nodes that are read in one pass.
        read: nodes that are read in all passes.
    """

    nodes: int
    rows: int
    read: int


class FoundTree(NamedTuple):
    """A tree. A score is the sum of the logarithms of the probabilities, or shares, on a node's path.

    Attributes:
        tokens: token ids.
        parents: index of each node's parent, -1 for the root.
        scores: score of each node.
    """

    tokens: list[int]
    parents: list[int]
    scores: list[float]
