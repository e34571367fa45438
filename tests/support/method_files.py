"""Checks of the file of every drafter, rule and planner. Not a test itself."""

from __future__ import annotations

import ast
import dataclasses
import importlib
from pathlib import Path
from typing import Any


def described(cls: Any) -> str:
    """The docstring of a method's file, which begins with one short sentence, about a class that is well-formed."""
    module = importlib.import_module(cls.__module__)
    docstring = ast.get_docstring(ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))) or ""
    first = docstring.split("\n", 1)[0]
    assert first.endswith(".")
    assert len(first) <= 117
    assert dataclasses.is_dataclass(cls.Config)
    assert cls.Config.__dataclass_params__.frozen
    assert getattr(cls, "__final__", False)
    return docstring
