"""The guide of encoder-decoder models runs from top to bottom."""

from __future__ import annotations

from typing import Any

from documents import guide
from test_guides import execute, python_blocks


def test_the_guide_runs_from_top_to_bottom() -> None:
    names: dict[str, Any] = {"__name__": "guide"}
    found = python_blocks(guide("encoder-decoder"))
    assert len(found) == 3
    for block in found:
        execute(block, names)
