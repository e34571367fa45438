"""Makes the generated pages: docs/methods/ and docs/reference.md. `--check` only says whether they are up to date.

Plain Markdown, read from the package itself. The pages are committed; a test runs the check, so a new method cannot
lack its page.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from generator import methods, reference

from draftree.core.errors import DraftreeError

__all__ = ["main", "outdated", "pages", "write"]

DOCS = Path(__file__).parent


def pages() -> dict[Path, str]:
    """Path to text of every generated page, by the code as it stands."""
    made = {Path("methods") / name: text for name, text in methods.make().items()}
    return {**made, Path("reference.md"): reference.make()}


def outdated(folder: Path, wanted: dict[Path, str]) -> list[Path]:
    """Pages that are missing, differ, or belong to a method that is gone."""
    changed = [path for path, text in wanted.items() if not is_text(folder / path, text)]
    left = [path.relative_to(folder) for path in sorted((folder / "methods").glob("*.md"))]
    return changed + [path for path in left if path not in wanted]


def is_text(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


def write(folder: Path, wanted: dict[Path, str]) -> list[Path]:
    """Bring the folder up to date; returns what was touched."""
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
    """Exit status: 0 done or up to date, 1 out of date or not to be made, 2 wrong usage."""
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
