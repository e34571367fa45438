"""The project's Markdown files and the blocks of code in them. Not a test itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^```(\S*) ?(.*)$")
ANYTHING = "…"


@dataclass(frozen=True)
class Block:
    """A fenced block; `expected` is the text block right below it, which shows what it prints."""

    path: Path
    line: int
    language: str
    info: str
    text: str
    expected: str | None = None

    @property
    def place(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def documents() -> list[Path]:
    """All Markdown files that users and contributors read."""
    top = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md")
    return [ROOT / name for name in top] + sorted(DOCS.rglob("*.md"))


def guide(name: str) -> Path:
    return DOCS / "guides" / f"{name}.md"


def blocks(path: Path) -> list[Block]:
    """All blocks of a file, in order."""
    found = list(fenced(path))
    lines = path.read_text(encoding="utf-8").splitlines()
    joined = []
    for block, after in zip_longest(found, found[1:]):
        end = block.line + block.text.count("\n") + 1
        is_output = after is not None and after.language == "text" and not any(lines[end : after.line - 1])
        joined.append(replace(block, expected=after.text) if after and is_output else block)
    return joined


def fenced(path: Path) -> Iterator[Block]:
    start, language, info, body = None, "", "", []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        fence = FENCE.match(line)
        if start is None and fence:
            start, language, info, body = number, fence[1], fence[2], []
        elif start is not None and line == "```":
            yield Block(path, start, language, info, "".join(f"{text}\n" for text in body))
            start = None
        elif start is not None:
            body.append(line)
    assert start is None, f"{path}:{start}: a block that does not end"


def commands(path: Path) -> list[tuple[Block, str]]:
    """Every command of the shell blocks, without comments; continued lines are one command."""
    shell = [block for block in blocks(path) if block.language in ("sh", "bash", "shell", "console")]
    texts = [(block, re.sub(r"\\\n\s*", "", block.text)) for block in shell]
    lines = [(block, line.removeprefix("$ ").strip()) for block, text in texts for line in text.splitlines()]
    return [(block, line) for block, line in lines if line and not line.startswith("#")]


def matches(printed: str, expected: str) -> bool:
    """Whether it was printed, `…` standing for anything within a line."""
    pattern = ".*".join(re.escape(part) for part in expected.strip().split(ANYTHING))
    return re.fullmatch(pattern, printed.strip()) is not None
