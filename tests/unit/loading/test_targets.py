"""For every kind of target the drafter's passes use the best kernels, unless the user chose others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftree.loading.load import load_model
from draftree.loading.targets import kernels_of_drafter, load_target
from draftree.models.table import TableLM, hashed
from families import drafter_folder, fresh


@pytest.mark.parametrize(
    ("model", "kernels", "of_drafter"),
    [
        ("a LanguageModel", "auto", "auto"),
        ("of transformers", "auto", "auto"),
        ("of transformers", "torch", "torch"),
        ("of transformers", "graphs", "graphs"),
        ("folder", "auto", "auto"),
        ("folder", "torch", "torch"),
        ("loaded", "auto", "auto"),
        ("loaded with torch", "auto", "torch"),
    ],
)
def test_a_drafter_follows_a_choice_and_nothing_else(model: str, kernels: str, of_drafter: str, tmp_path: Path) -> None:
    folder = drafter_folder("llama", tmp_path)
    given: dict[str, Any] = {
        "a LanguageModel": lambda: TableLM(hashed(8, seed=1)),
        "of transformers": lambda: fresh("llama"),
        "folder": lambda: folder,
        "loaded": lambda: load_model(folder),
        "loaded with torch": lambda: load_model(folder, kernels="torch"),
    }
    target = load_target(given[model](), "auto", "auto", kernels=kernels, quantization=None)
    assert kernels_of_drafter(target) == of_drafter
