"""Structures that differ from those in C are refused when the library is loaded."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Sequence

import pytest

from draftree.models.native import library as native
from draftree.models.native import structures
from draftree.models.native.build import NativeUnavailableError, built_library
from draftree.models.native.library import CSearch, Library

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="passes in C need a C compiler")


def changed(kind: type[ctypes.Structure], fields: Sequence[tuple[str, type]]) -> type[ctypes.Structure]:
    return type(kind.__name__, (ctypes.Structure,), {"_fields_": tuple(fields)})


def swapped(kind: type[ctypes.Structure], one: str, other: str) -> type[ctypes.Structure]:
    names = {one: other, other: one}
    return changed(kind, [(names.get(field[0], field[0]), field[1]) for field in kind._fields_])


def loaded_with(monkeypatch: pytest.MonkeyPatch, structure: type[ctypes.Structure]) -> Library:
    kinds = [structure if kind.__name__ == structure.__name__ else kind for kind in structures.STRUCTURES]
    monkeypatch.setattr(native, "STRUCTURES", tuple(kinds))
    return Library(built_library())


@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        (structures.CPass, "hidden_in", "captured_layers"),
        (structures.CPass, "rows", "num_threads"),
        (structures.CLinear, "scale", "sums"),
        (structures.CDecoder, "norm_offset", "epsilon"),
        (structures.CLayer, "qkv", "output"),
    ],
)
def test_fields_in_another_order_are_refused(
    monkeypatch: pytest.MonkeyPatch, kind: type[ctypes.Structure], one: str, other: str
) -> None:
    wrong = swapped(kind, one, other)
    assert ctypes.sizeof(wrong) == ctypes.sizeof(kind)
    with pytest.raises(NativeUnavailableError, match=rf"'{kind.__name__[1:]}\.({one}|{other})' with offset"):
        loaded_with(monkeypatch, wrong)


def test_a_field_of_another_type_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = [(name, ctypes.c_double if name == "scaling" else kind) for name, kind in structures.CLayer._fields_]
    with pytest.raises(NativeUnavailableError, match=r"'Layer.scaling' with offset \d+ .* value 4, expected .* 8:"):
        loaded_with(monkeypatch, changed(structures.CLayer, fields))


def test_a_field_that_is_missing_on_one_side_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    last = structures.CPass._fields_[-1][0]
    with pytest.raises(NativeUnavailableError, match=rf"'Pass.{last}' with offset .*, expected nothing"):
        loaded_with(monkeypatch, changed(structures.CPass, structures.CPass._fields_[:-1]))
    more = [*structures.CPass._fields_, ("new", ctypes.c_void_p)]
    with pytest.raises(NativeUnavailableError, match=r"'Pass' with offset 0 .* expected offset 0"):
        loaded_with(monkeypatch, changed(structures.CPass, more))


def test_a_search_in_another_order_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "CSearch", swapped(CSearch, "rows", "stride"))
    with pytest.raises(NativeUnavailableError, match=r"'Search\.(rows|stride)'"):
        Library(built_library())


def test_another_constant_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "FORMATS", {"float32": 0, "bfloat16": 2, "int8": 1})
    with pytest.raises(NativeUnavailableError, match=r"'constant BFLOAT16' with .* value 1, expected .* value 2"):
        Library(built_library())


def test_constants_of_the_library_are_read() -> None:
    library = Library(built_library())
    assert library.rows_of_chunk in (8, 64)
    assert library.max_count == 64
