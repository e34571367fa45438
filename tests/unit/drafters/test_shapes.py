from __future__ import annotations

import pytest

from draftree.core.errors import ConfigurationError
from draftree.core.tree import Draw
from draftree.drafters.growing.shapes import parse_shape


@pytest.mark.parametrize(
    ("text", "k", "widths", "num_nodes"),
    [
        ("chain", None, (1, 1, 1, 1, 1), 5),
        ("chain", 3, (1, 1, 1), 3),
        ("1-1-3-1-1-1-1-1", None, (1, 1, 3, 1, 1, 1, 1, 1), 20),
        ("2-2-1", 2, (2, 2), 6),
        ("iid-2-2-1", None, (2, 2, 1), 10),
        ("best-32", None, (32,) * 6, 32),
        ("best-2", 1, (2,), 2),
        ("best-64-8", 3, (64,) * 3, 64),
    ],
)
def test_widths_and_nodes(text: str, k: int | None, widths: tuple[int, ...], num_nodes: int) -> None:
    shape = parse_shape(text, k)
    assert (shape.widths, shape.num_nodes, shape.depth) == (widths, num_nodes, len(widths))


def test_a_limit_of_extended_nodes_shortens_passes() -> None:
    shape = parse_shape("best-64-8", 3)
    assert (shape.num_best, shape.num_extended, shape.num_fed) == (64, 8, 16)
    assert parse_shape("best-64", 3).num_fed == 128


def test_draws() -> None:
    assert parse_shape("chain", None).draws == {Draw.FREE, Draw.IID}
    assert parse_shape("2-2", None).draws == {Draw.FREE}
    assert parse_shape("iid-2", None).draws == {Draw.IID}
    assert parse_shape("wor-2", None).draws == {Draw.WITHOUT_REPLACEMENT}


@pytest.mark.parametrize(
    "text", ["", "tree", "2-", "0-1", "best", "best-0", "best-3-4-5", "iid-", "wor-x", "1--2", "1999"]
)
def test_malformed_shapes_are_refused_with_examples(text: str) -> None:
    with pytest.raises(ConfigurationError, match="best-32"):
        parse_shape(text, None)


def test_no_levels_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="from 1 to 1024"):
        parse_shape("chain", 0)
