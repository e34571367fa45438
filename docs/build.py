"""Generate docs/methods/, papers.md, reference.md, guides/fields.md and the picture of the packages.

`--check` reports outdated files and writes nothing. The files are made from the package itself and committed; a test
runs the check.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from generator import fields, methods, papers, picture, reference

from draftree.core.errors import DraftreeError

__all__ = ["main", "outdated", "pages", "write"]

DOCS = Path(__file__).parent


def pages() -> dict[Path, str]:
    """Path to text of every generated file, from the current sources."""
    return {
        **{Path("methods") / name: text for name, text in methods.make().items()},
        Path("papers.md"): papers.make(),
        Path("reference.md"): reference.make(),
        Path("guides/fields.md"): fields.make(),
        Path("architecture.svg"): picture.picture(),
    }


def outdated(folder: Path, wanted: dict[Path, str]) -> list[Path]:
    """Files that are missing, differ, or belong to a method that no longer exists."""
    changed = [path for path, text in wanted.items() if not is_text(folder / path, text)]
    left = [path.relative_to(folder) for path in sorted((folder / "methods").glob("*.md"))]
    return changed + [path for path in left if path not in wanted]


def is_text(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


def write(folder: Path, wanted: dict[Path, str]) -> list[Path]:
    """Bring the folder up to date; return the files that were written or removed."""
    touched = outdated(folder, wanted)
    for path in touched:
        target = folder / path
        if path in wanted:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(wanted[path], encoding="utf-8")
        else:
            target.unlink()
    return touched


def main(arguments: Sequence[str], folder: Path = DOCS) -> int:
    """Return the exit status: 0 done or up to date, 1 out of date or an error, 2 wrong usage."""
    if list(arguments) not in ([], ["--check"]):
        sys.stderr.write("usage: python docs/build.py [--check]\n")
        return 2
    try:
        wanted = pages()
    except DraftreeError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    if not arguments:
        for path in write(folder, wanted):
            sys.stdout.write(f"{folder / path}\n")
        return 0
    stale = outdated(folder, wanted)
    for path in stale:
        sys.stderr.write(f"{folder / path} is out of date: run 'make docs'\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
