"""Memory budgets of streamed weights: parsing, and which layers stay in memory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from draftree.core.errors import ConfigurationError

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
NUM_BUFFERS = 2
"""Least number of layers in memory besides those that stay there: one that computes and one that is read."""
SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+)", re.ASCII)


def parse_size(text: str | int) -> int:
    """Return the bytes of a size such as "8GB", "1.5GiB" or 600000000.

    Raises:
        ConfigurationError: malformed, or not positive.
    """
    if isinstance(text, int) and not isinstance(text, bool) and text > 0:
        return text
    found = SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
    unit = None if found is None else UNITS.get(found[2].upper())
    size = 0 if found is None or unit is None else int(float(found[1]) * unit)
    if size <= 0:
        raise ConfigurationError(
            f"offload is {text!r}: give the memory for weights, a number with KB, MB, GB, KiB, MiB or GiB, such as 8GB"
        )
    return size


class BudgetError(ConfigurationError):
    """The memory is too small for a model whose weights are streamed."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the layers of a model are.

    Attributes:
        resident: layers that stay in memory, ascending.
        streamed: layers that are read from the file in every pass, ascending.
        num_buffers: layers that fit into memory besides the resident ones.
        memory: bytes of all weights in memory, buffers included.
    """

    resident: tuple[int, ...]
    streamed: tuple[int, ...]
    num_buffers: int
    memory: int


def place(sizes: Sequence[int], *, fixed: int, budget: int) -> Placement:
    """Choose the layers that stay in memory: as many as fit beside two buffers, spread evenly over the model.

    Between two streamed layers there is then about equally much to compute, so reading rarely waits for a buffer.

    Args:
        sizes: size of every layer in bytes.
        fixed: bytes that are always in memory: norms, the output head, scales.
        budget: bytes for all weights in memory.

    Raises:
        BudgetError: the budget is less than `fixed` and two layers.
    """
    count, largest = len(sizes), max(sizes)
    if fixed + sum(sizes) <= budget:
        return Placement(tuple(range(count)), (), 0, fixed + sum(sizes))
    buffers = NUM_BUFFERS * largest
    if fixed + buffers > budget:
        raise BudgetError(
            f"offload is {budget} bytes, which is too little for this model: its head and {NUM_BUFFERS} layers need "
            f"{fixed + buffers} bytes ({readable(fixed + buffers)})"
        )
    num_resident = min((budget - fixed - buffers) // largest, count - 1)
    resident = tuple(index * count // num_resident for index in range(num_resident)) if num_resident else ()
    streamed = tuple(layer for layer in range(count) if layer not in set(resident))
    num_buffers = min(NUM_BUFFERS, len(streamed))
    memory = fixed + num_buffers * largest + sum(sizes[layer] for layer in resident)
    return Placement(resident, streamed, num_buffers, memory)


def readable(size: int) -> str:
    """Return a size in MB or GB, rounded up to three digits."""
    unit = "GB" if size >= UNITS["GB"] else "MB" if size >= UNITS["MB"] else "KB"
    return f"{-(-size * 100 // UNITS[unit]) / 100:g}{unit}"
