"""Halving by measured speed: which candidates are measured, dropped and kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from draftree.core.errors import ConfigurationError, ModelError
from draftree.lab.tune.candidates import Candidate, own_candidates
from draftree.lab.tune.contest import Cell, Contest, Sample


class StepClock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


class Bench:
    """Candidates with made-up seconds per token; plain decoding takes 1 second, each text one second of the clock."""

    def __init__(self, seconds: dict[str, Callable[[int], float]], *, texts: dict[str, str] | None = None) -> None:
        self.seconds, self.texts = seconds, texts or {}
        self.clock = StepClock()
        self.written: list[tuple[int, str]] = []
        self.kept: list[tuple[int, str]] = []

    def write(self, candidate: Candidate, cell: Cell) -> Sample:
        self.written.append((cell.number, candidate.name))
        self.clock.time += 1
        cost = 1.0 if candidate.is_plain else self.seconds[candidate.name](cell.number)
        return Sample(cost, 1.0, self.texts.get(candidate.name, "text"))

    def contest(self, **options: Any) -> Contest:
        given: dict[str, Any] = {"samples": {}, "num_texts": 20, "is_exact": True, "seconds": 10_000.0}
        return Contest(
            self.write,
            lambda number: Cell(number, number % 3, 0.0, 0),
            keep=lambda cell, candidate, sample: self.kept.append((cell.number, candidate.name)),
            clock=self.clock,
            **(given | options),
        )


def constant(value: float) -> Callable[[int], float]:
    return lambda number: value


def none(candidate: Candidate) -> list[Candidate]:
    return []


EIGHT = {f"ngram,k={number}": constant(0.1 * number) for number in range(2, 10)}


def candidates(names: Sequence[str]) -> list[Candidate]:
    return [Candidate(name) for name in names]


def test_the_fastest_is_found_and_the_others_are_dropped_early() -> None:
    bench = Bench(EIGHT)
    contest = bench.contest()
    list(contest.run(candidates(list(reversed(EIGHT))), none))
    best = contest.best()
    assert best is not None
    assert best.candidate.draft == "ngram,k=2"
    assert best.mean == pytest.approx(5)
    assert best.texts == 20
    assert [one.name for one in contest.alive] == ["ngram,k=2", "ngram,k=3"]
    counts = Counter(name for _, name in bench.written)
    assert counts["ngram,k=9"] == counts["ngram,k=6"] == 4, "half of eight after the first rung"
    assert counts["ngram,k=5"] == counts["ngram,k=4"] == 12, "half of four after the second"
    assert contest.out["ngram,k=9"] == "slower after 4 texts"
    assert counts["none"] == 20


def test_every_text_is_written_plainly_and_by_all_that_are_left_in_a_rotating_order() -> None:
    bench = Bench(EIGHT)
    list(bench.contest().run(candidates(list(EIGHT)), none))
    orders: dict[int, list[str]] = {}
    for cell, name in bench.written:
        orders.setdefault(cell, []).append(name)
    assert [len(orders[cell]) for cell in (0, 3, 4, 11, 12, 19)] == [9, 9, 5, 5, 3, 3]
    assert all("none" in names for names in orders.values())
    assert [orders[cell].index("none") for cell in range(4)] == [0, 8, 7, 6]


def test_variants_of_the_two_best_are_measured_against_them() -> None:
    better = {"ngram,k=2@fixed": constant(0.05), "ngram,k=3@fixed": constant(0.4)}
    bench = Bench(EIGHT | better)
    contest = bench.contest()
    list(contest.run(candidates(list(EIGHT)), lambda one: [Candidate(one.draft, "fixed")]))
    best = contest.best()
    assert best is not None
    assert best.candidate == Candidate("ngram,k=2", "fixed")
    assert {one.candidate.name for one in contest.standings()} == {"none", *EIGHT, *better}


def test_plain_decoding_wins_if_no_drafter_is_faster() -> None:
    contest = Bench({"ngram": constant(1.1), "suffix": constant(1.2)}).contest()
    list(contest.run(candidates(["ngram", "suffix"]), none))
    best = contest.best()
    assert best is not None
    assert best.candidate.is_plain


def test_speed_is_the_mean_over_texts_with_its_spread() -> None:
    contest = Bench({"ngram": lambda number: (0.5, 2.0)[number % 2], "suffix": constant(1.0)}).contest()
    list(contest.run(candidates(["ngram", "suffix"]), none))
    found = contest.standing(Candidate("ngram"))
    assert found.mean == pytest.approx(1.0)
    assert (found.low, found.median, found.high) == (0.5, 1.25, 2.0)
    assert found.texts == 20


@pytest.mark.parametrize("is_exact", [True, False])
def test_other_texts_count_and_drop_a_candidate_if_texts_must_be_equal(is_exact: bool) -> None:
    contest = Bench({"ngram": constant(0.1), "suffix": constant(0.5)}, texts={"ngram": "other"}).contest(
        is_exact=is_exact
    )
    list(contest.run(candidates(["ngram", "suffix"]), none))
    assert contest.standing(Candidate("ngram")).differing == (1 if is_exact else 20)
    best = contest.best()
    assert best is not None
    assert best.candidate.draft == ("suffix" if is_exact else "ngram")
    assert ("ngram" in contest.out) == is_exact


def test_a_candidate_that_fails_is_dropped_with_its_reason() -> None:
    def failing(number: int) -> float:
        raise ModelError("out of memory")

    contest = Bench({"ngram": failing, "suffix": constant(0.5)}).contest()
    list(contest.run(candidates(["ngram", "suffix"]), none))
    assert contest.out == {"ngram": "out of memory"}
    best = contest.best()
    assert best is not None
    assert best.candidate.draft == "suffix"


def test_no_text_is_begun_after_the_time() -> None:
    bench = Bench(EIGHT)
    contest = bench.contest(seconds=30.0)
    list(contest.run(candidates(list(EIGHT)), none))
    assert bench.written[-1][0] == 3
    assert len(bench.written) == 36
    assert len(contest.alive) == 4


def test_measurements_of_an_earlier_run_are_not_repeated() -> None:
    first = Bench(EIGHT)
    contest = first.contest()
    running = contest.run(candidates(list(EIGHT)), none)
    for _ in range(6):
        next(running)
    running.close()
    known = {
        (cell, name): Sample(1.0 if name == "none" else EIGHT[name](cell), 1.0, "text") for cell, name in first.written
    }
    second = Bench(EIGHT)
    again = second.contest(samples=known)
    list(again.run(candidates(list(EIGHT)), none))
    assert not set(second.written) & set(first.written)
    assert set(second.kept) == set(second.written)
    whole = Bench(EIGHT)
    list(whole.contest().run(candidates(list(EIGHT)), none))
    assert sorted(first.written + second.written) == sorted(whole.written)


def test_drafters_of_the_user_are_measured_alone_and_merged() -> None:
    assert own_candidates(["ngram,k=3@fixed", "suffix", "ngram+suffix,k=4"]) == [
        Candidate("ngram,k=3", "fixed"),
        Candidate("ngram,k=3+suffix", "fixed"),
        Candidate("suffix"),
        Candidate("ngram+suffix,k=4"),
    ]
    for spec in ("none", "auto"):
        with pytest.raises(ConfigurationError, match="no drafter to measure"):
            own_candidates([spec])
