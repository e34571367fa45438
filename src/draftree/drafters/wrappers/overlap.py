"""Measurement at start: whether drafting during the passes of the target saves time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from draftree.core.clock import Clock
from draftree.core.types import Budget
from draftree.drafters.base import Drafter, DraftTraits, SequenceView
from draftree.drafters.wrappers.ahead import AheadDrafter
from draftree.models.base import Extend, LanguageModel, Pass
from draftree.sampling.controls import build_controls
from draftree.sampling.history import History
from draftree.sampling.params import SamplingParams

PREFIX = 16
"""Tokens of the text after which both are measured."""
REPEATS = 3
EXPECTED_HITS = 1 / 3
"""Share of the rounds whose draft was made ahead, before any was counted: chains had 24% and trees 44% in
docs/lab/2026-11-23-ahead-and-offload.md."""
LEAST_GAIN = 0.08
"""Share of a round's time that drafting ahead must save. A tree that was drafted ahead has fewer nodes, because guesses
of the bonus are among them: rounds wrote 3% (chains) and 8% (trees) fewer tokens there."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Seconds of a pass, of a draft, and of both at once; each is the fastest of several.

    Attributes:
        target: a pass of the target alone.
        draft: a draft alone.
        both: both at once.
    """

    target: float
    draft: float
    both: float

    def gain(self, hits: float) -> float:
        """Return the share of a round's time that drafting ahead saves, negative if it costs time.

        In turn a round is a pass and a draft; ahead it is both at once, and another draft unless it was guessed.

        Args:
            hits: share of the rounds whose draft was made ahead.
        """
        in_turn = self.target + self.draft
        return (hits * self.draft - (self.both - self.target)) / in_turn if in_turn > 0 else 0.0

    def pays(self, hits: float = EXPECTED_HITS) -> bool:
        """Return whether drafting ahead is worth the time that it takes from the target."""
        return self.gain(hits) >= LEAST_GAIN

    def note(self, hits: float = EXPECTED_HITS) -> str:
        """Return a message: whether it pays, with what was measured."""
        times = f"pass {self.target * 1e3:.1f} ms, draft {self.draft * 1e3:.1f} ms, both {self.both * 1e3:.1f} ms"
        saves = f"saves {self.gain(hits):.0%}" if self.gain(hits) >= 0 else f"costs {-self.gain(hits):.0%}"
        return (
            f"drafting ahead is {'on' if self.pays(hits) else 'off'}: with {hits:.0%} of the drafts guessed it {saves} "
            f"of a round ({times})"
        )


def measure_overlap(run_target: Callable[[], None], run_draft: Callable[[], None], clock: Clock) -> Overlap:
    """Measure passes and drafts, alone and at once.

    Args:
        run_target: runs one pass of the target and waits for it.
        run_draft: drafts once; called in another thread for the measurement of both.
        clock: clock of the measurement.
    """
    run_target()
    run_draft()
    with ThreadPoolExecutor(1) as pool:

        def run_both() -> None:
            drafting = pool.submit(run_draft)
            run_target()
            drafting.result()

        def fastest(act: Callable[[], None]) -> float:
            times = []
            for _ in range(REPEATS):
                start = clock()
                act()
                times.append(clock() - start)
            return min(times)

        return Overlap(fastest(run_target), fastest(run_draft), fastest(run_both))


def wrapped_apart(drafter: Drafter[Any], traits: DraftTraits, target: LanguageModel, clock: Clock) -> Drafter[Any]:
    """Return a drafter that goes on without drafts if the process of its model ends; others are returned as they are.

    Args:
        drafter: any drafter.
        traits: as for `ahead_of`.
        target: as for `ahead_of`.
        clock: as for `ahead_of`.
    """
    if traits.ahead:
        return ahead_of(drafter, traits, target, clock)
    return AheadDrafter(drafter, stops=0, branches=False, is_on=False) if traits.alternates else drafter


def ahead_of(drafter: Drafter[Any], traits: DraftTraits, target: LanguageModel, clock: Clock) -> AheadDrafter:
    """Wrap a drafter, which drafts ahead if that pays on this machine.

    Args:
        drafter: a drafter whose model runs on another device or in a process of its own.
        traits: its traits.
        target: the target.
        clock: clock of the measurement.
    """
    controls = build_controls(SamplingParams(temperature=0.0), vocab_size=target.vocab_size, seed=0)
    view = SequenceView(History([0] * PREFIX), controls)
    budget = Budget(traits.nodes, traits.depth)
    drafter.reserve(1, PREFIX + traits.nodes + 1)
    target.reserve(target.num_open + 1, PREFIX + traits.nodes + 1)
    slot, state = target.open_probe(), drafter.open(view)

    def run_target() -> None:
        target.run(Pass([Extend(slot, [0] * (1 + traits.nodes), range(-1, traits.nodes))]))
        target.synchronize()
        target.commit(slot, ())

    def run_draft() -> None:
        drafter.draft([state], [budget])

    try:
        overlap = measure_overlap(run_target, run_draft, clock)
    finally:
        target.close(slot)
        drafter.close(state)
    return AheadDrafter(
        drafter,
        stops=traits.ahead,
        branches=traits.branches,
        is_on=overlap.pays(),
        reason=overlap.note(),
        judge=lambda hits: None if overlap.pays(hits) else overlap.note(hits),
    )
