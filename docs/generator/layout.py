"""Layered drawing of a graph without cycles: an order within every layer, and coordinates.

An edge that passes layers gets a bend in each of them, so that no edge crosses a box.
Source: Sugiyama, Tagawa, Toda, "Methods for visual understanding of hierarchical system structures", 1981.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise

__all__ = ["BOX", "Layout", "arrange"]

BOX, BEND, GAP = 116, 10, 18
"""Widths of a box and of a bend, and the space between neighbours, in pixels."""
SWEEPS = 24
BEND_WEIGHT = 6
"""Weight of a neighbour that is a bend: keeps long edges straight."""


@dataclass(slots=True)
class Layout:
    """Places of boxes and bends.

    Attributes:
        rows: names per layer from left to right; the name of a bend contains `>`.
        routes: names along every edge, from the importing box to the imported one.
        x: centre of every box and bend, in pixels from the left edge.
    """

    rows: list[list[str]]
    routes: list[list[str]]
    x: dict[str, float] = field(default_factory=dict)

    def neighbours(self, row: int, *, above: bool) -> dict[str, list[str]]:
        """Names in the layer above or below that an item of a layer is connected to."""
        found: dict[str, list[str]] = {name: [] for name in self.rows[row]}
        for upper, lower in (pair for route in self.routes for pair in pairwise(route)):
            here, there = (lower, upper) if above else (upper, lower)
            if here in found:
                found[here].append(there)
        return found


def arrange(layers: Sequence[Sequence[str]], edges: Sequence[tuple[str, str]]) -> Layout:
    """Order and coordinates for boxes in layers; every edge leads from a higher layer to a lower one."""
    layout = routed(layers, sorted(edges))
    order_rows(layout)
    place_rows(layout)
    return layout


def routed(layers: Sequence[Sequence[str]], edges: Sequence[tuple[str, str]]) -> Layout:
    """Boxes in the given order, with a bend in every layer that an edge passes."""
    rows = [list(row) for row in layers]
    level = {name: index for index, row in enumerate(rows) for name in row}
    routes = []
    for upper, lower in edges:
        assert level[upper] < level[lower], f"{upper} imports {lower}, which is not below it"
        bends = {index: f"{upper}>{lower}>{index}" for index in range(level[upper] + 1, level[lower])}
        for index, bend in bends.items():
            rows[index].append(bend)
        routes.append([upper, *bends.values(), lower])
    return Layout(rows, routes)


def order_rows(layout: Layout) -> None:
    """Sort every layer by the mean place of its neighbours, alternately from above and below; keep the best order."""
    best, fewest = [list(row) for row in layout.rows], crossings(layout)
    for sweep in range(SWEEPS):
        above = sweep % 2 == 0
        indices = range(len(layout.rows))
        for row in indices if above else reversed(indices):
            place = {name: index for line in layout.rows for index, name in enumerate(line)}
            near = layout.neighbours(row, above=above)
            layout.rows[row].sort(key=lambda name: mean([place[n] for n in near[name]], place[name]))
        if crossings(layout) < fewest:
            best, fewest = [list(row) for row in layout.rows], crossings(layout)
    layout.rows = best


def crossings(layout: Layout) -> int:
    """Pairs of edges that cross between two layers."""
    place = {name: index for row in layout.rows for index, name in enumerate(row)}
    total = 0
    for row in range(len(layout.rows) - 1):
        below = layout.neighbours(row, above=False)
        lines = [(place[upper], place[lower]) for upper, lowers in below.items() for lower in lowers]
        total += sum((a - c) * (b - d) < 0 for (a, b), (c, d) in combinations(lines, 2))
    return total


def place_rows(layout: Layout) -> None:
    """Move every item towards its neighbours; items of a layer keep their order and their distance."""
    for row in layout.rows:
        layout.x.update(zip(row, spread([0.0] * len(row), row), strict=True))
    for sweep in range(SWEEPS):
        above = sweep % 2 == 0
        indices = range(len(layout.rows))
        for row in indices if above else reversed(indices):
            near = layout.neighbours(row, above=above)
            wanted = [weighted(layout, name, near[name]) for name in layout.rows[row]]
            layout.x.update(zip(layout.rows[row], spread(wanted, layout.rows[row]), strict=True))
    left = min(layout.x[name] - width(name) / 2 for name in layout.x)
    layout.x = {name: round(value - left) for name, value in layout.x.items()}


def weighted(layout: Layout, name: str, near: Sequence[str]) -> float:
    """Mean place of the neighbours; bends count more often for a bend."""
    places = [layout.x[n] for n in near for _ in range(BEND_WEIGHT if ">" in name and ">" in n else 1)]
    return mean(places, layout.x[name])


def spread(wanted: Sequence[float], row: Sequence[str]) -> list[float]:
    """Places near the wanted ones, in order and without overlap: the mean of a rightward and a leftward pass."""
    distance = [(width(a) + width(b)) / 2 + GAP for a, b in pairwise(row)]
    rightwards, leftwards = list(wanted), list(wanted)
    for index, step in enumerate(distance):
        rightwards[index + 1] = max(wanted[index + 1], rightwards[index] + step)
    for index in range(len(distance) - 1, -1, -1):
        leftwards[index] = min(wanted[index], leftwards[index + 1] - distance[index])
    return [(a + b) / 2 for a, b in zip(rightwards, leftwards, strict=True)]


def width(name: str) -> int:
    return BEND if ">" in name else BOX


def mean(values: Sequence[float], default: float) -> float:
    return sum(values) / len(values) if values else default
