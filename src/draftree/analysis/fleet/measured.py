"""Measured servers as input of the simulator: passes, the host's time per round, and the rounds of recorded texts.

The file is written by `benchmarks/scale/fleet.py`. Its lines are passes, and for each drafter the host's costs and the
outcome of every round of texts that were written one by one. Under a rule that keeps the text these outcomes hold for
every batch, so they are replayed in other batches, behind other networks and on other machines. No torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from draftree.analysis.fleet.curves import MeasuredCurve, PassCurve
from draftree.analysis.fleet.host import HostCosts
from draftree.analysis.fleet.simulation import Fleet, FleetSettings
from draftree.analysis.fleet.workload import PLAIN, RoundOutcome, SimulatedRequest
from draftree.analysis.trace import Trace, TracedRound
from draftree.core.errors import ConfigurationError, suggestion
from draftree.core.json_files import MALFORMED, read_json_lines

__all__ = ["MeasuredDraft", "Measurements", "host_costs", "requests_of_texts", "with_texts"]


def host_costs(alone: Sequence[Trace], together: Trace, curve: PassCurve) -> HostCosts:
    """Return the host's costs from recorded runs of one sequence, and of several at once.

    The overhead is what a round takes besides its draft and the pass of the curve, so it contains what passes of real
    rounds take more than those of the curve. Both differences are linear in the number of sequences. Means count, since
    a run takes the sum of its rounds.

    Args:
        alone: runs of one sequence each.
        together: a run of several sequences; its rounds with all of them count.
        curve: cost of passes.

    Raises:
        ConfigurationError: a run has no round of decoding.
    """
    singles = [one for trace in alone for one in decoding_rounds(trace)]
    rounds = decoding_rounds(together)
    most = max((len(one.steps) for one in rounds), default=0)
    full = [one for one in rounds if len(one.steps) == most]
    if not singles or not full:
        raise ConfigurationError("the recorded runs have no rounds after prompts: record longer texts")
    base, crowd = (statistics.fmean(_beside(one, curve) for one in some) for some in (singles, full))
    each = 0.0 if most < 2 else max(0.0, (crowd - base) / (most - 1))
    drafts = [statistics.fmean(one.seconds["draft"] for one in some) for some in (singles, full)]
    share = 0.0 if most < 2 or not drafts[0] else (drafts[1] / drafts[0] - 1) / (most - 1)
    return HostCosts(base - each, each, min(1.0, max(0.0, share)))


def with_texts(
    host: HostCosts,
    curve: PassCurve,
    alone: Sequence[tuple[SimulatedRequest, float]],
    together: tuple[Sequence[SimulatedRequest], float],
) -> HostCosts:
    """Return the costs with the time of texts besides their rounds: to begin and end each, and to read prompts.

    It is what recorded runs take more than the simulator expects. What several texts at once take more than one text is
    the time of each; the rest is that of a step that reads prompts, such as what passes over real prompts take more
    than those of the curve, which return no hidden states and no logits.

    Args:
        host: costs of rounds.
        curve: cost of passes.
        alone: texts that were written one by one, and the seconds of each.
        together: texts that were written at once, and the seconds of all.
    """
    settings, (several, seconds) = FleetSettings(host=replace(host, opening=0.0, prompt_step=0.0)), together
    one = statistics.fmean(own - Fleet(curve, settings).run([request]).seconds for request, own in alone)
    crowd = seconds - Fleet(curve, settings).run(several).seconds
    opening = 0.0 if len(several) < 2 else max(0.0, (crowd - one) / (len(several) - 1))
    opening = min(opening, max(0.0, one))
    return replace(host, opening=opening, prompt_step=max(0.0, one - opening))


def decoding_rounds(trace: Trace) -> list[TracedRound]:
    """Return the rounds without a prompt: every sequence has been in an earlier round."""
    met, found = set[str](), list[TracedRound]()
    for one in trace.rounds:
        names = {step.sequence for step in one.steps}
        if names and names <= met:
            found.append(one)
        met |= names
    return found


def _beside(one: TracedRound, curve: PassCurve) -> float:
    prefix = statistics.fmean(step.prefix for step in one.steps)
    return one.seconds["total"] - one.seconds["draft"] - curve.seconds(len(one.steps), one.num_rows, prefix)


@dataclass(frozen=True, slots=True)
class MeasuredDraft:
    """A drafter's rounds.

    Attributes:
        host: time besides passes.
        texts: outcomes of the rounds of each text.
    """

    host: HostCosts
    texts: Sequence[Sequence[RoundOutcome]]

    @property
    def rounds(self) -> tuple[RoundOutcome, ...]:
        """All rounds, text by text."""
        return tuple(one for text in self.texts for one in text)

    @property
    def tokens_per_round(self) -> float:
        """Mean tokens of a round."""
        return statistics.fmean(one.tokens for one in self.rounds)

    def line(self, draft: str) -> dict[str, Any]:
        """Return the values of a line of the file."""
        texts = [[[one.nodes, one.tokens, round(1000 * one.draft_seconds, 3)] for one in text] for text in self.texts]
        return {"kind": "draft", "draft": draft, "host": asdict(self.host), "texts": texts}

    @classmethod
    def of_line(cls, row: Mapping[str, Any]) -> MeasuredDraft:
        """Return the content of a line."""
        texts = [
            tuple(RoundOutcome(nodes, tokens, milliseconds / 1000) for nodes, tokens, milliseconds in text)
            for text in row["texts"]
        ]
        return cls(HostCosts(**row["host"]), texts)


@dataclass(frozen=True, slots=True)
class Measurements:
    """A measured server.

    Attributes:
        curve: cost of passes.
        drafts: rounds by the spec of the drafter; "none" is plain decoding.
    """

    curve: MeasuredCurve
    drafts: Mapping[str, MeasuredDraft]

    @classmethod
    def read(cls, path: Path) -> Measurements:
        """Read a file of `benchmarks/scale/fleet.py`, or one with passes only.

        Raises:
            ConfigurationError: the file has no measured passes, or cannot be read.
        """
        curve = MeasuredCurve.read(path)
        try:
            rows = [row for row in read_json_lines(path) if row.get("kind") == "draft"]
            return cls(curve, {row["draft"]: MeasuredDraft.of_line(row) for row in rows})
        except (OSError, *MALFORMED) as error:
            raise ConfigurationError(f"'{path}' cannot be read as measurements: {error!r}") from error

    def draft(self, spec: str) -> MeasuredDraft:
        """Return the rounds of a drafter.

        Raises:
            ConfigurationError: it was not measured.
        """
        if spec not in self.drafts:
            raise ConfigurationError(f"the file has no rounds of '{spec}': {suggestion(spec, list(self.drafts))}")
        return self.drafts[spec]


def requests_of_texts(
    prompts: Sequence[int], output: int, texts: Sequence[Sequence[RoundOutcome]] = ()
) -> list[SimulatedRequest]:
    """Return requests that arrive at once and replay recorded texts.

    Args:
        prompts: tokens of each prompt.
        output: tokens of each text.
        texts: outcomes of each, at least as many as prompts; none for plain decoding.
    """
    return [
        SimulatedRequest(0.0, prompt, output, tuple(texts[place]) if texts else PLAIN)
        for place, prompt in enumerate(prompts)
    ]
