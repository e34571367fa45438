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
TIMES = (
    "loop", "before", "after", "inner", "tree", "tree_reply", "read", "read_reply", "open", "open_reply",
)  # fmt: skip
"""Meters that are CPU seconds of the server."""


def slowness(row: CalibrationRow, rows: Sequence[CalibrationRow]) -> float:
    """Return how much longer the fixed work took in a run than in calibration runs; 1 if there is none."""
    known = [one for one in (_probe(other) for other in rows if other.get("kind") == "calibration") if one]
    own = _probe(row)
    return own / statistics.fmean(known) if own and known else 1.0


def calibrated_costs(rows: Sequence[CalibrationRow], *, launch: bool = False) -> HostCosts:
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


def _probe(row: CalibrationRow) -> float:
    """Return the CPU seconds of the fixed work for a pass; 0 if it was not done."""
    meters = _meters(row)
    return (meters.get("probe_loop", 0.0) + meters.get("probe_product", 0.0)) / max(1.0, meters.get("passes", 0.0))


def _at_usual_speed(row: CalibrationRow, rows: Sequence[CalibrationRow]) -> CalibrationRow:
    """Return a run as if the fixed work had taken as long as in the mean of all calibration runs."""
    factor = slowness(row, rows)
    meters = {name: value / factor if name in TIMES else value for name, value in _meters(row).items()}
    return {**row, "meters": meters}


def _meters(row: CalibrationRow) -> Mapping[str, float]:
    found: Mapping[str, float] = row["meters"]
    return found


def _sums(rows: Sequence[CalibrationRow]) -> dict[str, float]:
    names = {name for row in rows for name in row["meters"]}
    return {name: sum(row["meters"].get(name, 0.0) for row in rows) for name in names}


def _updates(row: CalibrationRow) -> float:
    return _meters(row)["sequences"] if row["arm"] == "streams" else 0.0


def _besides_sessions(row: CalibrationRow, session: Mapping[str, float]) -> dict[str, float]:
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


@dataclass(frozen=True, slots=True)
class MeasuredDraft:
    """A drafter's time besides passes, and the outcomes of the rounds of each text."""

    host: HostCosts
    texts: Sequence[Sequence[RoundOutcome]]

    @property
    def rounds(self) -> tuple[RoundOutcome, ...]:
        return tuple(one for text in self.texts for one in text)

    @property
    def tokens_per_round(self) -> float:
        return statistics.fmean(one.tokens for one in self.rounds)

    def line(self, draft: str) -> dict[str, Any]:
        texts = [[[one.nodes, one.tokens, round(1000 * one.draft_seconds, 3)] for one in text] for text in self.texts]
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
