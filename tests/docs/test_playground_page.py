"""The playground of the docs is the page that the package makes now from the trace in it."""

from __future__ import annotations

import re
from pathlib import Path

from draftree.figures.playground import page_of

PAGE = Path(__file__).parents[2] / "docs" / "playground.html"


def test_the_playground_of_the_docs_is_made_by_the_package(tmp_path: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/x-ndjson" id="trace">\n?(.*?)</script>', page, re.DOTALL)
    assert found
    trace = tmp_path / "trace.jsonl"
    trace.write_text(found[1].strip().replace("\\u003c", "<"), encoding="utf-8")
    assert page_of(trace).split() == page.split()
