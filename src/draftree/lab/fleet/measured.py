"""Measured servers as input of the simulator: passes, rounds, and the costs of the host. No torch.

Passes, the host's time per round, and the rounds of recorded texts come from a file of `benchmarks/scale/fleet.py`.
Under a rule that keeps the text these outcomes hold for every batch, so they are replayed in other batches, behind
other networks and on other machines.

Costs of the host come from calibration runs (`benchmarks/scale/equal_latency.py --calibrate`: few clients that read,
or draft, with the CPU seconds of the event loop and of the engine besides passes, and counts of steps, sequences,
trees, rows and messages) give the costs of the host: the least-squares solution without negative values, every run by
its relative error. Latencies are not used. A processor's speed may change between runs: where the file has the CPU time
of a fixed work in every pass (`probe_loop` and `probe_product`), the times of a run count in relation to it.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftree.core.errors import ConfigurationError, suggestion
from draftree.core.files import MALFORMED, read_json_lines
from draftree.lab.fleet.curves import MeasuredCurve
from draftree.lab.fleet.simulation import HostCosts, RoundOutcome

CalibrationRow = Mapping[str, Any]
Meters = defaultdict[str, float]
TIMES = {"loop", "before", "after", "inner", "tree", "tree_reply", "read", "read_reply", "open", "open_reply"}
"""Meters that are CPU seconds of the server."""


def slowness(row: CalibrationRow, rows: Sequence[CalibrationRow]) -> float:
    """Return how much longer the fixed work took in a run than in calibration runs; 1 if there is none."""
    probes = [probe for other in rows if other.get("kind") == "calibration" and (probe := _probe(other))]
    probe = _probe(row)
    return probe / statistics.fmean(probes) if probe and probes else 1.0


def _probe(row: CalibrationRow) -> float:
    """Return the CPU seconds of the fixed work for a pass; 0 if it was not done."""
    meters = row["meters"]
    work: float = meters.get("probe_loop", 0.0) + meters.get("probe_product", 0.0)
    return work / max(1.0, meters.get("passes", 0.0))


def calibrated_costs(rows: Sequence[CalibrationRow], *, launch: bool = False) -> HostCosts:
    """Return the costs that explain the CPU times of calibration runs; with `launch` the time in passes counts, too.

    A run counts as if the fixed work had taken as long as in the mean of all of them.
    """
    opened = list[Meters]()
    written = list[tuple[CalibrationRow, Meters]]()
    for row in rows:
        if row.get("kind") == "calibration":
            factor = slowness(row, rows)
            meters: Meters = defaultdict(float)
            meters.update({name: value / factor if name in TIMES else value for name, value in row["meters"].items()})
            if row["arm"] == "openings":
                opened.append(meters)
            else:
                written.append((row, meters))
    if not opened or len({(row["arm"] == "streams", row["clients"] > 1) for row, _ in written}) < 4:
        raise ConfigurationError(
            "the file has no calibration of readers and devices, one and several: run equal_latency.py --calibrate"
        )
    openings = sum(m["opened"] for m in opened)
    session = {name: sum(m[name] for m in opened) / openings for name in ("open", "open_reply", "loop", "woken")}
    runs = [meters for _, meters in written]
    engine = _solve(
        [[m[name] for name in ("passes", "sequences", "trees", "rows")] for m in runs],
        [m["before"] + m["after"] for m in runs],
    )
    passes = [0.0] * 3
    if launch:
        passes = _solve(
            [[m[name] for name in ("passes", "sequences", "rows")] for m in runs], [m["inner"] for m in runs]
        )
    loop = _solve(
        [
            [
                m["woken"] - len(row["each"]) * session["woken"],
                m["trees"],
                m["reads"],
                m["sequences"] if row["arm"] == "streams" else 0.0,
            ]
            for row, m in written
        ],
        [m["loop"] - len(row["each"]) * session["loop"] for row, m in written],
    )
    alone = [meters for row, meters in written if row["clients"] == 1]
    tree, verdict, read, tokens = (
        sum(meters[name] for meters in alone) for name in ("tree", "tree_reply", "read", "read_reply")
    )
    return HostCosts(
        overhead=engine[0],
        overhead_per_sequence=engine[1],
        overhead_per_tree=engine[2],
        overhead_per_row=engine[3],
        launch=passes[0],
        launch_per_sequence=passes[1],
        launch_per_row=passes[2],
        after=sum(m["after"] for m in runs) / sum(m["before"] + m["after"] for m in runs),
        opening=session["open"] + session["open_reply"],
        wake_up=loop[0],
        tree_message=loop[1] * tree / (tree + verdict),
        verdict_message=loop[1] * verdict / (tree + verdict),
        read_message=loop[2] * read / (read + tokens),
        tokens_message=loop[2] * tokens / (read + tokens),
        update=loop[3],
    )


def _solve(counts: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return the seconds of each kind of work that explain the sums, none below 0."""
    totals = np.asarray(seconds, dtype=float)
    matrix: NDArray[np.float64] = np.asarray(counts, dtype=float) / totals[:, None]
    kept = list(range(matrix.shape[1]))
    solution = np.zeros(matrix.shape[1])
    while True:
        part = np.linalg.lstsq(matrix[:, kept], np.ones(len(totals)), rcond=None)[0]
        if len(kept) == 1 or part.min() >= 0:
            solution[kept] = np.maximum(part, 0.0)
            return [float(value) for value in solution]
        kept.pop(int(part.argmin()))


@dataclass(frozen=True, slots=True)
class MeasuredDraft:
    """A drafter's time besides passes, and the outcomes of the rounds of each text."""

    host: HostCosts
    texts: Sequence[Sequence[RoundOutcome]]

    @property
    def rounds(self) -> tuple[RoundOutcome, ...]:
        return tuple(outcome for text in self.texts for outcome in text)

    @property
    def tokens_per_round(self) -> float:
        return statistics.fmean(outcome.tokens for outcome in self.rounds)

    def line(self, draft: str) -> dict[str, Any]:
        texts = [[[o.nodes, o.tokens, round(1000 * o.draft_seconds, 3)] for o in text] for text in self.texts]
        return {"kind": "draft", "draft": draft, "host": asdict(self.host), "texts": texts}

    @classmethod
    def of_line(cls, row: Mapping[str, Any]) -> MeasuredDraft:
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
        if spec not in self.drafts:
            raise ConfigurationError(f"the file has no rounds of '{spec}': {suggestion(spec, list(self.drafts))}")
        return self.drafts[spec]
