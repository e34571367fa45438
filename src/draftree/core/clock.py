"""The clock that the planner goes by: one callable, handed to whatever measures seconds for it."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds since a fixed moment; never goes back."""
SYSTEM_CLOCK: Clock = time.perf_counter
