"""The public names of `draftree`: exactly the names in its list."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import draftree

ROOT = Path(str(draftree.__file__)).parent
MODULES = sorted(
    info.name for info in pkgutil.walk_packages(draftree.__path__, "draftree.") if not info.name.endswith("__main__")
)


def test_the_list_is_the_public_face() -> None:
    assert len(set(draftree.__all__)) == len(draftree.__all__)
    assert dir(draftree) == sorted(draftree.__all__)
    assert {"LLM", "SamplingParams", "Completion"} <= set(draftree.__all__)


@pytest.mark.parametrize("name", draftree.__all__)
def test_every_listed_name_exists_and_is_documented(name: str) -> None:
    found = getattr(draftree, name)
    assert found.__doc__
    if isinstance(found, type):
        assert found.__name__ == name


def test_unlisted_names_do_not_exist() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        draftree.Engine  # noqa: B018


def test_listed_names_are_typed_for_those_who_read_the_source() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    typed = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("draftree")
        for alias in node.names
    }
    assert typed == set(draftree.__all__)


def test_a_star_import_brings_the_list() -> None:
    names: dict[str, object] = {}
    exec("from draftree import *", names)
    assert set(names) - {"__builtins__"} == set(draftree.__all__)


@pytest.mark.parametrize("name", MODULES)
def test_every_module_can_be_imported_and_has_a_docstring(name: str) -> None:
    if name.startswith("draftree.serve.ray."):
        pytest.importorskip("ray", reason="ray is not installed")
    module = importlib.import_module(name)
    docstring = (module.__doc__ or "").strip()
    assert docstring.split("\n")[0].endswith((".", ":"))


def test_importing_the_package_imports_no_torch() -> None:
    code = (
        "import draftree, draftree.drafters, sys; draftree.drafters.DRAFTERS.names(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_errors_of_the_library_are_one_family() -> None:
    errors = importlib.import_module("draftree.core.errors")
    for name in errors.__all__:
        found = getattr(errors, name)
        if isinstance(found, type):
            assert issubclass(found, errors.DraftreeError)
