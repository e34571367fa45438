"""Python blocks of README and docs run as they are, or name what they need.

A block whose first line is ```` ```python needs … ```` needs a server, several processes or a model that is too large
for a test: `test_marked_blocks.py` runs it with a small model. Blocks of a page run from top to bottom, with the names
of those before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from documents import DOCS, ROOT, Block, blocks, documents, guide
from test_guides import execute, fetch_models, python_blocks
from test_marked_blocks import PAGES as MARKED

from draftree.cli.main import run
from draftree.weights.catalogue import CATALOGUE
from train_folders import learnable_model, write_data

NEEDS = "needs "
ELSEWHERE = {
    "README.md": "test_guides.py",
    "docs/guides/adding-a-method.md": "test_guides.py",
    "docs/guides/encoder-decoder.md": "test_encoder_decoder_guide.py",
    "docs/guides/library.md": "test_guides.py",
    "docs/guides/serving-tools.md": "test_serving_guides.py",
    "docs/guides/transformers.md": "test_guides.py",
}
"""Pages that a test of their own runs."""
NOT_CODE = ("docs/reference.md", "docs/methods/")
"""Signatures, and examples whose specs are checked when the page is generated."""
LARGE = ("tinyllama-1.1b-chat",)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def pages() -> dict[str, list[Block]]:
    """Pages with Python blocks."""
    found = {name_of(path): python_blocks(path) for path in documents() if not name_of(path).startswith(NOT_CODE)}
    return {name: each for name, each in found.items() if each}


def runnable(found: list[Block]) -> list[Block]:
    return [block for block in found if not block.info.startswith(NEEDS)]


PAGES = pages()
HERE = sorted(name for name, found in PAGES.items() if name not in ELSEWHERE and runnable(found))
WITH_WEIGHTS = [name for name in HERE if any(model in block.text for block in PAGES[name] for model in CATALOGUE)]


def record_trace() -> None:
    """The file that the guide records with the command before its block."""
    assert run(["generate", "stories15m", "Once upon a time", "--max-tokens", "8", "--record", "trace.jsonl"]) == 0


def write_training_data() -> None:
    """The folder that the guide writes with the command before its block."""
    write_data(learnable_model(Path("model").absolute()), Path("data").absolute(), count=24, temperatures=("0",))


PREPARED = {"docs/guides/traces.md": record_trace, "docs/guides/training.md": write_training_data}


def weights_of(name: str) -> bool:
    return name in WITH_WEIGHTS or PREPARED.get(name) is record_trace


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.weights] if weights_of(name) else []) for name in HERE]
)
def test_the_page_runs_from_top_to_bottom(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = runnable(PAGES[name])
    fetch_models(found)
    monkeypatch.chdir(tmp_path)
    if name in PREPARED:
        PREPARED[name]()
    names: dict[str, Any] = {"__name__": "example"}
    for block in found:
        execute(block, names)


@pytest.mark.parametrize("name", sorted(ELSEWHERE))
def test_pages_with_a_test_of_their_own_have_one(name: str) -> None:
    text = (Path(__file__).parent / ELSEWHERE[name]).read_text(encoding="utf-8")
    assert PAGES[name]
    assert f'guide("{Path(name).stem}")' in text or f'ROOT / "{name}"' in text


def test_blocks_that_run_need_no_large_model() -> None:
    large = [
        block.place for found in PAGES.values() for block in runnable(found) if any(m in block.text for m in LARGE)
    ]
    assert large == [], "mark the block: ```python needs a model of 1.1 billion parameters"


def test_most_blocks_run() -> None:
    every = [block for found in PAGES.values() for block in found]
    marked = [block for block in every if block.info.startswith(NEEDS)]
    assert [block.place for block in every if block.info and block not in marked] == [], "unknown words after 'python'"
    assert len(marked) * 5 < len(every), f"{len(every) - len(marked)} of {len(every)} blocks run"
    assert {block.path for block in marked} == {guide(page) for page in MARKED}, "test_marked_blocks.py runs them"


def test_a_marked_block_is_not_run(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python needs a moon\nraise SystemExit\n```\n\n```python\nx = 1\n```\n", encoding="utf-8")
    assert [block.text for block in runnable(blocks(page))] == ["x = 1\n"]
    assert (DOCS / "tutorial.md").is_file()
