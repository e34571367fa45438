"""What the docstring of a method's file has to say. Not a test itself."""

from __future__ import annotations

import ast
from pathlib import Path

from draftree.core.registry import Registry
from draftree.drafters import DRAFTERS
from draftree.planners import PLANNERS


def described(file: Path, seam: Registry) -> str:
    """Return the docstring of a method's file, after checks of its parts."""
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    first = docstring.split("\n", 1)[0]
    assert first.endswith("."), "the first line is a sentence"
    assert len(first) <= 117
    assert "Source:" in docstring or seam is PLANNERS, "the docstring names the paper: 'Source: ...' or 'Source: none.'"
    assert "Cost" in docstring or seam is not DRAFTERS, "what it costs and when it loses belongs into the docstring"
    return docstring
