"""Dark colours for drawings of matplotlib: the file follows the reader's colour scheme, with no second file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

GROUND = "#0d1117"
"""Ground of a drawing in the dark scheme."""
TEXT = "#e6edf3"
COLOUR = re.compile(r"(?:fill|stroke): (#[0-9a-f]{6})|(?:fill|stroke)=\"(#[0-9a-f]{6})\"")
UNCHANGED = ("#010101", "#fefefe")
"""Ink of labels on cells of heat maps, whose colours are the same in both schemes."""
WHITE = np.array([0.9505, 1.0, 1.089])
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
LIGHT, TINT = 75.0, 40.0  # lightness of surfaces, and the chroma up to which a light colour is one
GREY = 20.0  # chroma up to which an ink is grey


def save_svg(figure: Any, path: Path) -> None:
    """Write a figure of matplotlib as SVG without a date, with a dark scheme."""
    figure.savefig(path, metadata={"Date": None})
    path.write_text(with_dark_scheme(path.read_text(encoding="utf-8")), encoding="utf-8")


def with_dark_scheme(svg: str) -> str:
    """Return a drawing of matplotlib with a style sheet for the dark scheme."""
    mark = '<style type="text/css">'
    if mark not in svg:
        raise ValueError("the drawing has no style sheet: only drawings of matplotlib can be given a dark scheme")
    if "prefers-color-scheme" in svg:
        return svg
    colours = dict.fromkeys(style or attribute for style, attribute in COLOUR.findall(svg))
    rules = [
        f'[style*="{kind}: {colour}"],[{kind}="{colour}"]{{{kind}:{dark_colour(colour)}!important}}'
        for colour in colours
        if colour not in UNCHANGED
        for kind in ("fill", "stroke")
        if f"{kind}: {colour}" in svg or f'{kind}="{colour}"' in svg
    ]
    # matplotlib does not write black, the default; letters are texts, or groups of outlines
    rules.append(f'text:not([style*="fill:"]),[id^="text_"]>g:not([style*="fill:"]){{fill:{TEXT}}}')
    sheet = "@media (prefers-color-scheme: dark){" + "".join(rules) + "}"
    return svg.replace(mark, mark + sheet, 1)


def dark_colour(colour: str) -> str:
    """Return the colour of the dark scheme: surfaces become dark, ink becomes light, the hue stays."""
    if colour == "#ffffff":
        return GROUND
    lightness, *chroma = _lab(colour)
    size = float(np.hypot(*chroma))
    if lightness >= LIGHT:
        if size >= TINT:
            return colour
        return _hex(np.array([112.0 - lightness, *(0.7 * value for value in chroma)]))
    # greys are inverted; other inks keep their order, or colours that differ in lightness would come close
    ink = 92.0 - 0.55 * lightness if size < GREY else min(88.0, 30.0 + 0.95 * lightness)
    return _hex(np.array([ink, *chroma]))


def _lab(colour: str) -> np.ndarray:
    """Return lightness and both chroma coordinates (CIE 1976)."""
    encoded = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    linear = np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
    ratio = XYZ @ linear / WHITE
    x, y, z = np.where(ratio > 216 / 24389, np.cbrt(ratio), ratio * 24389 / 3132 + 4 / 29)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def _hex(lab: np.ndarray) -> str:
    y = (lab[0] + 16) / 116
    roots = np.array([y + lab[1] / 500, y, y - lab[2] / 200])
    ratio = np.where(roots > 6 / 29, roots**3, (roots - 4 / 29) * 3132 / 24389)
    linear = np.clip(np.linalg.solve(XYZ, ratio * WHITE), 0, 1)
    encoded = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in encoded)
