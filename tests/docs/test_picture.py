"""The picture of the packages follows from the sources."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from itertools import combinations, pairwise

import pytest
from documents import ROOT
from generator.imports import essential, imports, layers, modules, reached
from generator.layout import BEND, BOX, GAP, arrange
from generator.picture import PACKAGE, picture

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return imports(PACKAGE)


@pytest.fixture(scope="module")
def drawing() -> ET.Element:
    return ET.fromstring(picture())


def test_the_arrows_imply_all_imports(graph: dict[str, set[str]]) -> None:
    drawn = essential(graph)
    assert {name: reached(drawn, name) for name in graph} == {name: reached(graph, name) for name in graph}


def test_every_package_has_a_layer_and_a_box(drawing: ET.Element) -> None:
    packages = set(modules(PACKAGE))
    assert packages == {name for row in layers(ROOT / "pyproject.toml") for name in row}
    labels = {text.text for text in drawing.iter(f"{SVG}text")}
    assert labels == {name if (PACKAGE / name).is_dir() else f"{name}.py" for name in packages}


def test_boxes_and_bends_of_a_layer_do_not_overlap(graph: dict[str, set[str]]) -> None:
    edges = [(room, target) for room, targets in essential(graph).items() for target in targets]
    layout = arrange(layers(ROOT / "pyproject.toml"), edges)
    assert any(">" in name for name in layout.x)
    for row in layout.rows:
        for left, right in pairwise(row):
            widths = [BEND if ">" in name else BOX for name in (left, right)]
            assert layout.x[right] - layout.x[left] >= sum(widths) / 2 + GAP - 1, (left, right)  # rounded to pixels


def test_the_picture_stays_inside_of_its_frame(drawing: ET.Element) -> None:
    width, height = int(drawing.attrib["width"]), int(drawing.attrib["height"])
    boxes = [rect.attrib for rect in drawing.iter(f"{SVG}rect") if "x" in rect.attrib]
    corners = [tuple(float(box[key]) for key in ("x", "y", "width", "height")) for box in boxes]
    assert all(x >= 0 and y >= 0 and x + w <= width and y + h <= height for x, y, w, h in corners)
    for (x, y, w, h), (u, v, _, _) in combinations(corners, 2):
        assert abs(x - u) >= w or abs(y - v) >= h
