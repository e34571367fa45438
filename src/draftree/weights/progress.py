"""Progress of slow steps: a callback for those with a size in bytes, a logger for the others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

__all__ = ["Progress", "Step", "silent", "steps"]

Step = Literal["download", "check", "convert"]

Progress = Callable[[Step, int, int], None]
"""`progress(step, done_bytes, total_bytes)`; `done_bytes` never decreases within a step."""

steps = logging.getLogger("draftree.steps")
"""Each INFO record announces a step that begins; the command line shows it in a terminal."""


def silent(step: Step, done_bytes: int, total_bytes: int) -> None:
    """Ignore progress."""
