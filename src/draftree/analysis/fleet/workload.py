"""Requests of a simulated server: arrivals, lengths, and the outcome of every round. No torch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from draftree.analysis.trace import Trace


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """What one round of one sequence did, whichever batch it was in.

    Attributes:
        nodes: drafted tokens that the target scored.
        tokens: tokens that were written.
        draft_seconds: seconds of drafting.
    """

    nodes: int
    tokens: int
    draft_seconds: float = 0.0


PLAIN = (RoundOutcome(0, 1),)
"""Outcomes of plain decoding."""


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """A request.

    Attributes:
        arrival: seconds at which it arrives.
        prompt: tokens of its prompt.
        output: tokens to write.
        outcomes: of its rounds, repeated if the text is longer.
    """

    arrival: float
    prompt: int
    output: int
    outcomes: Sequence[RoundOutcome] = PLAIN


def outcomes_of(trace: Trace) -> dict[str, tuple[RoundOutcome, ...]]:
    """Return the outcomes of each sequence of a recorded run, in order.

    Under a rule that keeps the text, an outcome depends on the text and the draft and not on the batch or the machine,
    so it may be replayed in another one.
    """
    found: dict[str, list[RoundOutcome]] = {}
    for one in trace.rounds:
        each = one.seconds["draft"] / max(1, len(one.steps))
        for step in one.steps:
            nodes = len(step.tree) if step.kept is None else len(step.kept)
            found.setdefault(step.sequence, []).append(RoundOutcome(nodes, step.num_written, each))
    return {name: tuple(rounds) for name, rounds in found.items()}


def mean_outcomes(tokens_per_round: float, nodes: int, draft_seconds: float = 0.0) -> tuple[RoundOutcome, ...]:
    """Return outcomes whose mean number of tokens is as given, in an even order.

    Args:
        tokens_per_round: mean tokens of a round, at least 1 and at most `nodes` + 1.
        nodes: drafted tokens of every round.
        draft_seconds: seconds of drafting in every round.
    """
    rounds, written, found = 20, 0, []
    for index in range(1, rounds + 1):
        due = round(index * tokens_per_round)
        found.append(RoundOutcome(nodes, max(1, due - written), draft_seconds))
        written = max(written + 1, due)
    return tuple(found)


def poisson(
    rate: float, *, count: int, prompt: int, output: int, outcomes: Sequence[RoundOutcome] = PLAIN, seed: int = 0
) -> Iterator[SimulatedRequest]:
    """Yield requests that arrive independently, `rate` a second, with geometric lengths around the given means."""
    choose, now = random.Random(seed), 0.0
    for _ in range(count):
        now += choose.expovariate(rate)
        lengths = [max(1, round(choose.expovariate(1 / mean))) for mean in (prompt, output)]
        start = choose.randrange(len(outcomes))
        turned = tuple(itertools.islice(itertools.cycle(outcomes), start, start + len(outcomes)))
        yield SimulatedRequest(now, min(lengths[0], 8 * prompt), min(lengths[1], 8 * output), turned)
