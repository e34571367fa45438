"""Facts about the processor of this machine."""

from __future__ import annotations

import os
import platform
from pathlib import Path

__all__ = ["cpu_info", "cpu_name", "usable_cores"]


def cpu_info(key: str) -> str | None:
    """Return the first value of a key in `/proc/cpuinfo`; None if there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == key), None)


def cpu_name() -> str:
    """Return the name of the processor, or of its architecture."""
    return cpu_info("model name") or platform.processor() or platform.machine()


def usable_cores() -> int | None:
    """Return the number of cores that this process may use; None if it is unknown."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
