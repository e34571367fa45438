"""Pieces of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["code", "fence", "listed", "page", "table"]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; a bar inside a cell is escaped, a line break becomes a space."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell_of(cell) for cell in line) + " |" for line in lines)


def cell_of(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def code(text: object) -> str:
    """Inline code; nothing stays nothing."""
    return f"`{text}`" if str(text) else ""


def fence(text: str, language: str = "") -> str:
    """A block of code."""
    return f"```{language}\n{text.strip(chr(10))}\n```"


def page(*blocks: str) -> str:
    """Blocks with a blank line between; empty ones are left out."""
    return "\n\n".join(block.strip("\n") for block in blocks if block.strip()) + "\n"


def listed(names: Iterable[str], *, none: str) -> str:
    """Names as code, one after another, or what is said where there are none."""
    return ", ".join(map(code, names)) or none
