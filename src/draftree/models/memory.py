"""Memory footprint of a model, and free memory. The number of slots that fit: `engine/memory.py`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch

LOGIT_BYTES = 4  # bytes of one logit: float32, except in float64 models
LOGIT_COPIES = 2  # arrays of this size for one row: logits, and noise or distribution
NO_LIMIT = 1 << 60  # limits above this mean that a control group has none


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of a model in bytes."""

    weights: int  # weights and all else that is allocated before the first pass
    token: int  # keys and values of one token in one slot
    logits: int  # logits of one row
    row: int  # activations between the layers, for one row of the widest pass so far
    graphs: int = 0  # upper bound for all captured graphs
    state: int = 0  # recurrent states of one slot, whatever its length; those kept at chunk borders included
    node: int = 0  # recurrent states of one tentative node


NOTHING = Footprint(weights=0, token=0, logits=0, row=0)  # footprint of no model


def total(footprints: Iterable[Footprint]) -> Footprint:
    return Footprint(*map(sum, zip(*map(astuple, (NOTHING, *footprints)), strict=True)))


def inner_width(config: Any) -> int:
    """Return the largest inner width of the perceptrons in a model's configuration."""
    named = getattr(config, "intermediate_size", None) or getattr(config, "ffn_dim", None) or 4 * config.hidden_size
    return max(map(int, named)) if isinstance(named, (list, tuple)) else int(named)  # one for each layer


def activation_bytes(config: Any, dtype: torch.dtype) -> int:
    """Estimate the activations of one row in a layer from the sizes in a model's configuration, in bytes."""
    return (6 * int(config.hidden_size) + 3 * inner_width(config)) * dtype.itemsize


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that this process can still allocate on a device; None if unknown."""
    if device.type in ("cuda", "xpu"):
        return int(getattr(torch, device.type).mem_get_info(device)[0])
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    known = [_available(), *(_left_of_group(*names) for names in GROUPS)]
    return min((size for size in known if size is not None), default=None)


GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Files with limit and use of a container's memory, for both versions of control groups."""


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
