"""Contract tests of every file in the planners' folder; a new planner is tested automatically."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.core.errors import ConfigurationError
from draftree.core.tree import chain
from draftree.core.types import Budget, RoundRecord, SequenceRecord
from draftree.planners import PLANNERS
from draftree.planners.base import Planner

SPECS = {
    "adaptive": ["adaptive", "adaptive,nodes=2", "adaptive,memory=5"],
    "additive": ["additive", "additive,start=3"],
    "fixed": ["fixed", "fixed:0", "fixed:7"],
    "heuristic": ["heuristic", "heuristic,start=3"],
    "threshold": ["threshold", "threshold:0.8", "threshold:0.1,k=2"],
}
"""Specs of each planner besides its bare name: add those of a new one."""
NAMES = PLANNERS.names()
COSTS = {1: 0.010, 2: 0.0105, 4: 0.011, 8: 0.013, 16: 0.018, 32: 0.028, 64: 0.05}


def specs() -> list[str]:
    return [spec for name in NAMES for spec in SPECS.get(name, [name])]


def planner(spec: str, depth: int, nodes: int | None = None) -> Planner[Any]:
    (parsed,) = PLANNERS.parse(spec)
    try:
        cls, config = PLANNERS.configure(parsed)
    except ConfigurationError as error:
        pytest.fail(f"planner '{spec}' cannot be built by its name alone: add specs of it to SPECS here ({error})")
    built = cls(config, default_depth=depth, default_nodes=depth if nodes is None else nodes)
    if cls.wants_costs:
        built.learn_costs(COSTS)
    return built


def record(budgets: list[Budget], accepted: list[int]) -> RoundRecord:
    """Chains that were drafted as planned, accepted so far."""
    rows = []
    for number, (budget, count) in enumerate(zip(budgets, accepted, strict=True)):
        drafted = min(budget.num_nodes, budget.depth)
        kept = min(count, drafted)
        matches = tuple((1, 1 if i < kept else 0) for i in range(min(kept + 1, drafted)))
        tree, path = chain(range(drafted)), tuple(range(kept))
        row = SequenceRecord(f"r{number}", 10, drafted, drafted, kept, kept + 1, kept, matches)
        rows.append(dataclasses.replace(row, drafted=tree, tree=tree, path=path, bonus=1))
    num_rows = sum(1 + row.num_drafted for row in rows)
    return RoundRecord(1e-5, 1e-3, 1e-2, 1e-4, 1e-5, 1.2e-2, num_rows, tuple(rows))


@pytest.mark.parametrize("spec", specs())
@given(
    depth=st.integers(1, 8),
    branching=st.integers(1, 4),
    rounds=st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), max_size=12),
)
def test_budgets_are_sane_whatever_is_accepted(spec: str, depth: int, branching: int, rounds: list[list[int]]) -> None:
    plan = planner(spec, depth, depth * branching)
    states = [plan.open() for _ in range(3)]
    for accepted in rounds:
        budgets = plan.budgets(states)
        assert len(budgets) == 3
        for budget in budgets:
            assert 0 <= budget.depth <= budget.num_nodes or budget.num_nodes == 0
            assert 0 <= budget.min_confidence <= 1
        plan.observe(states, record(budgets, accepted))
        assert isinstance(plan.explain(), str)


@pytest.mark.parametrize("spec", specs())
def test_plans_are_a_function_of_the_records(spec: str) -> None:
    one, other = planner(spec, 5), planner(spec, 5)
    states = [[plan.open() for _ in range(2)] for plan in (one, other)]
    for accepted in ([5, 0], [2, 9], [9, 9], [0, 0], [9, 0], [9, 1]):
        budgets = one.budgets(states[0])
        assert other.budgets(states[1]) == budgets
        one.observe(states[0], record(budgets, accepted))
        other.observe(states[1], record(budgets, accepted))


@pytest.mark.parametrize("spec", specs())
def test_sequences_may_come_and_go(spec: str) -> None:
    plan = planner(spec, 5)
    first = [plan.open()]
    plan.observe(first, record(plan.budgets(first), [3]))
    more = [first[0], plan.open(), plan.open()]
    budgets = plan.budgets(more)
    assert len(budgets) == 3
    plan.observe(more, record(budgets, [0, 1, 2]))
    assert len(plan.budgets(more[1:])) == 2
    assert plan.budgets([]) == []


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_planned_if_nothing_can_be_drafted(name: str) -> None:
    plan = planner(name, 0)
    assert all(budget.num_nodes == 0 or budget.depth == 0 for budget in plan.budgets([plan.open()]))


@pytest.mark.parametrize("name", NAMES)
def test_a_branching_drafter_gets_nodes_for_its_branches(name: str) -> None:
    plan = planner(name, 4, 12)
    state = plan.open()
    for _ in range(20):
        budgets = plan.budgets([state])
        plan.observe([state], record(budgets, [9]))
    (budget,) = plan.budgets([state])
    assert budget.num_nodes >= budget.depth > 0
