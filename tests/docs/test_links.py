"""Links and files that the documents name exist."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import DOCS, ROOT, documents

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE_SPAN = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"^[\w.-]+(?:/[\w.-]+)*(?:\.(?:py|c|h|sh|md|svg|toml|jsonl)|/)$")
TO_BE_MADE = ("drafters/followers.py", "build/")
"""What a reader makes: the file of the guide that adds a method, and folders of builds."""
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


def test_links_have_targets() -> None:
    assert [f"{path.relative_to(ROOT)}: {link}" for path in documents() for link in broken(path)] == []


@pytest.mark.parametrize("link", ["missing.md", "#nowhere", "sub/../other.md#nowhere"])
def test_broken_links_are_detected(link: str, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "other.md").write_text("# Here\n")
    page = tmp_path / "page.md"
    page.write_text(f"# Title, `with` code\n\n[fine](#title-with-code) [fine](other.md#here) [broken]({link})\n")
    assert list(broken(page)) == [link]


def missing_files(path: Path) -> Iterator[str]:
    """Files and folders named in backticks that exist neither in the repository nor in the package.

    A name without a folder may be anywhere in the repository.
    """
    for name in (word for span in CODE_SPAN.findall(prose(path)) for word in span.split()):
        if not FILE.match(name) or any(known in name for known in TO_BE_MADE):
            continue
        is_found = any((place / name).exists() for place in (ROOT, PACKAGE, path.parent))
        if not is_found and ("/" in name or name not in file_names()):
            yield name


@functools.cache
def file_names() -> frozenset[str]:
    """Names of all files of the project, without their folders."""
    folders = [ROOT / name for name in ("benchmarks", "docs", "src", "tests")]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return frozenset(path.name for path in [*files, *ROOT.glob("*.*")])


def test_files_that_are_named_exist() -> None:
    assert [f"{path.relative_to(ROOT)}: {name}" for path in documents() for name in missing_files(path)] == []


def test_files_that_do_not_exist_are_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("`core/tree.py` `tree.py` `core/` `models/tree.py` `treee.py` `corre/` `python no/such.py` `a/b`\n")
    assert list(missing_files(page)) == ["models/tree.py", "treee.py", "corre/", "no/such.py"]


def test_every_result_is_cited_by_a_page() -> None:
    cited = "".join(path.read_text(encoding="utf-8") for path in documents())
    results = sorted((ROOT / "benchmarks" / "results").glob("*.jsonl"))
    assert len(results) > 10
    assert [path.name for path in results if path.name not in cited] == []


def test_every_page_is_reached_from_another() -> None:
    pages = set(DOCS.rglob("*.md")) - set((DOCS / "lab").rglob("*.md"))
    linked = {
        (path.parent / target.partition("#")[0]).resolve()
        for path in documents()
        for target in LINK.findall(prose(path))
        if not re.match(r"[a-z]+:|#", target)
    }
    unreached = sorted(str(page.relative_to(DOCS)) for page in pages if page.resolve() not in linked)
    assert unreached == []
