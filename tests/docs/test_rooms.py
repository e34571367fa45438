"""The picture and the pages of the rooms follow from the sources."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from documents import DOCS, ROOT
from generator.imports import essential, imports, layers, modules, reached
from generator.layout import BEND, BOX, GAP, arrange
from generator.rooms import PACKAGE, make, picture

from draftree.core.errors import ConfigurationError

SVG = "{http://www.w3.org/2000/svg}"
CONTRACT = """
[[tool.importlinter.contracts]]
type = "layers"
layers = ["top", "left | right", "bottom"]
"""
PAGE = "# {}\n\n<!-- modules: made by docs/build.py -->\n<!-- end of modules -->\n"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package of four rooms, with imports at the head of a file, inside a function, relative, and by name."""
    root = tmp_path / "pack"
    files = {
        "__init__.py": "from pack.top import run\n",
        "top.py": '"""Top of it.\n\nMore."""\nimport pack.left.one\nfrom pack import right, bottom\n',
        "left/__init__.py": '"""Left."""\n',
        "left/one.py": '"""First\nof two."""\ndef f():\n    from ..bottom import data\n',
        "left/deep/__init__.py": '"""Deep ones."""\n',
        "left/deep/two.py": '"""Second | last."""\nimport os\n',
        "right/__init__.py": "from pack.bottom import data\n",
        "bottom/__init__.py": "",
        "bottom/data.py": "from pack.bottom import other\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (tmp_path / "pyproject.toml").write_text(CONTRACT)
    return root


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    """Pages of its rooms, without tables."""
    folder = tmp_path / "rooms"
    folder.mkdir()
    for name in ("left", "right", "bottom", "README"):
        (folder / f"{name}.md").write_text(PAGE.format(name))
    return folder


def test_tables_follow_docstrings(package: Path, pages: Path) -> None:
    made = make(pages, package)
    assert set(made) == {"left.md", "right.md", "bottom.md", "README.md"}
    assert "| `left/one.py` | First of two. |" in made["left.md"]
    assert "| `left/deep/` | Deep ones. |\n| `left/deep/two.py` | Second \\| last. |" in made["left.md"]
    assert "| `top.py` | Top of it. |" in made["README.md"]
    (pages / "left.md").write_text(made["left.md"])
    assert make(pages, package)["left.md"] == made["left.md"]
    (package / "left" / "one.py").write_text('"""Other words."""\n')
    assert "| `left/one.py` | Other words. |" in make(pages, package)["left.md"]


def test_a_room_without_a_page_is_refused(package: Path, pages: Path) -> None:
    (pages / "right.md").write_text("# right\n")
    with pytest.raises(ConfigurationError, match=r"right\.md has no place for its modules"):
        make(pages, package)
    (pages / "right.md").unlink()
    with pytest.raises(ConfigurationError, match=r"right\.md is missing"):
        make(pages, package)


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return imports(PACKAGE)


@pytest.fixture(scope="module")
def drawing() -> ET.Element:
    return ET.fromstring(picture())


def test_the_arrows_imply_all_imports(graph: dict[str, set[str]]) -> None:
    drawn = essential(graph)
    assert {room: reached(drawn, room) for room in graph} == {room: reached(graph, room) for room in graph}


def test_every_room_has_a_layer_and_a_box(drawing: ET.Element) -> None:
    rooms = set(modules(PACKAGE))
    assert rooms == {room for row in layers(ROOT / "pyproject.toml") for room in row}
    labels = {text.text for text in drawing.iter(f"{SVG}text")}
    assert labels == {room if (PACKAGE / room).is_dir() else f"{room}.py" for room in rooms}


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


def test_every_page_has_its_parts() -> None:
    for page in sorted((DOCS / "rooms").glob("*.md")):
        headings = re.findall(r"^## (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert {"Invariants", "Hazards"} <= set(headings), page
