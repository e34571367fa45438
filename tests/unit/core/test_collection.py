"""Pauses of the garbage collector."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest

import draftree
from draftree.core.host import without_collection


def test_the_collector_is_off_inside_and_on_again_after_an_error() -> None:
    assert gc.isenabled()
    with pytest.raises(KeyError), without_collection():
        assert not gc.isenabled()
        raise KeyError("x")
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with without_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_package_imports_its_modules_without_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def imported(_: str) -> Any:
        found.append(gc.isenabled())
        return SimpleNamespace(LLM=1)

    monkeypatch.setattr(draftree, "import_module", imported)
    monkeypatch.delitem(vars(draftree), "LLM", raising=False)
    assert draftree.LLM == 1
    assert found == [False]
    assert gc.isenabled()
