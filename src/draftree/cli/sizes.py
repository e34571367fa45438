"""Sizes in a few characters."""

from __future__ import annotations

__all__ = ["short_bytes", "short_count"]


def short_count(count: int | None) -> str:
    """Return a number of weights, such as "135 M"; empty for None."""
    if count is None:
        return ""
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.0f} M"


def short_bytes(count: int | None) -> str:
    """Return a number of bytes, such as "1.4 GB"; empty for None."""
    if count is None:
        return ""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
