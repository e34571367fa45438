"""Escaping of text from files and users for display on a terminal."""

from __future__ import annotations

import re

__all__ = ["harmless"]

UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters, less tab and line feed
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # direction marks, overrides and isolates; line separators
    "\ud800-\udfff\ufff9-\ufffb\U000e0000-\U000e007f]"  # halves of pairs, annotations, invisible tags
)
"""Characters that control a terminal, reorder the displayed line, or cannot be encoded."""


def harmless(text: str) -> str:
    """Return the text with unsafe characters escaped as Python does: an escape character becomes ``\\x1b``."""
    return UNSAFE.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode("ascii"), text)
