"""The picture of the packages and the imports between them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

from generator.imports import essential, imports, layers
from generator.layout import BOX, Layout, arrange

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "draftree"
HEIGHT, STEP, MARGIN = 26, 58, 20
PORT = 12
"""Distance of arrows that end at one box, in pixels."""
STYLE = """\
    text { font: 13px ui-monospace, monospace; text-anchor: middle; }
    @media (prefers-color-scheme: dark) {
      .paper { fill: #0d1117; }
      .package { fill: #1c2d41; stroke: #6ca4e0; }
      .file { fill: #161b22; stroke: #8b949e; }
      text { fill: #e6edf3; }
      .arrow { stroke: #9aa4af; }
      .tip { fill: #9aa4af; }
    }"""


def picture(package: Path = PACKAGE, pyproject: Path = ROOT / "pyproject.toml") -> str:
    """The packages in their layers as SVG, with an arrow for every import that follows from no others."""
    graph = imports(package)
    edges = [(name, target) for name, targets in essential(graph).items() for target in targets]
    rows = [[name for name in row if name in graph] for row in layers(pyproject)]
    layout = arrange([row for row in rows if row], edges)
    width = max(layout.x[name] for name in graph) + BOX / 2 + 2 * MARGIN
    width = round(max(width, max(layout.x.values()) + 2 * MARGIN))
    height = STEP * (len(layout.rows) - 1) + HEIGHT + 2 * MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        "  <title>Packages of Draftree and the imports between them</title>",
        f"  <style>\n{STYLE}\n  </style>",
        '  <marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">',
        '    <path class="tip" d="M0 0 L8 4 L0 8 z" fill="#57606a"/>',
        "  </marker>",
        f'  <rect class="paper" width="{width}" height="{height}" rx="8" fill="#ffffff"/>',
        *(f"  {line}" for line in arrows(layout)),
        *(f"  {line}" for line in boxes(layout, package)),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def boxes(layout: Layout, package: Path) -> Iterator[str]:
    """A box for every package; modules that are no packages are drawn without colour."""
    for row, names in enumerate(layout.rows):
        top = MARGIN + row * STEP
        for name in (name for name in names if ">" not in name):
            x = layout.x[name] + MARGIN
            is_package = (package / name).is_dir()
            kind, fill, stroke = ("package", "#ddf0ff", "#2f6fab") if is_package else ("file", "#f6f8fa", "#6e7781")
            yield (
                f'<rect class="{kind}" x="{x - BOX / 2:g}" y="{top}" width="{BOX}" height="{HEIGHT}" rx="5" '
                f'fill="{fill}" stroke="{stroke}"/>'
            )
            label = name if is_package else f"{name}.py"
            yield f'<text x="{x:g}" y="{top + HEIGHT - 9}" fill="#1f2328">{escape(label)}</text>'


def arrows(layout: Layout) -> Iterator[str]:
    """One path an edge: vertical past the boxes of a layer, curved between layers."""
    level = {name: row for row, names in enumerate(layout.rows) for name in names}
    for route in layout.routes:
        start, end = route[0], route[-1]
        x = layout.x[start] + MARGIN + port(layout, route, of_end=False)
        y = MARGIN + level[start] * STEP + HEIGHT
        parts = [f"M{x:g} {y}"]
        for name in route[1:]:
            nudge = port(layout, route, of_end=True) if name == end else 0
            to_x, to_y = layout.x[name] + MARGIN + nudge, MARGIN + level[name] * STEP
            middle = (y + to_y) / 2
            parts.append(f"C{x:g} {middle:g} {to_x:g} {middle:g} {to_x:g} {to_y}")
            x, y = to_x, to_y
            if name != end:
                y = to_y + HEIGHT
                parts.append(f"V{y}")
        yield f'<path class="arrow" d="{" ".join(parts)}" fill="none" stroke="#57606a" marker-end="url(#tip)"/>'


def port(layout: Layout, route: list[str], *, of_end: bool) -> float:
    """Offset of an arrow from the middle of its box, so that arrows of one box stand side by side."""
    box, near = (-1, -2) if of_end else (0, 1)
    mates = [other for other in layout.routes if other[box] == route[box]]
    mates.sort(key=lambda other: (layout.x[other[near]], other[0], other[-1]))
    return PORT * (mates.index(route) - (len(mates) - 1) / 2)
