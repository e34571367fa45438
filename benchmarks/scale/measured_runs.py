"""Costs and simulations from measured runs, for the scripts of this folder and their tests.

Rows of `equal_latency.py` are clients. Its calibration runs give the costs of the server's host from CPU times
(`calibrated_costs`), and from texts of one device a device's own time for a message. Cases are simulated from recorded
rounds, the times at which texts began, and the speed of the server's core: the CPU time of a fixed work. No latency of
a case enters its prediction. Which devices share a pass depends on small random delays, so a prediction is the mean
over several draws of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from draftree.core.errors import ConfigurationError
from draftree.engine.trace import Trace, TracedRound
from draftree.lab.fleet.curves import PassCurve, within
from draftree.lab.fleet.measured import calibrated_costs, slowness
from draftree.lab.fleet.simulation import (
    PLAIN,
    Fleet,
    FleetResult,
    FleetSettings,
    HostCosts,
    RoundOutcome,
    SimulatedRequest,
)

Row = Mapping[str, Any]
BISECTIONS = 14
MOST_OF_CLIENT = 0.01
"""Seconds of a client for a message besides its draft, at most."""
DRAWS = 5
"""Of random delays, over which predictions are means."""


def client_seconds(
    server_seconds: float, round_trip: float, *, draft_seconds: float, client_overhead: float = 0.0
) -> float:
    """Return the seconds of a text whose client drafts.

    The simulator counts the network and the client between rounds. Opening the text takes one round trip, the first
    draft its time, and the first round a round trip. `server_seconds` run from the arrival of the first tree to the
    last verdict, `client_overhead` is that of the client per round besides its draft.
    """
    return server_seconds + 2 * round_trip + draft_seconds + client_overhead


def streamed_seconds(server_seconds: float, round_trip: float) -> float:
    """Return the seconds of a text that the server writes alone and a client reads.

    The client opens the text, which the server begins after half a round trip, and then reads: every read returns all
    new tokens, and the next one begins when its reply is there. The last read is the first one that arrives after the
    end of the text, or waits for it if it arrives while the last token is computed.
    """
    if round_trip <= 0:
        return server_seconds
    return round_trip * (math.ceil(server_seconds / round_trip) + 1)


def host_costs(alone: Sequence[Trace], together: Trace, curve: PassCurve) -> HostCosts:
    """Return the host's costs from recorded runs of one sequence, and of several at once.

    The overhead is what a round takes besides its draft and the pass of the curve, so it contains what passes of real
    rounds take more than those of the curve. Both differences are linear in the number of sequences. Means count, since
    a run takes the sum of its rounds; of `together`, the rounds with all sequences.
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
    than those of the curve, which return no hidden states and no logits. `alone` has texts that were written one by
    one, each with its seconds; `together` texts that were written at once, and the seconds of all.
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


def requests_of_texts(
    prompts: Sequence[int], output: int, texts: Sequence[Sequence[RoundOutcome]] = ()
) -> list[SimulatedRequest]:
    """Return requests that arrive at once and replay recorded texts (none: plain decoding); lengths are in tokens."""
    return [
        SimulatedRequest(0.0, prompt, output, tuple(texts[place]) if texts else PLAIN)
        for place, prompt in enumerate(prompts)
    ]


@dataclass(frozen=True, slots=True)
class PacedCurve:
    """Passes that take a given time: so many seconds each, and for each row."""

    fixed: float
    row: float

    def seconds(self, batch: int, rows: int, prefix: float, *, prompt_rows: int = 0) -> float:
        """Return the seconds of a pass."""
        return self.fixed + self.row * rows


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredClients:
    """What a simulation of measured clients needs.

    Attributes:
        texts: drafted and written tokens of every round, of each text.
        client: seconds of a device for a message besides its draft and the network.
        jitter: largest random delay of a device's message by the number of devices: twice the mean time by which
            messages are late, since all devices share a core.
        reader: the same of a client that reads without a network, and with one, which it waits for.
        calibration: runs that the costs are from.
    """

    curve: PassCurve
    host: HostCosts
    texts: Sequence[Sequence[tuple[int, int]]]
    output: int
    draft: float
    client: float = 0.0
    jitter: Mapping[int, float] = field(default_factory=lambda: {1: 0.0})
    reader: tuple[float, float] = (0.0, 0.0)
    passes_on_host: bool = False
    calibration: Sequence[Row] = ()

    @classmethod
    def of_paced(cls, rows: Sequence[Row]) -> MeasuredClients:
        """Return the calibrated simulation of a file whose passes take a given time."""
        head = next(row for row in rows if row["kind"] == "header")
        host = calibrated_costs(rows, launch=True)
        runs = [row for row in rows if row["kind"] == "calibration" and row["arm"] != "openings"]
        fixed, each = (one / 1000 for one in head["paced_ms"])
        late = sum(row["meters"]["wall"] - each * row["meters"]["rows"] for row in runs)  # waits end a little late
        curve = PacedCurve(max(fixed, late / sum(row["meters"]["passes"] for row in runs)), each)
        draft, own = head["draft_ms"] / 1000, [row for row in rows if row["kind"] == "calibration"]
        found = cls(curve=curve, host=host, texts=head["rounds"], output=head["output"], draft=draft, calibration=own)
        return found.with_clients(runs)

    def with_clients(self, runs: Sequence[Row]) -> MeasuredClients:
        """Return the simulation with the times of clients, from calibration runs."""
        near, far = ([r for r in runs if r["arm"] == "streams" and (r["rtt_ms"] > 0) == is_far] for is_far in (0, 1))
        reads = sum(row["meters"]["client_cpu"] for row in near) / sum(row["meters"]["reads"] for row in near)
        late = statistics.fmean(row["late_ms"] for row in far) / 1000
        devices = [row for row in runs if row["arm"] == "drafts" and row["clients"] == 1]
        wanted, low, high = mean_of(devices), 0.0, MOST_OF_CLIENT
        late_of: dict[int, list[float]] = {}
        for row in runs:
            if row["arm"] == "drafts":
                late_of.setdefault(row["clients"], []).append(row["late_ms"])
        jitter = {count: 2 * statistics.fmean(some) / 1000 for count, some in late_of.items()}
        found = replace(self, reader=(reads, reads + late), jitter=jitter)
        for _ in range(BISECTIONS):  # so that one device takes as long as measured
            found = replace(found, client=(low + high) / 2)
            low, high = (found.client, high) if found.simulated_mean(devices) < wanted else (low, found.client)
        return found

    def seconds(self, row: Row) -> list[float]:
        """Return the seconds of the texts of a row, as predicted."""
        trip, found = row["rtt_ms"] / 1000, list[list[float]]()
        for results in self._drawn(row):
            found.append([one + trip for result in results for one in result.by_request])
        return [statistics.fmean(some) for some in zip(*found, strict=True)]

    def simulated_passes(self, row: Row) -> float:
        """Return the number of passes of a row, as predicted."""
        return statistics.fmean(sum(result.steps for result in results) for results in self._drawn(row))

    def _drawn(self, row: Row) -> Iterator[list[FleetResult]]:
        """Yield the results of the groups of a row, for draws of random delays."""
        trip, drafts = row["rtt_ms"] / 1000, row["arm"] != "streams"
        settings = FleetSettings(
            max_batch=64,
            host=self.host.times(slowness(row, self.calibration)),
            passes_on_host=self.passes_on_host,
            opens=True,
            gathers=drafts,
            known_pass=row.get("known_pass"),
            round_trip=trip if drafts else None,
            read_trip=None if drafts else trip,
            jitter=within(self.jitter, row["clients"]) if drafts else 0.0,
            client_overhead=self.client if drafts else self.reader[trip > 0],
        )
        for seed in range(DRAWS if drafts else 1):
            drawn = replace(settings, seed=seed)
            yield [Fleet(self.curve, drawn).run(requests) for requests in self._requests(row, drafts=drafts)]

    def _requests(self, row: Row, *, drafts: bool) -> Iterator[list[SimulatedRequest]]:
        """Yield the texts of each group of a row."""
        place = row["first"]
        for offsets in row["offsets"]:
            requests = []
            for number, offset in enumerate(offsets, place):
                rounds = [RoundOutcome(*one, self.draft) for one in self.texts[number % len(self.texts)]]
                requests.append(SimulatedRequest(offset, 1, self.output, rounds if drafts else PLAIN))
            place += len(offsets)
            yield requests

    def simulated_mean(self, rows: Sequence[Row]) -> float:
        """Return the mean milliseconds per token of all texts of some rows, as predicted."""
        return 1000 * statistics.fmean(one for row in rows for one in self.seconds(row)) / self.output


def mean_of(rows: Sequence[Row]) -> float:
    """Return the measured mean milliseconds per token of all texts of some rows."""
    return statistics.fmean(one for row in rows for one in row["each"])


def cases_of(rows: Sequence[Row]) -> dict[tuple[str, float, int], list[Row]]:
    """Return the rows of each case: arm, milliseconds of the round trip, and number of clients."""
    found: dict[tuple[str, float, int], list[Row]] = {}
    for row in rows:
        if row["kind"] == "clients":
            found.setdefault((row["arm"], row["rtt_ms"], row["clients"]), []).append(row)
    return dict(sorted(found.items(), key=lambda one: (one[0][1], one[0][2], one[0][0])))
