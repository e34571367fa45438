"""The notebooks run in a fresh kernel, and what they print is what they store."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import execute_notebooks
import nbformat
import pytest
from documents import DOCS
from execute_notebooks import VARIES, code_cells, compared, executed, notebooks
from nbclient.exceptions import CellExecutionError

import forked
from real_weights import folder_of

ALL = notebooks()
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
MOST_BYTES = 60_000


@pytest.fixture(scope="module", autouse=True)
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fresh kernels start from the fork server, with one thread."""
    code = (
        "import os, torch; torch.set_num_threads(1); os.environ.pop('JPY_PARENT_PID')\n"  # a fork has another parent
        "from ipykernel.kernelapp import launch_new_instance; launch_new_instance()"
    )
    folder = tmp_path_factory.mktemp("jupyter") / "kernels" / "python3"
    folder.mkdir(parents=True)
    spec = {"argv": [*forked.python(), "-c", code, "-f", "{connection_file}"], "display_name": "Python 3"}
    (folder / "kernel.json").write_text(json.dumps(spec | {"language": "python"}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(folder.parents[1]))
        yield


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


@pytest.mark.weights
@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_a_notebook_prints_what_it_stores(path: Path) -> None:
    folder_of("stories15m")
    found, stored = list(compared(executed(path))), list(compared(read(path)))
    assert found == stored
    assert sum(bool(text) for _, text in stored) >= 3


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_stored_outputs_are_of_one_run_from_the_first_cell_to_the_last(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    assert [cell.execution_count for cell in code_cells(notebook)] == list(range(1, len(code_cells(notebook)) + 1))
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert all(output.get("name") != "stderr" for output in outputs)
    content = path.read_text("utf-8")
    assert not re.search(r"/(home|root|tmp|work|Users)/", content)
    assert len(content) < MOST_BYTES


def test_the_figure_is_stored() -> None:
    outputs = [
        output for cell in code_cells(read(DOCS / "notebooks" / "reproduce-a-figure.ipynb")) for output in cell.outputs
    ]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_links_have_targets_and_the_index_names_the_notebook(path: Path) -> None:
    for cell in read(path).cells:
        for target in LINK.findall(cell.source) if cell.cell_type == "markdown" else ():
            assert target.startswith("https://") or (path.parent / target).exists(), target
    assert f"]({path.name})" in (path.parent / "README.md").read_text("utf-8")


def write_cells(path: Path, *sources: tuple[str, list[str]]) -> Path:
    """A notebook of cells with these sources and tags."""
    cells = [
        {"cell_type": "code", "id": f"c{number}", "source": source, "outputs": [], "execution_count": None}
        | {"metadata": {"tags": tags}}
        for number, (source, tags) in enumerate(sources)
    ]
    path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    return path


def test_a_changed_output_is_detected_and_a_measured_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import time\nprint(time.time_ns())"
    path = write_cells(tmp_path / "times.ipynb", (source, []), (source, [VARIES]))
    monkeypatch.setattr("sys.argv", ["execute_notebooks", str(path)])
    execute_notebooks.main()
    first, second = list(compared(read(path))), list(compared(executed(path)))
    assert len(first) == 1
    assert first != second
    assert first[0][0] == second[0][0]


def test_an_error_in_a_cell_is_raised(tmp_path: Path) -> None:
    with pytest.raises(CellExecutionError, match="no such name"):
        executed(write_cells(tmp_path / "wrong.ipynb", ("raise ValueError('no such name')", [])))
