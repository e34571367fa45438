"""Where a file of the repository is in the site, and links between the pages."""

from __future__ import annotations

import os.path
import re
from pathlib import Path, PurePosixPath

__all__ = ["NOTEBOOK", "PROJECT", "is_page", "links", "place_of", "rewritten", "target_of"]

PROJECT = {
    "README.md": "project/readme.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "benchmarks/README.md": "project/benchmarks.md",
}
"""Pages outside `docs/`, and their places in the site."""
NOTEBOOK = ".ipynb"
RAW = (".jsonl", ".csv", ".svg", ".png", ".html", ".txt")
"""Endings of files that are copied as they are; other linked files become pages that show their text."""
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=[)\s])")
FENCE = re.compile(r"^(`{3,}|~{3,})")
SPAN = re.compile(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
SCHEME = re.compile(r"[a-z][a-z+.-]*:", re.IGNORECASE)


def is_page(path: str) -> bool:
    """True for a Markdown file or a notebook that is a page of the site."""
    return path in PROJECT or (path.startswith("docs/") and path.endswith((".md", NOTEBOOK)))


def place_of(path: str, root: Path) -> str:
    """Place in the site of a file or folder of the repository.

    Args:
        path: relative to the root of the repository, with slashes.
        root: the root of the repository.
    """
    if path in PROJECT:
        return PROJECT[path]
    inside = PurePosixPath(path)
    if (root / path).is_dir():
        return place_of(f"{path}/README.md", root) if is_documented(path, root) else f"source/{path}/index.md"
    if inside.parts[0] == "docs":
        inside = inside.relative_to("docs")
        if inside.suffix == NOTEBOOK:
            return str(inside.with_suffix(".md"))
        return str(inside.with_name("index.md") if inside.name == "README.md" else inside)
    return f"files/{path}" if inside.suffix in RAW else f"source/{path}.md"


def is_documented(folder: str, root: Path) -> bool:
    """True if the folder has an index page in the site."""
    return is_page(f"{folder}/README.md") and (root / folder / "README.md").is_file()


def target_of(link: str, page: str) -> str | None:
    """File or folder of the repository that a link of a page names; None for other addresses and places of the page."""
    file = link.partition("#")[0]
    if not file or SCHEME.match(link):
        return None
    return os.path.normpath(f"{os.path.dirname(page)}/{file}").replace(os.sep, "/").removeprefix("./").lstrip("/")


def links(text: str) -> list[str]:
    """All links of a page, outside of code."""
    return [found for part, is_code in parts(text) if not is_code for found in LINK.findall(part)]


def rewritten(text: str, page: str, root: Path) -> str:
    """The page with links to the places of the site.

    Args:
        text: of the page.
        page: the page's path in the repository.
        root: the root of the repository.
    """
    here = os.path.dirname(place_of(page, root))

    def changed(found: re.Match[str]) -> str:
        target = target_of(found[1], page)
        if target is None:
            return found[1]
        _, mark, anchor = found[1].partition("#")
        return os.path.relpath(place_of(target, root), here or ".").replace(os.sep, "/") + mark + anchor

    return "".join(unescaped(part) if is_code else LINK.sub(changed, part) for part, is_code in parts(text))


def unescaped(code: str) -> str:
    """A code span of a table without the backslashes before bars, which a forge drops and the site's Markdown shows."""
    return code.replace("\\|", "|") if SPAN.fullmatch(code) and "\n" not in code else code


def parts(text: str) -> list[tuple[str, bool]]:
    """The text in consecutive parts, each with True if it is code: fenced blocks and code spans."""
    found: list[tuple[str, bool]] = []
    prose: list[str] = []
    fence = ""
    for line in text.splitlines(keepends=True):
        mark = FENCE.match(line)
        if fence or mark:
            found += spans("".join(prose))
            prose = []
            found.append((line, True) if fence or not mark else (opened(line), True))
            if not fence and mark:
                fence = mark[1]
            elif fence and line.strip() == fence:
                fence = ""
        else:
            prose.append(line)
    return found + spans("".join(prose))


def opened(line: str) -> str:
    """The first line of a fenced block with its language alone: words for tests are not Markdown of the site."""
    fence = re.match(r"(?:`{3,}|~{3,})[^\s`]*", line)
    return f"{fence[0]}\n" if fence else line


def spans(prose: str) -> list[tuple[str, bool]]:
    """Text without fenced blocks, split at its code spans."""
    found: list[tuple[str, bool]] = []
    end = 0
    for span in SPAN.finditer(prose):
        found += [(prose[end : span.start()], False), (span[0], True)]
        end = span.end()
    return [part for part in [*found, (prose[end:], False)] if part[0]]
