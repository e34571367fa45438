"""Packages of the project and the imports between them, read from the sources with `ast`.

A package here is a package or a module directly below `src/draftree`. Its layer is the one that the import contract in
`pyproject.toml` names.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

Graph = dict[str, set[str]]
"""Name of a package to the names of those that it imports."""


def layers(pyproject: Path) -> list[list[str]]:
    """Packages of every layer of the import contract, top layer first."""
    contracts = tomllib.loads(pyproject.read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    (contract,) = (contract for contract in contracts if contract["type"] == "layers")
    return [re.findall(r"\w+", line) for line in contract["layers"]]


def modules(package: Path) -> dict[str, list[Path]]:
    """Python files of every package, sorted by path; the package's own `__init__.py` belongs to none."""
    found: dict[str, list[Path]] = {}
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).parts[0].removesuffix(".py")
        if name != "__init__":
            found.setdefault(name, []).append(path)
    return found


def imports(package: Path) -> Graph:
    """Imports between packages, those inside functions included."""
    files = modules(package)
    graph: Graph = {name: set() for name in files}
    for name, paths in files.items():
        for path in paths:
            for imported in imported_names(path, package):
                parts = imported.split(".")
                if parts[0] == package.name and len(parts) > 1 and parts[1] in files:
                    graph[name].add(parts[1])
    return {name: targets - {name} for name, targets in graph.items()}


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
        name: {target for target in targets if not any(target in reached(graph, other) for other in targets)}
        for name, targets in graph.items()
    }


def reached(graph: Graph, start: str) -> set[str]:
    """Packages that a package imports directly or through others."""
    found: set[str] = set()
    waiting = list(graph.get(start, ()))
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting.extend(graph.get(name, ()))
    return found
