"""Code in the guides runs unchanged."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from documents import ROOT, Block, blocks, documents, guide, matches
from generator import methods

import draftree.drafters
from draftree.assembly import choose_methods
from draftree.cli.main import run
from draftree.core.errors import ConfigurationError
from draftree.weights.catalogue import CATALOGUE
from real_weights import folder_of

ADDED = "followers"


def python_blocks(path: Path) -> list[Block]:
    return [block for block in blocks(path) if block.language == "python"]


def fetch_models(found: list[Block]) -> None:
    """All models of the catalogue that the blocks name; the test is skipped where they cannot be fetched."""
    for name in CATALOGUE:
        if any(f'"{name}"' in block.text or f":{name}" in block.text for block in found):
            folder_of(name)


def execute(block: Block, names: dict[str, Any]) -> None:
    """Run a block; tracebacks show the guide's own lines, and what it prints is what the guide shows."""
    code = compile("\n" * block.line + block.text, str(block.path), "exec")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    if block.expected is not None:
        assert matches(printed.getvalue(), block.expected), f"{block.place} printed:\n{printed.getvalue()}"


@pytest.mark.weights
def test_the_library_guide_runs_from_top_to_bottom() -> None:
    names: dict[str, Any] = {"__name__": "guide"}
    found = python_blocks(guide("library"))
    assert len(found) >= 10
    fetch_models(found)
    for block in found:
        execute(block, names)


@pytest.mark.weights
def test_the_transformers_guide_runs_from_top_to_bottom(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "guide"}
    found = python_blocks(guide("transformers"))
    assert len(found) >= 2
    fetch_models(found)
    for block in found:
        execute(block, names)


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The drafter of the guide, as one more file of the drafters' folder."""
    file = tmp_path / f"{ADDED}.py"
    file.write_text(python_blocks(guide("adding-a-method"))[0].text, encoding="utf-8")
    monkeypatch.setattr(draftree.drafters, "__path__", [*draftree.drafters.__path__, str(tmp_path)])
    yield ADDED
    sys.modules.pop(f"draftree.drafters.{ADDED}", None)


def test_the_drafter_of_the_guide_works(added: str) -> None:
    _, use = python_blocks(guide("adding-a-method"))
    execute(use, {"__name__": "guide"})


def test_the_drafter_of_the_guide_is_everywhere(added: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["methods"]) == 0
    assert f"  {added} " in capsys.readouterr().out
    assert f"drafter-{added}.md" in methods.make()
    assert choose_methods(f"{added}+ngram", "coupled", None).traits.branches
    with pytest.raises(ConfigurationError, match="supplies free draws, but verifier 'token' accepts"):
        choose_methods(added, "token", None)
    with pytest.raises(ConfigurationError, match="width=0"):
        choose_methods(f"{added},width=0", "coupled", None)


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.stem)
def test_python_in_all_documents_is_python(path: Path) -> None:
    for block in python_blocks(path):
        if block.path.name != "reference.md":  # signatures
            compile(block.text, block.place, "exec")


@pytest.mark.weights
def test_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = python_blocks(ROOT / "README.md")
    owner, name = "HuggingFaceTB", "SmolLM2-135M-Instruct"
    assert f'"{owner}/{name}"' in block.text
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    place = tmp_path / f"models--{owner}--{name}"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("c0ffee")
    (place / "snapshots").mkdir()
    (place / "snapshots" / "c0ffee").symlink_to(folder_of(name.lower()))
    execute(block, {"__name__": "readme"})
