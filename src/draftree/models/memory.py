"""How much memory a model takes, and what is free here. How many slots fit: `engine/memory.py`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

LOGIT_BYTES = 4
"""Of one logit: they are float32 but for float64 models."""
LOGIT_COPIES = 2
"""A model's logits, and the noise or the distribution that is made of them."""
NO_LIMIT = 1 << 60
"""A control group without a limit reports a number larger than this, or no number."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that a model takes.

    Attributes:
        weights: all that lies ready before the first pass, once.
        token: keys and values of one token in one slot.
        logits: of one row.
        row: what lies between the layers, for one row of the widest pass so far.
        graphs: what captured graphs keep at most, however many are captured later; once.
    """

    weights: int
    token: int
    logits: int
    row: int
    graphs: int = 0


NOTHING = Footprint(weights=0, token=0, logits=0, row=0)
"""No model."""


def total(footprints: Iterable[Footprint]) -> Footprint:
    """Several models as one."""
    every = list(footprints)
    sizes = ("weights", "token", "logits", "row", "graphs")
    return Footprint(**{size: sum(getattr(one, size) for one in every) for size in sizes})


def activation_bytes(config: Any, dtype: torch.dtype) -> int:
    """About what a row takes between the operators of a layer, by the sizes that a model's settings name."""
    hidden = int(config.hidden_size)
    named = getattr(config, "intermediate_size", None) or getattr(config, "ffn_dim", None) or 4 * hidden
    inner = max(map(int, named)) if isinstance(named, (list, tuple)) else int(named)  # one for each layer
    return (6 * hidden + 3 * inner) * dtype.itemsize


def free_memory(device: torch.device) -> int | None:
    """Bytes that this process can still take on a device; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    available = _available()
    limits = [left for left in (_left_of_group(*names) for names in GROUPS) if left is not None]
    return min([*limits, *([] if available is None else [available])], default=None)


GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Limit and use of a container's memory, as its two versions name them."""


def _available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _left_of_group(limit: str, used: str) -> int | None:
    try:
        bytes_limit, bytes_used = int(Path(limit).read_text("utf-8")), int(Path(used).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return None if bytes_limit >= NO_LIMIT else max(0, bytes_limit - bytes_used)
