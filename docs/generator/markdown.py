"""Pieces of Markdown."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

__all__ = ["WIDTH", "code", "fence", "listed", "page", "table", "wrapped"]

WIDTH = 100
"""Columns of prose; tables, code and headings may be wider."""
FENCE = "```"
VERBATIM = ("|", "#", "    ")
ITEM = re.compile(r"\s*(?:[*-]|\d+\.) ")
CODE_SPAN = re.compile(r"`[^`]*`")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; a bar inside a cell is escaped, a line break becomes a space."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell_of(cell) for cell in line) + " |" for line in lines)


def cell_of(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def code(text: object) -> str:
    """Inline code; empty for an empty text."""
    return f"`{text}`" if str(text) else ""


def fence(text: str, language: str = "") -> str:
    """A block of code."""
    return f"```{language}\n{text.strip(chr(10))}\n```"


def page(*blocks: str) -> str:
    """Blocks with a blank line between them, prose wrapped; empty ones are left out."""
    return "\n\n".join(wrapped(block.strip("\n")) for block in blocks if block.strip()) + "\n"


def wrapped(text: str) -> str:
    """Paragraphs and list items that have a line over `WIDTH` are wrapped; code spans stay in one line."""
    lines: list[str] = []
    paragraph: list[str] = []
    in_fence = False
    for line in text.splitlines():
        is_fence = line.lstrip().startswith(FENCE)
        in_fence ^= is_fence
        is_text = not (in_fence or is_fence or not line.strip() or (line.startswith(VERBATIM) and not paragraph))
        if paragraph and (not is_text or ITEM.match(line)):
            lines += filled(paragraph)
            paragraph = []
        if is_text:
            paragraph.append(line)
        else:
            lines.append(line)
    return "\n".join([*lines, *filled(paragraph)])


def filled(paragraph: Sequence[str]) -> list[str]:
    """A paragraph as it is if its lines fit, else wrapped; items of lists hang."""
    if all(len(line) <= WIDTH for line in paragraph):
        return list(paragraph)
    item = ITEM.match(paragraph[0])
    head = item[0] if item else ""
    words = " ".join(line.strip() for line in paragraph)[len(head.strip()) :].lstrip()
    kept = CODE_SPAN.sub(lambda span: span[0].replace(" ", "\0"), words)
    made = textwrap.wrap(
        kept,
        WIDTH,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\0", " ") for line in made]


def listed(names: Iterable[str], *, none: str) -> str:
    """Names as code, separated by commas, or the text `none` if there are no names."""
    return ", ".join(map(code, names)) or none
