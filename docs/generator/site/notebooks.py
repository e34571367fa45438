"""Notebooks as pages: Markdown cells as they are, code, and the outputs that are stored in the file."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from typing import Any

__all__ = ["converted"]

PICTURES = {"image/svg+xml": "svg", "image/png": "png"}
"""Media types of outputs that become files; of several the first one here is used."""
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def converted(text: str, name: str) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and its pictures by file name.

    Args:
        text: the notebook's file, format 4.
        name: its name without ending; names of pictures begin with it.

    Raises:
        ValueError: the file is no notebook of format 4.
    """
    notebook = json.loads(text)
    if notebook.get("nbformat") != 4:
        raise ValueError(f"notebook '{name}' has format {notebook.get('nbformat')}: only format 4 can be shown")
    language = notebook.get("metadata", {}).get("language_info", {}).get("name", "python")
    blocks: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        source = joined(cell["source"]).strip("\n")
        if cell["cell_type"] == "markdown":
            blocks.append(source)
        elif cell["cell_type"] == "code":
            blocks.append(f"````{language}\n{source}\n````")
            blocks += outputs(cell["outputs"], name, pictures)
    return "\n\n".join(block for block in blocks if block) + "\n", pictures


def outputs(found: list[dict[str, Any]], name: str, pictures: dict[str, bytes]) -> Iterator[str]:
    """Blocks of the outputs of a cell; pictures are added to `pictures`."""
    for output in found:
        data = output.get("data", {})
        kind = next((kind for kind in PICTURES if kind in data), None)
        if kind is not None:
            file = f"{name}-{len(pictures) + 1}.{PICTURES[kind]}"
            content = joined(data[kind])
            pictures[file] = content.encode() if kind == "image/svg+xml" else base64.b64decode(content)
            yield f'<img src="{file}" alt="Output of the cell above">'
            continue
        text = joined(output.get("text") or data.get("text/plain") or output.get("traceback") or "")
        if text.strip():
            yield "````text\n" + COLOURS.sub("", text).strip("\n") + "\n````"


def joined(lines: str | list[str]) -> str:
    return lines if isinstance(lines, str) else "".join(lines)
