"""The sources of the site: pages with links that hold there, linked files, and listings of linked folders."""

from __future__ import annotations

import shutil
from pathlib import Path

from generator.markdown import page
from generator.site.notebooks import converted
from generator.site.places import NOTEBOOK, PROJECT, is_page, links, place_of, rewritten, target_of

__all__ = ["PLAYGROUND", "sources", "stage"]

PLAYGROUND = "playground-page.md"
PLAYGROUND_TEXT = """# Playground

One recorded answer, round by round: the drafted trees, the target's picks, and the closed forms beside
the measured point. The playground is one HTML file without any requests
([open it alone](playground.html)); load a trace of your own that `draftree generate --record` wrote
([guide](guides/traces.md)).

<iframe src="playground.html" title="Playground: a recorded answer, round by round" class="playground"></iframe>
"""
ASSETS = (".svg", ".png", ".csv", ".html")
LANGUAGES = {".py": "python", ".c": "c", ".h": "c", ".sh": "sh", ".toml": "toml", ".json": "json", ".yaml": "yaml"}
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"


def sources(root: Path) -> list[str]:
    """Paths of all pages in the repository, relative to its root."""
    found = [*(root / "docs").rglob("*.md"), *(root / "docs").rglob(f"*{NOTEBOOK}")]
    inside = sorted(path.relative_to(root).as_posix() for path in found if ".ipynb_checkpoints" not in path.parts)
    return [*(path for path in PROJECT if (root / path).is_file()), *inside]


def stage(root: Path, folder: Path) -> list[str]:
    """Write the sources of the site into an empty folder; return the places of all its pages.

    Raises:
        FileNotFoundError: a page links to a file that does not exist.
    """
    pages = sources(root)
    made = {PLAYGROUND: PLAYGROUND_TEXT}
    linked: set[str] = set()
    for path in pages:
        text = text_of(path, root, folder)
        linked |= {target for link in links(text) if (target := target_of(link, path)) is not None}
        made[place_of(path, root)] = rewritten(text, path, root)
    for target in sorted(linked):
        if not (root / target).exists():
            raise FileNotFoundError(f"a page links to {target}, which does not exist")
        if (root / target).is_dir():
            made.setdefault(place_of(target, root), listing(target, root, folder))
        elif not is_page(target) and place_of(target, root).endswith(".md"):
            made[place_of(target, root)] = shown(target, root)
    assets = [path for path in (root / "docs").rglob("*") if path.suffix in ASSETS]
    for asset in [*(path.relative_to(root).as_posix() for path in assets), *sorted(linked)]:
        if (root / asset).is_file() and not place_of(asset, root).endswith(".md"):
            copy(root / asset, folder / place_of(asset, root))
    for place, text in made.items():
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(text, encoding="utf-8")
    return sorted(made)


def text_of(path: str, root: Path, folder: Path) -> str:
    """The Markdown of a page; for a notebook the pictures are written, and the file itself for a download."""
    text = (root / path).read_text(encoding="utf-8")
    if not path.endswith(NOTEBOOK):
        return text
    place = folder / place_of(path, root)
    text, pictures = converted(text, place.stem)
    copy(root / path, place.with_suffix(NOTEBOOK))
    for name, content in pictures.items():
        (place.parent / name).write_bytes(content)
    return f'{text}\n<a href="{place.stem}{NOTEBOOK}" download>The notebook as a file</a>\n'


def listing(target: str, root: Path, folder: Path) -> str:
    """A page with links to the files of a folder, which are copied beside it."""
    files = sorted(path for path in (root / target).iterdir() if path.is_file())
    depth = len(place_of(target, root).split("/")) - 1
    for file in files:
        copy(file, folder / "files" / target / file.name)
    rows = [f"* [{file.name}]({'../' * depth}files/{target}/{file.name})" for file in files]
    return UNSEARCHED + page(f"# Files in `{target}`", "\n".join(rows))


def shown(target: str, root: Path) -> str:
    """A page with the text of a file."""
    text = (root / target).read_text(encoding="utf-8").rstrip("\n")
    language = LANGUAGES.get(Path(target).suffix, "text")
    return f"{UNSEARCHED}# `{target}`\n\n````{language}\n{text}\n````\n"


def copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
