"""Models in folders, starts with a private folder of records, and the files read during them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftree.loading import load
from families import drafter_folder, fresh
from private_cache import private_cache
from second_starts import SIZES
from target_heads import TARGET


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the models and heads that tests share: each is saved once."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def drafter(models: Path) -> Path:
    """A drafter of the family `llama`."""
    return drafter_folder("llama", models)


@pytest.fixture(scope="session")
def llama(models: Path) -> Path:
    """A Llama with four layers, of sizes that native kernels run."""
    return drafter_folder("llama", models, distance=0.0, **TARGET)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of records of its own; the C pass is not built again."""
    monkeypatch.setenv("DRAFTREE_CACHE", private_cache(tmp_path / "cache"))
    monkeypatch.delenv("DRAFTREE_BLUEPRINTS", raising=False)
    return tmp_path / "cache" / "blueprints"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders that transformers read, one for each time."""
    found: list[Path] = []
    read = load.read_model

    def noting(folder: Path, *rest: Any, **named: Any) -> Any:
        found.append(folder)
        return read(folder, *rest, **named)

    monkeypatch.setattr(load, "read_model", noting)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model that can be started twice."""
    fresh("llama", **SIZES).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"
