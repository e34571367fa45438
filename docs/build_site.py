"""Build the documentation as a static site: python docs/build_site.py FOLDER.

The pages are those of the repository, with links that hold in the site. FOLDER gets `pages/` (sources) and `html/`
(the site). A broken link fails the build. Needs the extra `docs`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from generator.site.config import SCRIPT, STYLE, config
from generator.site.navigation import navigation, title_of
from generator.site.staging import stage

__all__ = ["build", "main", "prepare"]

ROOT = Path(__file__).resolve().parents[1]


def prepare(folder: Path, root: Path = ROOT) -> list[str]:
    """Write sources and configuration into a folder, emptied of earlier ones; return the pages' places."""
    for name in ("pages", "html", ".cache"):
        shutil.rmtree(folder / name, ignore_errors=True)
    pages = folder / "pages"
    pages.mkdir(parents=True)
    places = stage(root, pages)
    (pages / "site.css").write_text(STYLE, encoding="utf-8")
    shutil.copyfile(SCRIPT, pages / SCRIPT.name)

    def title(place: str) -> str:
        return title_of((pages / place).read_text(encoding="utf-8"))

    (folder / "zensical.toml").write_text(config(navigation(places, title)), encoding="utf-8")
    return places


def build(folder: Path) -> int:
    """Run the site generator on a prepared folder; return its exit status, 1 also where it warned."""
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file", "zensical.toml"]
    return subprocess.run(command, cwd=folder, check=False).returncode


def main(arguments: Sequence[str]) -> int:
    """Return the exit status: 0 done, 1 an error, 2 wrong usage."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python docs/build_site.py FOLDER\n")
        return 2
    folder = Path(arguments[0]).resolve()
    places = prepare(folder)
    status = build(folder)
    if status:
        sys.stderr.write("error: the site was not built; the lines above name the pages\n")
        return 1
    sys.stdout.write(f"{len(places)} pages: python -m http.server --directory {folder / 'html'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
