"""The progress callback of slow steps: called with the step, the bytes done and the total."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

__all__ = ["Progress", "Step", "silent"]

Step = Literal["download", "check", "convert"]

Progress = Callable[[Step, int, int], None]
"""`progress(step, done_bytes, total_bytes)`; `done_bytes` never decreases within a step."""


def silent(step: Step, done_bytes: int, total_bytes: int) -> None:
    """Ignore progress."""
