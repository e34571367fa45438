"""Measured clients of a server, and the simulation of the same clients. No torch.

The rows are those of `benchmarks/scale/equal_latency.py`. Its calibration runs give the costs of the server's host
from CPU times (`calibration.py`), and from texts of one device a device's own time for a message. The cases are
simulated from recorded rounds, the times at which texts began, and the speed of the server's core: the CPU time of a
fixed work. No latency of a case enters its prediction. Which devices share a pass depends on small random delays, so a
prediction is the mean over several draws of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from draftree.analysis.fleet.calibration import calibrated_costs, slowness
from draftree.analysis.fleet.curves import PassCurve, within
from draftree.analysis.fleet.host import HostCosts
from draftree.analysis.fleet.result import FleetResult
from draftree.analysis.fleet.simulation import Fleet, FleetSettings
from draftree.analysis.fleet.workload import PLAIN, RoundOutcome, SimulatedRequest

__all__ = ["MeasuredClients", "PacedCurve", "cases_of", "mean_of"]

Row = Mapping[str, Any]
BISECTIONS = 14
MOST_OF_CLIENT = 0.01
"""Seconds of a client for a message besides its draft, at most."""
DRAWS = 5
"""Of random delays, over which predictions are means."""


@dataclass(frozen=True, slots=True)
class PacedCurve:
    """Passes that take a given time.

    Attributes:
        fixed: seconds of a pass.
        row: seconds of each row.
    """

    fixed: float
    row: float

    def seconds(self, batch: int, rows: int, prefix: float, *, prompt_rows: int = 0) -> float:
        """Return the seconds of a pass."""
        return self.fixed + self.row * rows


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredClients:
    """What a simulation of measured clients needs.

    Attributes:
        curve: cost of passes.
        host: of the server.
        texts: drafted and written tokens of every round, of each text.
        output: tokens of a text.
        draft: seconds of a draft.
        client: seconds of a device for a message besides its draft and the network.
        jitter: largest random delay of a device's message by the number of devices: twice the mean time by which
            messages are late, since all devices share a core.
        reader: the same of a client that reads without a network, and with one, which it waits for.
        passes_on_host: whether passes are computed on the core of the server.
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
        """Return the calibrated simulation of a file whose passes take a given time.

        Raises:
            ConfigurationError: the file has no calibration runs.
        """
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
