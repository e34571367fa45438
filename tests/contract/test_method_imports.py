"""Method files import no other method file: each can be added, changed and removed alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from draftree.core.registry import Method, Registry
from draftree.drafters import DRAFTERS
from draftree.planners import PLANNERS
from draftree.verifiers import VERIFIERS

SEAMS: list[Registry] = [DRAFTERS, VERIFIERS, PLANNERS]
METHODS = [method for seam in SEAMS for method in seam.methods()]


def imported(path: Path) -> set[str]:
    """Modules that a file names in imports, wherever they stand in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def file_of(method: Method) -> Path:
    package, _, name = method.module.rpartition(".")
    (seam,) = (seam for seam in SEAMS if seam.package == package)
    return next(Path(folder) / f"{name}.py" for folder in __import__(seam.package, fromlist=["x"]).__path__)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.module.removeprefix("draftree."))
def test_a_method_file_imports_no_other(method: Method) -> None:
    others = {other.module for other in METHODS} - {method.module}
    assert imported(file_of(method)) & others == set()


def test_an_import_of_another_method_is_found(tmp_path: Path) -> None:
    file = tmp_path / "method.py"
    file.write_text("def f():\n    from draftree.drafters import ngram\n", encoding="utf-8")
    assert "draftree.drafters.ngram" in imported(file)
