"""The default planner on simulated rounds from a drafter's acceptance and a machine's costs, without a model."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from draftree.build import choose_methods
from draftree.core.errors import ConfigurationError
from draftree.core.node_map import prune
from draftree.core.types import RoundRecord, SequenceRecord
from draftree.planners.adaptive import AdaptivePlanner
from planned_tables import FLAT, STEEP, Table, lone


@pytest.mark.parametrize("level", [0.0001, 0.01, 0.04])
@pytest.mark.parametrize("costs", [FLAT, STEEP], ids=["flat", "steep"])
def test_a_drafter_that_is_never_right_costs_next_to_nothing(costs: dict[int, float], level: float) -> None:
    table = lone(costs, 0.0, level=level)
    table.play(40)
    assert table.play(600).speedup > 0.985
    assert sum(budget.num_nodes > 0 for budget in table.budgets) >= 1


@pytest.mark.parametrize(("level", "unread"), [(0.0001, 0.0), (0.01, 0.0002), (0.05, 0.0015)])
def test_short_texts_pay_little_for_a_drafter_that_is_never_right(level: float, unread: float) -> None:
    """A draft after a text that the drafter has not read costs up to two passes, in texts of 40."""
    first, *others = lone(FLAT, 0.0, level=level, unread=unread).texts(20, 40)
    assert first > 0.87
    assert sum(others) / len(others) > 0.985
    assert min(others) > 0.93


@pytest.mark.parametrize("level", [0.0001, 0.003, 0.01])
def test_the_first_text_pays_little_for_a_drafter_that_is_never_right(level: float) -> None:
    assert lone(FLAT, 0.0, level=level).texts(1, 64)[0] > 0.955


@pytest.mark.parametrize(("level", "unread"), [(0.0001, 0.0), (0.01, 0.0002), (0.02, 0.0005)])
def test_short_texts_have_a_good_drafter_at_once(level: float, unread: float) -> None:
    speeds = lone(FLAT, 0.85, level=level, unread=unread).texts(20, 40)
    assert sum(speeds) / len(speeds) > 0.9 * lone(FLAT, 0.85, level=level).play(60).play(800).speedup


def test_an_expensive_drafter_is_enabled_again_in_later_texts() -> None:
    table = lone(FLAT, 0.0, level=0.02, unread=0.0005)
    table.texts(10, 40)
    table.right = {"d": (0.9,)}
    table.texts(20, 40)
    assert sum(table.texts(10, 40)) / 10 > 1.5


def test_trials_become_rare_if_they_are_expensive() -> None:
    table = lone(FLAT, 0.0, level=0.03)
    table.play(40).play(800)
    tried = [number for number, budget in enumerate(table.budgets) if budget.num_nodes]
    gaps = [later - earlier for earlier, later in pairwise(tried)]
    # a trial loses a third of a pass, and trials may lose a hundredth of the time
    assert len(tried) <= 28
    assert gaps[-1] >= 30


@pytest.mark.parametrize("level", [0.0001, 0.003, 0.02])
@pytest.mark.parametrize("right", [(0.5,), (0.8,), (0.95,), (0.5, 0.25)])
@pytest.mark.parametrize("costs", [FLAT, STEEP], ids=["flat", "steep"])
def test_it_comes_close_to_the_best_fixed_length(
    costs: dict[int, float], right: tuple[float, ...], level: float
) -> None:
    table = lone(costs, *right, level=level)
    found = table.play(60).play(800).speedup

    def fixed(depth: int, width: int) -> float:
        some = sum(right[:width])
        tokens = 1.0 + some * sum(right[0] ** d for d in range(depth))
        return tokens * table.pass_seconds(1) / (table.pass_seconds(1 + depth * width) + depth * level)

    best = max(1.0, *(fixed(depth, width) for depth in range(1, 7) for width in range(1, len(right) + 1)))
    assert found > 0.94 * best


def test_the_time_of_the_planner_is_part_of_the_cost_of_a_trial() -> None:
    """A free draft without a node worth scoring is made less often where planning takes long."""
    drafts = []
    for planning in (0.0, 0.002):
        table = lone(STEEP, 0.0, level=1e-7, runs_model=False)
        table.planning = planning
        table.play(200).play(300)
        drafts.append(sum(budget.num_nodes > 0 for budget in table.budgets))
    assert drafts[0] >= 150
    assert 40 < drafts[1] < 70


def test_a_drafter_comes_back_when_it_becomes_right() -> None:
    table = lone(FLAT, 0.0, level=0.005)
    table.play(150)
    table.right = {"d": (0.9,)}
    table.play(200)
    assert table.play(100).speedup > 2.5


@pytest.mark.parametrize("barren", [0, 1])
def test_a_cheap_drafter_is_used_early_in_a_text_after_texts_in_which_it_was_useless(barren: int) -> None:
    """The planner takes 5% of a pass, so that trials are rare in the long run."""
    table = lone(FLAT, 0.0, level=0.0001, runs_model=False)
    table.planning = 0.005
    table.texts(6, 60)
    table.right, table.barren = {"d": (0.95,)}, barren
    assert table.texts(1, 20)[0] > 1.7
    assert next(place for place, scored in enumerate(table.scored) if scored) <= 3 * barren


def test_a_text_that_joins_a_batch_starts_trials_of_its_own_only() -> None:
    table = lone(FLAT, 0.0, level=0.0001, batch=8, runs_model=False)
    table.planning = 0.005
    table.play(100)
    of_others = of_new = 0
    for _ in range(60):
        table.states = [*table.states[1:], table.planner.open()]
        for _ in range(3):
            budgets = table.planner.budgets(table.states)
            of_new += budgets[-1].num_nodes > 0
            of_others += sum(budget.num_nodes > 0 for budget in budgets[:-1])
            table.round()
    assert of_new > 10
    assert of_others < 2 * of_new


@pytest.mark.parametrize("runs_model", [False, True])
def test_a_batch_pays_little_for_a_drafter_that_is_hardly_ever_right(*, runs_model: bool) -> None:
    """Drafts take 6% of a pass for sixteen sequences; a row costs 1% of it."""
    costs = {rows: 0.1 + 0.001 * max(0, rows - 16) for rows in (1, 16, 32, 64)}
    table = lone(costs, 0.05, level=0.001, batch=16, runs_model=runs_model)
    table.planning = 0.001
    table.play(60)
    drafted = sum(budget.num_nodes > 0 for budget in table.play(300).budgets)
    assert drafted < 75
    assert table.tokens / table.seconds > 0.99 * 16 / 0.1


def test_of_merged_drafters_the_useless_one_is_switched_off() -> None:
    table = Table(FLAT, {"bad": (0.0,), "good": (0.8,)}, {"bad": 0.02, "good": 0.004})
    table.play(100).play(300)
    bad, good = (sum(budget.part_depths[part] > 0 for budget in table.budgets) for part in (0, 1))
    assert bad < 30
    assert good > 290
    reason = table.planner.explain()
    assert "bad: a draft level costs" in reason
    assert reason.index("off") < reason.index("good:")


def test_load_lowers_budgets_by_itself() -> None:
    """Rows are free up to 8 and cost 4% of a pass each beyond."""
    costs = {1: 0.1, 8: 0.1, 64: 0.1 + 56 * 0.004}
    each = []
    for batch in (1, 4, 16):
        table = lone(costs, 0.7, level=0.0001, batch=batch)
        table.play(60).play(100)
        each.append(sum(table.scored) / 100 / batch)
    assert each == sorted(each, reverse=True)
    assert each[0] > 2 * each[2]


def test_in_a_batch_nodes_go_to_the_sequence_that_is_right() -> None:
    table = lone(STEEP | {1: 0.1, 4: 0.15}, 0.8, level=0.0001, batch=2)
    good, bad = table.states
    for _ in range(60):
        budgets = table.planner.budgets([good, bad])
        trees = [table.draft(budget)[1] for budget in budgets]
        kept = table.planner.trim([good, bad], trees, draft_seconds=0.0001)
        cut = [t if k is None else prune(t, k) for t, k in zip(trees, kept, strict=True)]
        paths = [tuple(range(len(cut[0]))), ()]
        rows = [
            SequenceRecord("r", 9, len(c), len(c), len(p), len(p) + 1, len(p), drafted=t, tree=c, path=p, bonus=1)
            for t, c, p in zip(trees, cut, paths, strict=True)
        ]
        num_rows = 2 + sum(map(len, cut))
        seconds = table.pass_seconds(num_rows)
        table.planner.observe([good, bad], RoundRecord(0, 0.0001, seconds, 0, 0, seconds, num_rows, tuple(rows)))
    assert len(cut[0]) > len(cut[1])


def test_the_reason_names_cost_break_even_and_acceptance() -> None:
    table = lone(FLAT, 0.3, level=0.05)
    reason = table.play(300).planner.explain()
    assert reason.startswith("a draft level costs 0.5")
    assert "break-even acceptance 0.5" in reason
    assert reason.endswith("off")
    assert lone(FLAT, 0.3, level=0.05).planner.explain() == "nothing has been drafted yet"
    table = lone(FLAT, 0.0, level=0.05, unread=0.001)
    table.texts(8, 100)
    assert ", an unread token 0.0" in table.planner.explain()
    reason = lone(FLAT, 0.9, level=0.0001, runs_model=False).play(50).planner.explain()
    assert "its tree is judged afterwards" in reason
    assert reason.endswith(": on")


@pytest.mark.parametrize("options", [{"memory": 0.5}, {"nodes": 0}])
def test_bad_options(options: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError):
        AdaptivePlanner.Config(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("draft", "verify", "plan"),
    [
        ("ngram", "coupled", "adaptive"),
        ("ngram+suffix", "match", "adaptive"),
        ("ngram", "token", "fixed"),
        ("ngram", "typical", "fixed"),
        ("lookahead", "coupled", "adaptive"),
        ("lookahead,window=3", "coupled", "fixed"),
    ],
)
def test_it_is_the_default_where_no_draft_can_change_the_text(draft: str, verify: str, plan: str) -> None:
    methods = choose_methods(draft, verify, None)
    assert methods.plan == plan
    assert isinstance(methods.planner, AdaptivePlanner) == (plan == "adaptive")


def test_some_early_misses_do_not_turn_off_a_good_drafter() -> None:
    """A draft costs a quarter of a pass; a process in which the first ones miss must learn that later ones pay."""
    speeds = []
    for seed in range(60):
        table = lone(FLAT, 0.6, level=0.025, unread=0.0005)
        table.dice = random.Random(seed)
        speeds += table.texts(4, 64)
    assert sum(speed > 1.05 for speed in speeds) > 0.95 * len(speeds)


def test_a_pass_that_a_draft_slows_down_is_compared_with_plain_passes() -> None:
    """While a head drafts no plain round is seen, and one must not be taken to be as slow as those with drafts."""
    costs = {1: 3.7, 2: 4.0, 3: 4.2, 4: 4.4, 8: 7.8, 16: 14.0}

    def speed(right: float, after_draft: float) -> float:
        found = []
        for seed in range(8):
            table = lone(costs, right, level=0.3, depth=4, rates=(0.64, 0.64, 0.7, 0.7), after_draft=after_draft)
            table.dice = random.Random(seed)
            found += table.texts(6, 64)
        return sum(found) / len(found)

    assert speed(0.33, 1.35) > 0.96
    assert speed(0.75, 1.35) > 1.35
    assert speed(0.33, 1.0) > 1.08
