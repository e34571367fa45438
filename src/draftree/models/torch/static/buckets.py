"""Buckets: the shapes that static passes are rounded up to.

The rows of all jobs form one dimension, which is rounded up, so linear layers have little padding. Attention runs over
a rectangle of cells: a range of neighbouring slots, an equal number of nodes for each, and a rounded number of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftree.core.errors import ConfigurationError
from draftree.models.kv.slots import KVSlot

WORD_BITS = 64
"""Number of tentative nodes per integer of visibility bits."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """Limits of static shapes and captured graphs.

    Attributes:
        max_nodes: maximum number of new and of tentative tokens of a slot in a static pass; other passes, such as
            prompt chunks, are dynamic.
        max_cells: maximum of slots times nodes.
        shortest: minimum number of keys that attention reads.
        max_graphs: maximum number of captured shapes, and of other shapes that are tracked.
        max_graph_bytes: maximum bytes of logits of captured graphs.
        passes_per_exchange: minimum number of passes between evictions of a captured shape; limits the share of time
            spent on captures if more shapes alternate than fit.
        eager_uses: passes of a shape that run operator by operator before it is captured.
        captures: whether shapes are captured if the device supports it.
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
        first_slot: first slot of the range.
        num_slots: number of slots in the range, with or without a job.
        nodes: number of cells per slot.
        rows: number of rows.
        length: number of keys per cell.
        words: number of integers of a cell's visibility bits.
    """

    first_slot: int
    num_slots: int
    nodes: int
    rows: int
    length: int
    words: int

    @property
    def num_cells(self) -> int:
        """Number of cells of the rectangle."""
        return self.num_slots * self.nodes

    @property
    def tree_size(self) -> int:
        """Maximum number of tentative nodes per slot."""
        return self.words * WORD_BITS


def rounded(count: int) -> int:
    """Round up to 1, 2, 4, 8, 16, 32, 48, 64, 96, 128, …: powers of two, with midpoints from 32 on."""
    power = 1
    while power < count:
        power *= 2
    middle = power * 3 // 4
    return middle if power > 32 and middle >= count else power


def slot_range(indices: Sequence[int]) -> tuple[int, int]:
    """Return first slot and size of the smallest aligned range, of a power of two, that contains these slots."""
    low, high, size = min(indices), max(indices), 1
    while low // size != high // size:
        size *= 2
    return low // size * size, size


def bucket_of(
    slots: Sequence[KVSlot], counts: Sequence[int], *, shapes: Shapes, num_slots: int, length: int, min_rows: int
) -> Bucket | None:
    """Return the shape of a pass; None if it exceeds the limits.

    Args:
        slots: slots of the jobs, with the new tentative nodes.
        counts: number of new nodes of each.
        shapes: limits.
        num_slots: number of slots in memory.
        length: tokens per slot in memory.
        min_rows: minimum number of rows.
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
