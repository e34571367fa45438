"""Rooms of the package and the imports between them, read from the sources with `ast`.

A room is a package or a module directly below `src/draftree`. Its layer is the one that the import contract in
`pyproject.toml` names.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Graph", "essential", "imports", "layers", "modules", "purpose"]

Graph = dict[str, set[str]]
"""Name of a room to the names of the rooms that it imports."""


def layers(pyproject: Path) -> list[list[str]]:
    """Rooms of every layer of the import contract, top layer first."""
    contracts = tomllib.loads(pyproject.read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    (contract,) = (contract for contract in contracts if contract["type"] == "layers")
    return [re.findall(r"\w+", line) for line in contract["layers"]]


def modules(package: Path) -> dict[str, list[Path]]:
    """Python files of every room, sorted by path; the package's own `__init__.py` belongs to no room."""
    found: dict[str, list[Path]] = {}
    for path in sorted(package.rglob("*.py")):
        room = path.relative_to(package).parts[0].removesuffix(".py")
        if room != "__init__":
            found.setdefault(room, []).append(path)
    return found


def purpose(path: Path) -> str:
    """First sentence or line of a module's docstring, in one line; empty without a docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.partition("\n\n")[0].split())


def imports(package: Path) -> Graph:
    """Imports between rooms, those inside functions included."""
    files = modules(package)
    graph: Graph = {room: set() for room in files}
    for room, paths in files.items():
        for path in paths:
            for name in imported_names(path, package):
                parts = name.split(".")
                if parts[0] == package.name and len(parts) > 1 and parts[1] in files:
                    graph[room].add(parts[1])
    return {room: targets - {room} for room, targets in graph.items()}


def imported_names(path: Path, package: Path) -> Iterator[str]:
    """Absolute dotted names that a file imports: modules, and names from modules."""
    here = path.relative_to(package.parent).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else ()
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{source}.{alias.name}" for alias in node.names)


def essential(graph: Graph) -> Graph:
    """The imports that follow from no others: the transitive reduction of a graph without cycles."""
    return {
        room: {target for target in targets if not any(target in reached(graph, other) for other in targets)}
        for room, targets in graph.items()
    }


def reached(graph: Graph, start: str) -> set[str]:
    """Rooms that a room imports directly or through others."""
    found: set[str] = set()
    waiting = list(graph.get(start, ()))
    while waiting:
        room = waiting.pop()
        if room not in found:
            found.add(room)
            waiting.extend(graph.get(room, ()))
    return found
