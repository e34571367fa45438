"""Choices compared with all other choices, on cases small enough for enumeration."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.planners.estimates.constants import AUTO
from draftree.planners.estimates.plans import choose_depth, choose_nodes, least_survival

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
    chosen = choose_nodes([survivals for _, survivals in batch], seconds, sunk=sunk)
    assert all(closed(parents, nodes) for (parents, _), nodes in zip(batch, chosen.nodes, strict=True))
    size = len(batch)
    every = [
        [nodes for n in range(len(parents) + 1) for nodes in itertools.combinations(range(len(parents)), n)]
        for parents, _ in batch
    ]
    speeds = [
        (
            size
            + sum(
                batch[i][1][node]
                for i, nodes in enumerate(way)
                for node in nodes
                if batch[i][1][node] >= AUTO.min_survival
            )
        )
        / (sunk + seconds[size + sum(map(len, way))])
        for way in itertools.product(*every)
        if all(closed(batch[i][0], nodes) for i, nodes in enumerate(way))
    ]
    plain = size / (sunk + seconds[size])
    assert chosen.speed >= plain * (1 - 1e-12)
    assert chosen.speed >= max(speeds) / AUTO.node_margin * (1 - 1e-9)


@given(survivals=trees(8), seconds=curves(), factor=st.floats(1.0, 4.0))
def test_costlier_rows_never_give_more_nodes(
    survivals: tuple[list[int], list[float]], seconds: list[float], factor: float
) -> None:
    """Every row's cost beyond the first is multiplied."""
    dearer = [seconds[0], seconds[1], *(seconds[1] + factor * (s - seconds[1]) for s in seconds[2:])]
    cheap, dear = (choose_nodes([survivals[1]], curve) for curve in (seconds, dearer))
    assert len(dear.nodes[0]) <= len(cheap.nodes[0])


def test_a_step_in_the_costs_is_stepped_over_where_that_pays() -> None:
    # the second row costs much, and brings the others with it for nothing
    assert choose_nodes([[0.6, 0.59, 0.58, 0.57]], [0.0, 1.0, 1.7, 1.7, 1.7, 1.7]).nodes == ((0, 1, 2, 3),)
    assert choose_nodes([[0.6]], [0.0, 1.0, 1.7]).nodes == ((),)


def test_unlikely_nodes_are_scored_where_rows_cost_next_to_nothing() -> None:
    draft = [[0.5, 0.009, 0.004, 0.0008, 0.0002]]
    streamed = [1.0 + 0.0005 * max(0, rows - 1) for rows in range(80)]
    assert choose_nodes(draft, streamed).nodes == ((0, 1, 2, 3),)
    assert choose_nodes(draft, [1.0] * 80).nodes == ((0, 1, 2, 3),)
    in_memory = [1.0 + 0.02 * max(0, rows - 1) for rows in range(80)]
    assert choose_nodes(draft, in_memory).nodes == ((0,),)


@given(seconds=curves(), batch=st.integers(1, 12))
def test_fewer_nodes_are_considered_only_where_rows_are_cheap(seconds: list[float], batch: int) -> None:
    least = least_survival(seconds, batch)
    assert AUTO.least_survival <= least <= AUTO.min_survival
    if all(later > 1.1 * seconds[batch] for later in seconds[batch + 1 :]):
        assert least >= min(AUTO.min_survival, 0.1 / 8)


def test_a_busy_batch_gets_fewer_nodes_each() -> None:
    """Rows are free up to 8 and cost a tenth of a pass each beyond."""
    seconds = [1.0 + 0.1 * max(0, rows - 8) for rows in range(200)]
    draft = [0.7**depth for depth in range(1, 9)]
    counts = [sum(map(len, choose_nodes([draft] * batch, seconds).nodes)) / batch for batch in (1, 4, 16)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] >= 6
    assert counts[-1] < 4


@given(
    gains=st.lists(st.floats(0, 1), min_size=1, max_size=6),
    cost=st.floats(0, 1),
    more=st.floats(0, 1),
    bias=st.floats(1, 1.2),
)
def test_depth_is_never_slower_than_none_and_falls_with_cost(
    gains: list[float], cost: float, more: float, bias: float
) -> None:
    gains = sorted(gains, reverse=True)
    shallow, deep = (
        choose_depth(gains, [each] * len(gains), tokens=1.0, seconds=1.0, bias=bias) for each in (cost + more, cost)
    )
    assert shallow.speed >= 1.0
    assert deep.speed >= 1.0
    assert shallow.levels <= deep.levels


def test_a_drafter_that_is_off_needs_a_clear_case() -> None:
    choice = {"tokens": 1.0, "seconds": 1.0}
    assert choose_depth([0.51], [0.5], **choice).levels == 1
    assert choose_depth([0.51], [0.5], bias=1.02, **choice).levels == 0


def test_of_levels_the_best_number_is_found() -> None:
    speeds = [
        choose_depth([0.8, 0.6, 0.4, 0.2], [cost] * 4, tokens=1.0, seconds=1.0).levels for cost in (0.0, 0.3, 0.9)
    ]
    assert speeds == [4, 2, 0]
    assert choose_depth([], [], tokens=1.0, seconds=1.0).speed == pytest.approx(1.0)
