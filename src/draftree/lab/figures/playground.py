"""Playground: one static page that shows a trace round by round, without a network."""

from __future__ import annotations

from pathlib import Path

from draftree.core.errors import ConfigurationError
from draftree.engine.trace import read_trace

FOLDER = Path(__file__).with_name("page")
SCRIPTS = ("trace.js", "theory.js", "svg.js", "draw.js", "app.js")
"""Scripts of the page in their order."""
MAX_BYTES = 8_000_000
"""Largest trace that is put into a page: browsers become slow with more."""


def page_of(path: Path) -> str:
    trace = read_trace(path)
    if not any(traced_round.steps for traced_round in trace.rounds):
        raise ConfigurationError(f"'{path}' has no rounds: there is nothing to show")
    content = path.read_text(encoding="utf-8")
    if len(content) > MAX_BYTES:
        raise ConfigurationError(
            f"'{path}' has {len(content)} bytes, and a page holds up to {MAX_BYTES}: record fewer texts"
        )
    page = (FOLDER / "page.html").read_text(encoding="utf-8")
    style = (FOLDER / "page.css").read_text(encoding="utf-8")
    script = "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in SCRIPTS)
    # in a script element, "</" ends it and "<!--" changes how it ends: JSON can spell "<" as an escape
    escaped = content.replace("<", "\\u003c")
    for mark, value in (("/* style */", style), ("/* script */", script), ("/* trace */", escaped)):
        page = page.replace(mark, value)
    return page
