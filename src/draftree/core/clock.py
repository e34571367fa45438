"""The injectable clock: a callable that returns seconds, used wherever the planner's times are measured."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Seconds since a fixed moment; monotonic."""
SYSTEM_CLOCK: Clock = time.perf_counter
