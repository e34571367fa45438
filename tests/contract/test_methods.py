"""What every drafter, rule and planner file owes its readers: a description, checked options, no other method."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from draftree.core.errors import ConfigurationError
from draftree.core.registry import Registry, Spec
from draftree.drafters import DRAFTERS
from draftree.planners import PLANNERS
from draftree.verifiers import VERIFIERS
from method_files import described

SEAMS: list[Registry] = [DRAFTERS, VERIFIERS, PLANNERS]
METHODS = [(seam, method) for seam in SEAMS for method in seam.methods()]
every_method = pytest.mark.parametrize(
    ("seam", "method"), METHODS, ids=[method.module.removeprefix("draftree.") for _, method in METHODS]
)


def file_of(seam: Registry, method: Any) -> Path:
    name = method.module.rpartition(".")[2]
    return next(Path(folder) / f"{name}.py" for folder in __import__(seam.package, fromlist=["x"]).__path__)


def imported(path: Path) -> set[str]:
    """Modules that a file names in imports, wherever they stand in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@every_method
def test_a_method_file_imports_no_other(seam: Registry, method: Any) -> None:
    others = {other.module for _, other in METHODS} - {method.module}
    assert imported(file_of(seam, method)) & others == set()


def test_an_import_of_another_method_is_found(tmp_path: Path) -> None:
    file = tmp_path / "method.py"
    file.write_text("def f():\n    from draftree.drafters import ngram\n", encoding="utf-8")
    assert "draftree.drafters.ngram" in imported(file)


@every_method
def test_a_file_describes_its_method(seam: Registry, method: Any) -> None:
    docstring = described(file_of(seam, method), seam)
    if seam is VERIFIERS:
        lossless = VERIFIERS.find(method.name).lossless
        assert ("LOSSY" in docstring, "Lossless" in docstring) == (not lossless, lossless)


@every_method
def test_configurations_are_frozen_and_refuse_unknown_options(seam: Registry, method: Any) -> None:
    cls: Any = seam.find(method.name)
    assert dataclasses.is_dataclass(cls.Config)
    assert cls.Config.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert getattr(cls, "__final__", False), "the class is decorated with typing.final"
    with pytest.raises(ConfigurationError, match="unknown option 'nonsense'"):
        seam.configure(Spec(method.name, None, (("nonsense", "1"),)))
