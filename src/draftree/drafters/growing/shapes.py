"""Shapes of grown trees: `chain`, `1-1-3-1`, `best-32`, `iid-2-2-1`, `wor-2-2-1`.

* `chain`: one child per node.
* `1-1-3-1`: at step i every node gets its k_i best children (the expansion of SpecInfer, arXiv 2305.09781).
* `best-n`: the n nodes of highest survival, the product of the drafter's probabilities along the path, within the
  maximum number of levels (as in OPT-Tree, arXiv 2406.17276). `best-n-m` extends at most the m best nodes of a level
  (as in EAGLE-2, arXiv 2406.16858): passes of the drafter are shorter, and few of the other nodes have kept children.
* `iid-…`, `wor-…`: an expansion with children drawn independently or without replacement, for verifiers that need draft
  distributions.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftree.core.errors import ConfigurationError
from draftree.core.tree import Draw
from draftree.core.types import MAX_NODES

CHAIN_DEPTH = 5
BEST_DEPTH = 6
EXAMPLES = "chain, 1-1-3-1-1, best-32, best-64-8, iid-2-2-1 or wor-2-2-1"


@dataclass(frozen=True, slots=True)
class Shape:
    """Number of children of nodes by level.

    Attributes:
        widths: number of children of a node by level; its length is the depth.
        draws: supported draws; the verifier chooses one.
        num_best: number of best nodes to keep; None keeps all.
        num_extended: maximum number of nodes of a level that get children; None for all.
    """

    widths: tuple[int, ...]
    draws: frozenset[Draw]
    num_best: int | None = None
    num_extended: int | None = None

    @property
    def depth(self) -> int:
        """Maximum number of levels."""
        return len(self.widths)

    @property
    def is_chain(self) -> bool:
        """Whether every node has at most one child."""
        return max(self.widths) == 1

    @property
    def num_nodes(self) -> int:
        """Maximum number of nodes."""
        total, level = 0, 1
        for width in self.widths:
            level *= width
            total += level
        return total if self.num_best is None else min(total, self.num_best)

    @property
    def num_fed(self) -> int:
        """Maximum number of nodes that the model reads while the tree grows: all levels except the last."""
        total, level = 0, 1
        for width in self.widths[:-1]:
            level = level * width if self.num_best is None else min(level * width, self.num_extended or self.num_best)
            total += level
        return total


def parse_shape(text: str, k: int | None) -> Shape:
    """Parse the options `tree` and `k` of a draft spec; k limits the levels.

    Raises:
        ConfigurationError: malformed text, or numbers out of range.
    """
    if k is not None and not 1 <= k <= MAX_NODES:
        raise ConfigurationError(f"option k is {k}: it must be from 1 to {MAX_NODES}, or drafter none be used")
    shape = _shape(text, k)
    if shape.num_nodes > MAX_NODES:
        raise ConfigurationError(
            f"tree shape '{text}' has {shape.num_nodes} nodes: {MAX_NODES} fit in a pass, choose less"
        )
    return shape


def _shape(text: str, k: int | None) -> Shape:
    if text == "chain":
        return Shape((1,) * (k or CHAIN_DEPTH), frozenset({Draw.FREE, Draw.IID}))
    head, _, rest = text.partition("-")
    if head == "best":
        numbers = rest.split("-")
        count, *extended = _numbers(text, numbers, min(2, len(numbers)))
        return Shape((count,) * (k or BEST_DEPTH), frozenset({Draw.FREE}), count, extended[0] if extended else None)
    draws = {"iid": Draw.IID, "wor": Draw.WITHOUT_REPLACEMENT}
    widths = _numbers(text, (rest if head in draws else text).split("-"), None)[:k]
    return Shape(widths, frozenset({draws.get(head, Draw.FREE)}))


def _numbers(text: str, parts: list[str], count: int | None) -> tuple[int, ...]:
    if (count is not None and len(parts) != count) or not all(
        p.isdecimal() and 1 <= int(p) <= MAX_NODES for p in parts
    ):
        raise ConfigurationError(
            f"tree shape '{text}' is not known: write {EXAMPLES}, with numbers from 1 to {MAX_NODES}"
        )
    return tuple(int(part) for part in parts)
