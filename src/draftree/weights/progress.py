"""How the slow steps report: one callback, called with the step, what is done and how much there is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

__all__ = ["Progress", "Step", "silent"]

Step = Literal["download", "check", "convert"]

Progress = Callable[[Step, int, int], None]
"""`progress(step, done_bytes, total_bytes)`; `done_bytes` never shrinks within a step."""


def silent(step: Step, done_bytes: int, total_bytes: int) -> None:
    """A callback that ignores progress."""
