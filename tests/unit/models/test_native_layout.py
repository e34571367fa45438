"""Structures that differ from those in C are refused when the library is loaded."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable

import pytest

from draftree.models.native import library as native
from draftree.models.native.build import NativeUnavailableError, built_library
from draftree.models.native.library import CSearch, Library
from draftree.models.native.structures import STRUCTURES, CDecoder, CLayer, CLinear, CPass

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="native kernels need a C compiler")

Fields = list[tuple[str, type]]


def swapped(one: str, other: str) -> Callable[[Fields], Fields]:
    names = {one: other, other: one}
    return lambda fields: [(names.get(name, name), kind) for name, kind in fields]


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (CPass, swapped("hidden_in", "captured_layers"), r"'Pass\.(hidden_in|captured_layers)' with offset"),
        (CPass, swapped("rows", "num_threads"), r"'Pass\.(rows|num_threads)' with offset"),
        (CLinear, swapped("scale", "sums"), r"'Linear\.(scale|sums)' with offset"),
        (CDecoder, swapped("norm_offset", "epsilon"), r"'Decoder\.(norm_offset|epsilon)' with offset"),
        (CLayer, swapped("qkv", "output"), r"'Layer\.(qkv|output)' with offset"),
        (CSearch, swapped("rows", "stride"), r"'Search\.(rows|stride)'"),
        (
            CLayer,
            lambda fields: [(name, ctypes.c_double if name == "scaling" else kind) for name, kind in fields],
            r"'Layer.scaling' with offset \d+ .* value 4, expected .* 8:",
        ),
        (CPass, lambda fields: fields[:-1], r"'Pass\.\w+' with offset .*, expected nothing"),
        (CPass, lambda fields: [*fields, ("new", ctypes.c_void_p)], r"'Pass' with offset 0 .* expected offset 0"),
    ],
)
def test_other_structures_are_refused(
    kind: type[ctypes.Structure], change: Callable[[Fields], Fields], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = type(kind.__name__, (ctypes.Structure,), {"_fields_": tuple(change(list(kind._fields_)))})  # type: ignore[arg-type]
    monkeypatch.setattr(native, "STRUCTURES", tuple(wrong if one is kind else one for one in STRUCTURES))
    if kind is CSearch:
        monkeypatch.setattr(native, "CSearch", wrong)
    with pytest.raises(NativeUnavailableError, match=message):
        Library(built_library())


def test_another_constant_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "FORMATS", {"float32": 0, "bfloat16": 2, "int8": 1})
    with pytest.raises(NativeUnavailableError, match=r"'constant BFLOAT16' with .* value 1, expected .* value 2"):
        Library(built_library())


def test_constants_of_the_library_are_read() -> None:
    library = Library(built_library())
    assert library.rows_of_chunk in (8, 64)
    assert library.max_count == 64
