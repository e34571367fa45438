"""Execute the notebooks and store their outputs: `python docs/execute_notebooks.py`, or `make notebooks`.

Each notebook runs in a fresh kernel and an empty working folder. Outputs on standard error are not stored. Outputs of
cells with the tag `varies` depend on the machine, such as times; `compared` leaves them out.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent / "notebooks"
VARIES = "varies"
CELL_SECONDS = 300


def notebooks() -> list[Path]:
    """Return all notebooks."""
    return sorted(FOLDER.glob("*.ipynb"))


def executed(path: Path) -> Any:
    """Return a notebook with the outputs of a new run.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised an error.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        client = NotebookClient(notebook, timeout=CELL_SECONDS, kernel_name="python3", resources=resources)
        client.execute()
    for cell in code_cells(notebook):
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        cell.metadata.pop("execution", None)  # times of the run
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return notebook


def code_cells(notebook: Any) -> list[Any]:
    """Return the cells with code."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def compared(notebook: Any) -> Iterator[tuple[str, str]]:
    """Yield source and printed text of every cell whose outputs do not depend on the machine."""
    for cell in code_cells(notebook):
        if VARIES not in cell.metadata.get("tags", []):
            texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]
            yield cell.source, "".join(texts)


def main() -> None:
    """Execute all notebooks, or those that are named, and write them with their outputs."""
    chosen = [Path(name) for name in sys.argv[1:]] or notebooks()
    for path in chosen:
        nbformat.write(executed(path), path)
        sys.stdout.write(f"{path.name}\n")


if __name__ == "__main__":
    main()
