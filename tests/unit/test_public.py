"""The public names of `draftree`: exactly the names in its list."""

from __future__ import annotations

import ast
import importlib.util
import pkgutil
import struct
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
    names: dict[str, object] = {}
    exec("from draftree import *", names)
    assert set(names) - {"__builtins__"} == set(draftree.__all__)
    for name in draftree.__all__:
        found = names[name]
        assert found.__doc__, name
        assert not isinstance(found, type) or found.__name__ == name
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
    assert typed - {"without_collection"} == set(draftree.__all__)


def test_every_module_can_be_imported_and_has_a_docstring() -> None:
    has_ray = importlib.util.find_spec("ray") is not None
    for name in MODULES:
        if has_ray or not name.startswith("draftree.serve.ray."):
            docstring = (importlib.import_module(name).__doc__ or "").strip()
            assert docstring.split("\n")[0].endswith((".", ":")), name


HEAVY = {"torch", "transformers", "tokenizers", "gguf", "numpy.random", "huggingface_hub"}


def test_names_texts_and_files_are_handled_without_heavy_libraries(tmp_path: Path) -> None:
    (tmp_path / "empty.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    texts = [name for name in MODULES if name.startswith("draftree.text.")]
    assert len(texts) >= 5
    code = f"""
import importlib, pathlib, sys
import draftree, draftree.drafters, draftree.loading.resolve, draftree.cli.models
from draftree.weights.gguf_file import read_gguf
for name in {texts!r}:
    importlib.import_module(name)
draftree.drafters.DRAFTERS.names()
read_gguf(pathlib.Path({str(tmp_path / "empty.gguf")!r}))
sys.exit(str({HEAVY!r} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == "set()\n"


def test_errors_of_the_library_are_one_family() -> None:
    errors = importlib.import_module("draftree.core.errors")
    found = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)]
    assert found
    assert all(issubclass(error, errors.DraftreeError) for error in found)
