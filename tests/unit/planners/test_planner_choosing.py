"""Choices compared with all other choices, on cases small enough for enumeration."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from draftree.planners.adaptive import choose_nodes

chances = st.floats(0.05, 0.99)


@st.composite
def trees(draw: st.DrawFn, most: int = 4) -> tuple[list[int], list[float]]:
    """Parents, and survivals that fall along every path."""
    parents: list[int] = []
    survivals: list[float] = []
    for node in range(draw(st.integers(0, most))):
        parent = draw(st.integers(-1, node - 1))
        parents.append(parent)
        survivals.append(draw(chances) * (1.0 if parent < 0 else survivals[parent]))
    return parents, survivals


@st.composite
def curves(draw: st.DrawFn) -> list[float]:
    """Seconds that never fall, with steps."""
    steps = draw(st.lists(st.floats(0.0, 0.5), min_size=16, max_size=16))
    return list(itertools.accumulate(steps, initial=1.0))


def closed(parents: list[int], nodes: tuple[int, ...]) -> bool:
    return all(parents[node] < 0 or parents[node] in nodes for node in nodes)


@given(batch=st.lists(trees(), min_size=1, max_size=2), seconds=curves(), sunk=st.floats(0, 2))
def test_no_other_choice_of_nodes_is_faster(
    batch: list[tuple[list[int], list[float]]], seconds: list[float], sunk: float
) -> None:
    size = len(batch)
    chosen = choose_nodes([survivals for _, survivals in batch], seconds[size:], num_sequences=size, sunk=sunk)
    assert all(closed(parents, tuple(nodes)) for (parents, _), nodes in zip(batch, chosen, strict=True))
    every = [
        [nodes for n in range(len(parents) + 1) for nodes in itertools.combinations(range(len(parents)), n)]
        for parents, _ in batch
    ]

    def speed(way: Sequence[Sequence[int]]) -> float:
        tokens = size + sum(batch[i][1][node] for i, nodes in enumerate(way) for node in nodes)
        return tokens / (sunk + seconds[size + sum(map(len, way))])

    ways = itertools.product(*every)
    speeds = [speed(way) for way in ways if all(closed(batch[i][0], nodes) for i, nodes in enumerate(way))]
    assert speed(chosen) >= max(speeds) * (1 - 1e-9)


@given(survivals=trees(8), seconds=curves(), factor=st.floats(1.0, 4.0))
def test_costlier_rows_never_give_more_nodes(
    survivals: tuple[list[int], list[float]], seconds: list[float], factor: float
) -> None:
    """Every row's cost beyond the first is multiplied."""
    dearer = [seconds[0], seconds[1], *(seconds[1] + factor * (s - seconds[1]) for s in seconds[2:])]
    cheap, dear = (choose_nodes([survivals[1]], curve[1:], num_sequences=1) for curve in (seconds, dearer))
    assert len(dear[0]) <= len(cheap[0])


def test_a_step_in_the_costs_is_stepped_over_where_that_pays() -> None:
    # the second row costs much, and brings the others with it for nothing
    assert choose_nodes([[0.6, 0.59, 0.58, 0.57]], [1.0, 1.7, 1.7, 1.7, 1.7], num_sequences=1) == [[0, 1, 2, 3]]
    assert choose_nodes([[0.6]], [1.0, 1.7], num_sequences=1) == [[]]


def test_a_busy_batch_gets_fewer_nodes_each() -> None:
    """Rows are free up to 8 and cost a tenth of a pass each beyond."""
    seconds = [1.0 + 0.1 * max(0, rows - 8) for rows in range(200)]
    draft = [0.7**depth for depth in range(1, 9)]
    counts = [
        sum(map(len, choose_nodes([draft] * batch, seconds[batch:], num_sequences=batch))) / batch
        for batch in (1, 4, 16)
    ]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] >= 6
    assert counts[-1] < 4
