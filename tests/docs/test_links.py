"""Links, files and decisions that the documents name exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import DOCS, ROOT, documents

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE_SPAN = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"^[\w.-]+(?:/[\w.-]+)*\.(?:py|md|toml|jsonl)$")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
PACKAGE = ROOT / "src" / "draftree"


def prose(path: Path) -> str:
    """The text without fenced blocks."""
    return FENCED.sub("", path.read_text(encoding="utf-8"))


def anchor(heading: str) -> str:
    """As GitHub makes it."""
    words = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


def broken(path: Path) -> Iterator[str]:
    text = CODE_SPAN.sub("", prose(path))
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, wanted = target.partition("#")
        found = path if not file else (path.parent / file).resolve()
        if not found.exists() or (wanted and wanted not in map(anchor, HEADING.findall(prose(found)))):
            yield target


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_have_targets(path: Path) -> None:
    assert list(broken(path)) == []


@pytest.mark.parametrize("link", ["missing.md", "#nowhere", "sub/../other.md#nowhere"])
def test_broken_links_are_detected(link: str, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "other.md").write_text("# Here\n")
    page = tmp_path / "page.md"
    page.write_text(f"# Title, `with` code\n\n[fine](#title-with-code) [fine](other.md#here) [broken]({link})\n")
    assert list(broken(page)) == [link]


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_named_files_exist(path: Path) -> None:
    named = [span for span in CODE_SPAN.findall(prose(path)) if "/" in span and FILE.match(span)]
    places = (ROOT, PACKAGE, path.parent)
    missing = [name for name in named if not any((place / name).exists() for place in places)]
    # the guide that adds a method names the file that is to be written
    assert [name for name in missing if not name.endswith("drafters/followers.py")] == []


def test_every_decision_is_listed() -> None:
    listed = (DOCS / "decisions" / "README.md").read_text(encoding="utf-8")
    records = sorted(path.name for path in (DOCS / "decisions").glob("[0-9]*.md"))
    assert [name for name in records if f"({name})" not in listed] == []
    assert [int(name[:4]) for name in records] == list(range(1, len(records) + 1))


def test_every_page_is_reached_from_another() -> None:
    pages = set(DOCS.rglob("*.md")) - set((DOCS / "lab").rglob("*.md"))
    linked = {
        (path.parent / target.partition("#")[0]).resolve()
        for path in documents()
        for target in LINK.findall(prose(path))
        if not re.match(r"[a-z]+:|#", target)
    }
    unreached = sorted(str(page.relative_to(DOCS)) for page in pages if page.resolve() not in linked)
    # the entrance is the README, which is written last
    assert [page for page in unreached if page != "README.md"] == []
