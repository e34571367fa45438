"""The dark scheme of drawings: every colour has one, ink and surfaces stay apart, and other files are refused."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure as Sheet

from draftree.core.svg import GROUND, dark_colour, save_svg, with_dark_scheme
from draftree.lab.figures.drawing import INK, SERIES

DRAWN = Path(__file__).parents[3] / "docs"
SERIES_INK = sorted({*INK.values(), *(colour for colour, _, _ in SERIES)})
# Machado, Oliveira and Fernandes, 2009: complete protanopia, deuteranopia, tritanopia, on linear colours
BLIND = {
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
RGB_TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour: str) -> np.ndarray:
    encoded = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    return np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)


def lab(light: np.ndarray) -> np.ndarray:
    ratio = RGB_TO_XYZ @ np.clip(light, 0, 1) / np.array([0.9505, 1.0, 1.089])
    x, y, z = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def distance(one: str, other: str, blindness: str | None = None) -> float:
    """CIE 1976 difference, as seen with a kind of colour blindness."""
    seen = np.eye(3) if blindness is None else np.array(BLIND[blindness])
    return float(np.linalg.norm(lab(seen @ linear(one)) - lab(seen @ linear(other))))


def contrast(one: str, other: str) -> float:
    """Contrast ratio of WCAG."""
    light, dark = sorted((float(RGB_TO_XYZ[1] @ linear(colour)) for colour in (one, other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_colours_of_meanings_differ_for_colour_blind_readers(dark: bool) -> None:
    shown = [dark_colour(colour) if dark else colour for colour in INK.values()]
    pairs = [(one, other) for place, one in enumerate(shown) for other in shown[:place]]
    for blindness in (None, "protan", "deutan", "tritan"):
        assert min(distance(*pair, blindness) for pair in pairs) > 10
    ground = GROUND if dark else "#ffffff"
    assert min(contrast(colour, ground) for colour in shown) >= 3, "WCAG 1.4.11"
    assert contrast(dark_colour("#57606a"), GROUND) >= 4.5, "notes are text"


def test_lines_differ_in_more_than_colour() -> None:
    assert len({marker for _, marker, _ in SERIES}) == len(SERIES)
    for one, other in pairwise(SERIES):
        assert one[2] != other[2]


def test_surfaces_become_dark_and_ink_light() -> None:
    assert dark_colour("#ffffff") == GROUND
    assert contrast(dark_colour("#000000"), GROUND) > 12
    assert contrast(dark_colour("#dafbe1"), GROUND) < 2
    for colour in SERIES_INK:
        assert contrast(dark_colour(colour), GROUND) >= 4


def drawing(folder: Path, **settings: object) -> str:
    sheet = Sheet(figsize=(3, 2))
    axes = sheet.subplots()
    axes.plot([1, 2], [3, 4], color="#0068b5")
    axes.bar([1], [2], color="#ffd8d3", hatch="//")
    axes.text(1, 3, "cell", color="#fefefe")
    save_svg(sheet, folder / "a.svg")
    return (folder / "a.svg").read_text(encoding="utf-8")


def test_every_colour_of_a_drawing_has_a_rule(tmp_path: Path) -> None:
    svg = drawing(tmp_path)
    sheet, rest = re.search(r"@media \(prefers-color-scheme: dark\)\{(.*?\})\}", svg)[1], svg.split("</style>")[1]  # type: ignore[index]
    for kind, colour in set(re.findall(r"(fill|stroke): (#[0-9a-f]{6})", rest)) - {("fill", "#fefefe")}:
        assert f'[style*="{kind}: {colour}"]' in sheet
    assert f"fill:{GROUND}!important" in sheet
    assert "#fefefe" not in sheet, "labels on cells keep their colour"
    assert 'text:not([style*="fill:"])' in sheet
    assert with_dark_scheme(svg) == svg


def test_a_file_of_another_program_is_refused() -> None:
    with pytest.raises(ValueError, match="only drawings of matplotlib"):
        with_dark_scheme("<svg></svg>")


@pytest.mark.parametrize("path", sorted(DRAWN.rglob("*.svg")), ids=lambda path: path.stem)
def test_every_drawing_of_the_docs_has_a_dark_scheme(path: Path) -> None:
    assert "@media (prefers-color-scheme: dark)" in path.read_text(encoding="utf-8")
