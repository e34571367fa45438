"""A tiny model and training data that it wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from train_folders import learnable_model, write_data


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return learnable_model(tmp_path_factory.mktemp("train") / "target")


@pytest.fixture(scope="session")
def data(model: Path) -> Path:
    return write_data(model, model.parent / "data")
