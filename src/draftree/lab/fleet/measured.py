"""Measured servers and clients as input of the simulator. No torch.

Passes, the host's time per round, and the rounds of recorded texts come from a file of `benchmarks/scale/fleet.py`.
Under a rule that keeps the text these outcomes hold for every batch, so they are replayed in other batches, behind
other networks and on other machines.

Clients come from rows of `benchmarks/scale/equal_latency.py`. Its calibration runs (`--calibrate`: few clients that
read, or draft, with the CPU seconds of the event loop and of the engine besides passes, and counts of steps, sequences,
trees, rows and messages) give the costs of the host: the least-squares solution without negative values, every run by
its relative error. Latencies are not used. A processor's speed may change between runs: where the file has the CPU time
of a fixed work in every pass (`probe_loop` and `probe_product`), the times of a run count in relation to it.

Cases are simulated from recorded rounds, the times at which texts began, and the speed of the server's core. No latency
of a case enters its prediction. Which devices share a pass depends on small random delays, so a prediction is the mean
over several draws of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftree.core.errors import ConfigurationError, suggestion
from draftree.core.files import MALFORMED, read_json_lines
from draftree.engine.trace import Trace, TracedRound
from draftree.lab.fleet.curves import MeasuredCurve, PassCurve, within
from draftree.lab.fleet.simulation import (
    PLAIN,
    Fleet,
    FleetResult,
    FleetSettings,
    HostCosts,
    RoundOutcome,
    SimulatedRequest,
)


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


Run = Mapping[str, Any]
TIMES = (
    "loop", "before", "after", "inner", "tree", "tree_reply", "read", "read_reply", "open", "open_reply",
)  # fmt: skip
"""Meters that are CPU seconds of the server."""


def slowness(row: Run, rows: Sequence[Run]) -> float:
    """Return how much longer the fixed work took in a run than in calibration runs; 1 if there is none."""
    known = [one for one in (_probe(other) for other in rows if other.get("kind") == "calibration") if one]
    own = _probe(row)
    return own / statistics.fmean(known) if own and known else 1.0


def calibrated_costs(rows: Sequence[Run], *, launch: bool = False) -> HostCosts:
    """Return the costs that explain the CPU times of calibration runs; with `launch` the time in passes counts, too."""
    runs = [_at_usual_speed(row, rows) for row in rows if row.get("kind") == "calibration"]
    opened = [row for row in runs if row["arm"] == "openings"]
    written = [row for row in runs if row["arm"] != "openings"]
    kinds = {(row["arm"] == "streams", row["clients"] > 1) for row in written}
    if not opened or len(kinds) < 4:
        raise ConfigurationError(
            "the file has no calibration of readers and devices, one and several: run equal_latency.py --calibrate"
        )
    openings = _sums(opened)
    session = {name: value / openings["opened"] for name, value in openings.items()}
    engine = _solve(
        [[m["passes"], m["sequences"], m.get("trees", 0.0), m["rows"]] for m in map(_meters, written)],
        [m["before"] + m["after"] for m in map(_meters, written)],
    )
    passes = (
        _solve(
            [[m["passes"], m["sequences"], m["rows"]] for m in map(_meters, written)],
            [m["inner"] for m in map(_meters, written)],
        )
        if launch
        else [0.0, 0.0, 0.0]
    )
    sums = [_besides_sessions(row, session) for row in written]
    loop = _solve(
        [
            [m["woken"], m.get("trees", 0.0), m.get("reads", 0.0), _updates(row)]
            for row, m in zip(written, sums, strict=True)
        ],
        [m["loop"] for m in sums],
    )
    alone = [row for row in written if row["clients"] == 1]
    tree, verdict = (sum(_meters(row).get(name, 0.0) for row in alone) for name in ("tree", "tree_reply"))
    read, tokens = (sum(_meters(row).get(name, 0.0) for row in alone) for name in ("read", "read_reply"))
    after = sum(_meters(row)["after"] for row in written) / sum(
        _meters(row)["before"] + _meters(row)["after"] for row in written
    )
    return HostCosts(
        overhead=engine[0],
        overhead_per_sequence=engine[1],
        overhead_per_tree=engine[2],
        overhead_per_row=engine[3],
        launch=passes[0],
        launch_per_sequence=passes[1],
        launch_per_row=passes[2],
        after=after,
        opening=session["open"] + session["open_reply"],
        wake_up=loop[0],
        tree_message=loop[1] * tree / (tree + verdict),
        verdict_message=loop[1] * verdict / (tree + verdict),
        read_message=loop[2] * read / (read + tokens),
        tokens_message=loop[2] * tokens / (read + tokens),
        update=loop[3],
    )


def _probe(row: Run) -> float:
    """Return the CPU seconds of the fixed work for a pass; 0 if it was not done."""
    meters = _meters(row)
    return (meters.get("probe_loop", 0.0) + meters.get("probe_product", 0.0)) / max(1.0, meters.get("passes", 0.0))


def _at_usual_speed(row: Run, rows: Sequence[Run]) -> Run:
    """Return a run as if the fixed work had taken as long as in the mean of all calibration runs."""
    factor = slowness(row, rows)
    meters = {name: value / factor if name in TIMES else value for name, value in _meters(row).items()}
    return {**row, "meters": meters}


def _meters(row: Run) -> Mapping[str, float]:
    found: Mapping[str, float] = row["meters"]
    return found


def _sums(rows: Sequence[Run]) -> dict[str, float]:
    names = {name for row in rows for name in row["meters"]}
    return {name: sum(row["meters"].get(name, 0.0) for row in rows) for name in names}


def _updates(row: Run) -> float:
    """Return the results that the event loop handed to texts that are read."""
    return _meters(row)["sequences"] if row["arm"] == "streams" else 0.0


def _besides_sessions(row: Run, session: Mapping[str, float]) -> dict[str, float]:
    """Return the meters of a run without what its connections and openings took."""
    count = len(row["each"])
    taken = {name: count * session[name] for name in ("loop", "woken")}
    return {name: value - taken.get(name, 0.0) for name, value in _meters(row).items()}


def _solve(counts: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return the seconds of each kind of work that explain the sums, none below 0."""
    totals = np.asarray(seconds, dtype=float)
    matrix: NDArray[np.float64] = np.asarray(counts, dtype=float) / totals[:, None]
    kept = list(range(matrix.shape[1]))
    while True:
        found = np.linalg.lstsq(matrix[:, kept], np.ones(len(totals)), rcond=None)[0]
        if len(kept) == 1 or found.min() >= 0:
            break
        kept.pop(int(found.argmin()))
    each = [0.0] * matrix.shape[1]
    for place, value in zip(kept, found, strict=True):
        each[place] = max(0.0, float(value))
    return each


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


@dataclass(frozen=True, slots=True)
class MeasuredDraft:
    """A drafter's time besides passes, and the outcomes of the rounds of each text."""

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
    """A measured server: the cost of its passes, and rounds by the spec of the drafter ("none": plain decoding)."""

    curve: MeasuredCurve
    drafts: Mapping[str, MeasuredDraft]

    @classmethod
    def read(cls, path: Path) -> Measurements:
        """Read a file of `benchmarks/scale/fleet.py`, or one with passes only."""
        curve = MeasuredCurve.read(path)
        try:
            rows = [row for row in read_json_lines(path) if row.get("kind") == "draft"]
            return cls(curve, {row["draft"]: MeasuredDraft.of_line(row) for row in rows})
        except (OSError, *MALFORMED) as error:
            raise ConfigurationError(f"'{path}' cannot be read as measurements: {error!r}") from error

    def draft(self, spec: str) -> MeasuredDraft:
        """Return the rounds of a drafter."""
        if spec not in self.drafts:
            raise ConfigurationError(f"the file has no rounds of '{spec}': {suggestion(spec, list(self.drafts))}")
        return self.drafts[spec]


def requests_of_texts(
    prompts: Sequence[int], output: int, texts: Sequence[Sequence[RoundOutcome]] = ()
) -> list[SimulatedRequest]:
    """Return requests that arrive at once and replay recorded texts (none: plain decoding); lengths are in tokens."""
    return [
        SimulatedRequest(0.0, prompt, output, tuple(texts[place]) if texts else PLAIN)
        for place, prompt in enumerate(prompts)
    ]


Row = Mapping[str, Any]
BISECTIONS = 14
MOST_OF_CLIENT = 0.01
"""Seconds of a client for a message besides its draft, at most."""
DRAWS = 5
"""Of random delays, over which predictions are means."""


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
