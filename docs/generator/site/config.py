"""The configuration of the site generator, zensical: no fonts, scripts or images of other hosts.

Zensical (MIT) is the successor that Material for MkDocs names, whose support ends in May 2027. Both build the same
sources; nothing but this file and `build_site.build` depends on the choice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from generator.site.navigation import Item

__all__ = ["SCRIPT", "STYLE", "config"]

STYLE = """.md-typeset table:not([class]) { font-size: 0.68rem; }
.md-typeset img { border-radius: 0.4rem; }
.md-typeset table:not([class]) td:first-child code { white-space: nowrap; }
.md-grid { max-width: 76rem; }
iframe.playground { width: 100%; height: 80vh; border: 1px solid var(--md-default-fg-color--lightest); }
"""
"""Style sheet of the site. Figures have a ground of their own, in the colours of the page's scheme."""

SCRIPT = Path(__file__).parent / "iframe-worker.js"
"""Makes the search work where the pages are opened as files."""
SETTINGS = """[project]
site_name = "Draftree"
site_description = "Lossless speculative decoding with token trees"
docs_dir = "pages"
site_dir = "html"
use_directory_urls = false
strict = true
extra_css = ["site.css"]
nav = {nav}

[project.theme]
language = "en"
font = false
features = ["content.code.copy", "navigation.footer", "navigation.indexes", "navigation.path", "navigation.prune",
            "navigation.tabs", "navigation.top", "search.highlight", "toc.follow"]

[[project.theme.palette]]
media = "(prefers-color-scheme)"
toggle.icon = "lucide/sun-moon"
toggle.name = "Switch to light mode"

[[project.theme.palette]]
media = "(prefers-color-scheme: light)"
scheme = "default"
toggle.icon = "lucide/sun"
toggle.name = "Switch to dark mode"

[[project.theme.palette]]
media = "(prefers-color-scheme: dark)"
scheme = "slate"
toggle.icon = "lucide/moon"
toggle.name = "Switch to system preference"

[project.plugins.offline]
enabled = true

[[project.extra.polyfills]]
path = "iframe-worker.js"
type = "text/javascript"
async = false
defer = false

[project.validation]
invalid_links = true
invalid_link_anchors = true

[project.markdown_extensions]
tables = {}
md_in_html = {}
pymdownx.highlight.anchor_linenums = false
pymdownx.inlinehilite = {}
pymdownx.superfences = {}
pymdownx.magiclink = {}

[project.markdown_extensions.toc]
permalink = true
slugify = { object = "pymdownx.slugs.slugify", kwds = { case = "lower" } }
"""
"""Anchors are those of a forge; `nav` is filled in. The plugin lets the search read its index from a file; with a
script of that name it does not add one of another host."""


def config(nav: list[Item]) -> str:
    """The text of `zensical.toml`.

    Args:
        nav: entries of the navigation.
    """
    return SETTINGS.replace("{nav}", "[\n" + "".join(f"  {line},\n" for line in entries(nav)) + "]")


def entries(nav: list[Item]) -> Iterator[str]:
    for item in nav:
        for title, below in item.items():
            value = json.dumps(below) if isinstance(below, str) else "[" + ", ".join(entries(below)) + "]"
            yield "{ " + json.dumps(title, ensure_ascii=False) + " = " + value + " }"
