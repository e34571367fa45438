"""The few shapes that passes are rounded up to.

Rows of all jobs lie side by side, rounded up together, so linear layers see little padding. Attention runs over a
rectangle of cells: a range of neighbouring slots, as many nodes for each, and a rounded number of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftree.core.errors import ConfigurationError
from draftree.models.kv.slots import KVSlot

WORD_BITS = 64
"""Tentative nodes whose visibility one integer holds."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """Which shapes there are, and how many graphs are kept.

    Attributes:
        max_nodes: new tokens of a slot, and tentative tokens it holds, in a static pass at most; others run as
            dynamic ones, such as chunks of prompts.
        max_cells: slots times nodes at most.
        shortest: keys that attention reads at least.
        max_graphs: shapes that are captured at once, and shapes beside them that wait for it.
        max_graph_bytes: bytes of logits that captured graphs keep at most.
        passes_per_exchange: passes after which a captured shape may be given up for another one; bounds the share of
            captures where more shapes take turns than are kept.
        eager_uses: passes of a shape that run operator by operator before it is captured.
        captures: whether shapes are captured where the device can.
    """

    max_nodes: int = 64
    max_cells: int = 4096
    shortest: int = 128
    max_graphs: int = 64
    max_graph_bytes: int = 1 << 30
    passes_per_exchange: int = 64
    eager_uses: int = 1
    captures: bool = True

    def __post_init__(self) -> None:
        sizes = ("max_nodes", "max_cells", "shortest", "max_graphs", "max_graph_bytes", "passes_per_exchange")
        for name in (*sizes, "eager_uses"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} of static shapes is {getattr(self, name)}: it must be at least 1")


@dataclass(frozen=True, slots=True)
class Bucket:
    """The shape of a pass.

    Attributes:
        first_slot: the first slot of the range.
        num_slots: slots in the range, those without a job among them.
        nodes: cells of each slot.
        rows: rows of the pass.
        length: keys that each cell looks at.
        words: integers that hold what a cell sees of its slot's tree.
    """

    first_slot: int
    num_slots: int
    nodes: int
    rows: int
    length: int
    words: int

    @property
    def num_cells(self) -> int:
        """Cells of the rectangle."""
        return self.num_slots * self.nodes

    @property
    def tree_size(self) -> int:
        """Tentative nodes that can be told apart."""
        return self.words * WORD_BITS


def rounded(count: int) -> int:
    """The next of 1, 2, 4, 8, 16, 32, 48, 64, 96, 128, …: powers of two, from 32 on with the middles between them."""
    power = 1
    while power < count:
        power *= 2
    middle = power * 3 // 4
    return middle if power > 32 and middle >= count else power


def slot_range(indices: Sequence[int]) -> tuple[int, int]:
    """First slot and size of the smallest aligned range, a power of two long, that holds these slots."""
    low, high, size = min(indices), max(indices), 1
    while low // size != high // size:
        size *= 2
    return low // size * size, size


def bucket_of(
    slots: Sequence[KVSlot], counts: Sequence[int], *, shapes: Shapes, num_slots: int, length: int, min_rows: int
) -> Bucket | None:
    """The shape of a pass; None if it fits none.

    Args:
        slots: of the jobs, new tentative nodes noted in them.
        counts: new nodes of each.
        shapes: limits.
        num_slots: slots in memory.
        length: places in memory for each.
        min_rows: rows of a pass at least.
    """
    tentative = max(slot.num_tentative for slot in slots)
    if max(*counts, tentative) > shapes.max_nodes:
        return None
    first, size = slot_range([slot.index for slot in slots])
    keys = max(slot.length + slot.num_tentative for slot in slots)
    found = Bucket(
        first_slot=first,
        num_slots=min(size, num_slots - first),
        nodes=rounded(max(counts)),
        rows=rounded(max(sum(counts), min_rows)),
        length=min(rounded(max(keys, shapes.shortest)), length),
        words=rounded(-(-tentative // WORD_BITS)),
    )
    return found if found.num_cells <= shapes.max_cells else None
