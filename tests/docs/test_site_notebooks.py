"""Notebooks of the documentation as pages of the site."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import build_site
import pytest
from generator.site.notebooks import converted
from generator.site.places import place_of

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
SVG = '<svg xmlns="http://www.w3.org/2000/svg"/>'


def cell(kind: str, source: list[str], *outputs: dict[str, Any]) -> dict[str, Any]:
    return {"cell_type": kind, "metadata": {}, "source": source, **({"outputs": outputs} if kind == "code" else {})}


def notebook(*cells: dict[str, Any], version: int = 4) -> str:
    return json.dumps({"nbformat": version, "metadata": {"language_info": {"name": "python"}}, "cells": cells})


def test_cells_and_outputs_become_markdown() -> None:
    text, pictures = converted(
        notebook(
            cell("markdown", ["# First steps\n", "\n", "Prose."]),
            cell("code", ["x = 1\n", "print(x)"], {"output_type": "stream", "text": ["1\n"]}),
            cell("code", ["x"], {"output_type": "execute_result", "data": {"text/plain": ["1"]}}),
            cell(
                "code", ["draw()"], {"data": {"image/png": base64.b64encode(PNG).decode(), "text/plain": ["<Figure>"]}}
            ),
            cell("code", ["tree()"], {"data": {"image/svg+xml": [SVG]}}),
            cell("code", ["1 / 0"], {"output_type": "error", "traceback": ["\x1b[31mZeroDivisionError\x1b[0m"]}),
            cell("raw", ["left out"]),
        ),
        "steps",
    )
    assert text.startswith("# First steps\n\nProse.\n\n````python\nx = 1\nprint(x)\n````\n\n````text\n1\n````\n")
    assert pictures == {"steps-1.png": PNG, "steps-2.svg": SVG.encode()}
    assert 'src="steps-1.png"' in text
    assert "<Figure>" not in text
    assert "ZeroDivisionError\n````" in text
    assert "\x1b" not in text
    assert "left out" not in text


def test_other_formats_are_refused() -> None:
    with pytest.raises(ValueError, match="format 3"):
        converted(notebook(version=3), "old")


def test_a_notebook_is_a_page_with_its_file_and_pictures(tmp_path: Path) -> None:
    folder = tmp_path / "docs" / "notebooks"
    folder.mkdir(parents=True)
    drawn = cell("code", ["tree()"], {"data": {"image/svg+xml": SVG}})
    links = cell("markdown", ["# Steps\n", "[home](../README.md)"])
    (folder / "steps.ipynb").write_text(notebook(links, drawn), encoding="utf-8")
    (tmp_path / "docs" / "README.md").write_text("# Home\n\n[steps](notebooks/steps.ipynb)\n", encoding="utf-8")
    assert build_site.prepare(tmp_path / "site", tmp_path) == ["index.md", "notebooks/steps.md", "playground-page.md"]
    pages = tmp_path / "site" / "pages"
    assert "[steps](notebooks/steps.md)" in (pages / "index.md").read_text(encoding="utf-8")
    assert "[home](../index.md)" in (pages / "notebooks" / "steps.md").read_text(encoding="utf-8")
    assert (pages / "notebooks" / "steps.ipynb").is_file()
    assert (pages / "notebooks" / "steps-1.svg").read_text(encoding="utf-8") == SVG
    assert place_of("docs/notebooks/steps.ipynb", tmp_path) == "notebooks/steps.md"
