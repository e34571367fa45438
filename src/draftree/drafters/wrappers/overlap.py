"""Measurement at start: whether a draft and a pass of the target take less time at once than one after the other."""

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
LEAST_HIDDEN = 0.3
"""Share of a draft's time that must disappear behind the pass: guesses of the bonus fail now and then."""


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

    @property
    def hidden(self) -> float:
        """Share of the draft's time that both at once save, from 0 to 1."""
        saved = self.target + self.draft - self.both
        possible = min(self.target, self.draft)
        return max(0.0, min(1.0, saved / possible)) if possible > 0 else 0.0

    @property
    def pays(self) -> bool:
        """Whether drafting ahead is worth the time that it takes from the target."""
        return self.hidden >= LEAST_HIDDEN

    def __str__(self) -> str:
        times = f"pass {self.target * 1e3:.1f} ms, draft {self.draft * 1e3:.1f} ms, both {self.both * 1e3:.1f} ms"
        return f"drafting ahead is {'on' if self.pays else 'off'}: {self.hidden:.0%} of a draft is hidden ({times})"


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
    return AheadDrafter(drafter, stops=traits.ahead, branches=traits.branches, is_on=overlap.pays, reason=str(overlap))
