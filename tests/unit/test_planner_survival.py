from __future__ import annotations

import itertools
import random

import pytest

from draftree.core.errors import ConfigurationError
from draftree.core.types import Budget, RoundRecord, SequenceRecord
from draftree.planners.survival import SurvivalPlanner

FLAT = {1: 0.1, 2: 0.101, 4: 0.103, 8: 0.106, 16: 0.115, 32: 0.14, 64: 0.2}
STEEP = {rows: 0.1 * rows for rows in FLAT}


def planner(costs: dict[int, float], *, depth: int = 6, nodes: int | None = None) -> SurvivalPlanner:
    made = SurvivalPlanner(SurvivalPlanner.Config(), default_depth=depth, default_nodes=nodes)
    made.learn_costs(costs)
    return made


def play(made: SurvivalPlanner, *, rounds: int, right: tuple[float, ...], level_seconds: float) -> list[Budget]:
    """Rounds in which the pick is the drafter's i-th child with probability right[i]; cost as planned."""
    dice, budgets = random.Random(0), []
    for _ in range(rounds):
        budget = made.budgets([None])[0]
        budgets.append(budget)
        width = max(1, budget.num_nodes // max(1, budget.depth))
        matches, accepted = [], 0
        for _ in range(budget.depth):
            rank = next((i + 1 for i in range(len(right)) if dice.random() < right[i] / (1 - sum(right[:i]))), 0)
            matches.append((width, rank if rank <= width else 0))
            if matches[-1][1] == 0:
                break
            accepted += 1
        row = SequenceRecord("r", 9, budget.num_nodes, budget.depth, accepted, accepted + 1, accepted, tuple(matches))
        score = made._target_seconds(1 + budget.num_nodes)
        record = RoundRecord(0, level_seconds * budget.depth, score, 0, 0, score, 1 + budget.num_nodes, (row,))
        made.observe([None], record)
    return budgets


def test_a_good_cheap_drafter_gets_all_the_depth_it_can() -> None:
    made = planner(FLAT)
    assert play(made, rounds=200, right=(0.95,), level_seconds=0.001)[-1] == Budget(6, 6)
    assert made.explain().startswith("chain of 6 nodes")


def test_a_drafter_that_is_never_right_is_switched_off_but_probed_again_at_growing_gaps() -> None:
    made = planner(FLAT)
    budgets = play(made, rounds=400, right=(0.0,), level_seconds=0.03)
    assert made.explain().startswith("off")
    drafted = [number for number, budget in enumerate(budgets) if budget.num_nodes and number > 30]
    gaps = [later - earlier for earlier, later in itertools.pairwise(drafted)]
    assert 1 <= len(drafted) <= 12
    assert gaps == sorted(gaps)


def test_nothing_is_drafted_where_every_row_costs_a_pass() -> None:
    assert play(planner(STEEP), rounds=100, right=(0.8,), level_seconds=0.02)[-1].num_nodes == 0


def test_a_drafter_comes_back_when_it_becomes_right() -> None:
    made = planner(FLAT)
    play(made, rounds=50, right=(0.0,), level_seconds=0.001)
    assert play(made, rounds=300, right=(0.9,), level_seconds=0.001)[-1].depth >= 4


def test_where_levels_are_dear_and_rows_are_cheap_it_goes_wide() -> None:
    made = planner(FLAT, depth=6, nodes=32)
    budget = play(made, rounds=300, right=(0.4, 0.25, 0.15), level_seconds=0.04)[-1]
    assert budget.num_nodes > budget.depth
    assert "tree of" in made.explain()


@pytest.mark.parametrize("config", [{"memory": 0.5}, {"nodes": 0}])
def test_bad_options(config: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError):
        SurvivalPlanner.Config(**config)  # type: ignore[arg-type]


def test_one_row_more_than_a_block_is_avoided() -> None:
    blocks = {rows: 0.1 + 0.03 * (-(-rows // 16) - 1) for rows in (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)}
    made = planner(blocks, depth=6, nodes=32)
    budget = play(made, rounds=200, right=(0.4, 0.2, 0.1, 0.05), level_seconds=0.005)[-1]
    assert 1 + budget.num_nodes in (16, 32)


def test_a_number_of_rows_that_was_never_measured_is_learned_from_rounds() -> None:
    made = planner({1: 0.1, 16: 0.1, 32: 0.2}, depth=6, nodes=32)
    row = SequenceRecord("r", 9, 16, 4, 1, 2, 1, ((4, 1), (4, 0)))
    for _ in range(40):
        made.observe([None], RoundRecord(0, 0.01, 0.2, 0, 0, 0.2, 17, (row,)))
    assert made._target_seconds(17) == pytest.approx(0.2, rel=0.05)
