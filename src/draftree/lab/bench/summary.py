"""Statistics of records: medians over repeats, ratios to plain and to the peer, shares of time. No torch.

A prompt's rate is its tokens divided by its seconds, both medians over repeats. A method's rate over many prompts is
the sum of tokens divided by the sum of seconds; its speed-up is the geometric mean of the prompts' ratios.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftree.lab.bench.records import OURS, Record, Results

PHASES = ("plan", "draft", "score", "verify", "commit")


@dataclass(frozen=True, slots=True)
class Rate:
    tokens: float
    seconds: float

    @property
    def value(self) -> float | None:
        return self.tokens / self.seconds if self.tokens > 0 and self.seconds > 0 else None


@dataclass(frozen=True, slots=True)
class Ratio:
    """Geometric mean and quartiles over prompts of the ratio of two rates."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class MethodSummary:
    """A method's statistics on some prompts.

    Attributes:
        decoding: decode tokens per second (first round excluded), sum of tokens over sum of seconds.
        whole: tokens per second of whole calls, prefill included.
        overhead: share of the rounds' seconds outside the models' passes.
        num_equal: prompts with plain's text in every repeat; None if the texts need not be equal.
    """

    method: Mapping[str, Any]
    num_prompts: int
    decoding: float | None
    slowest: float | None
    fastest: float | None
    whole: float | None
    acceptance_length: float
    against_plain: Ratio | None
    whole_against_plain: Ratio | None
    against_peer: Ratio | None
    whole_against_peer: Ratio | None
    overhead: float | None
    num_equal: int | None


@dataclass(frozen=True, slots=True)
class TextDifferences:
    """How often a method's text differed from plain's, and the score gaps at those places."""

    method: str
    num_prompts: int
    num_parted: int
    gaps: tuple[float, ...]
    between: tuple[float, ...]


class Report:
    """Statistics of a results file with records of texts, of all prompts or of one category."""

    def __init__(self, results: Results, category: str | None = None) -> None:
        self.methods: list[Mapping[str, Any]] = results.header["methods"]
        self._records: dict[str, list[Record]] = {method["name"]: [] for method in self.methods}
        for record in results.records:
            if category is None or record.category == category:
                self._records[record.method].append(record)
        self._decoding = {name: _rates(records, whole=False) for name, records in self._records.items()}
        self._whole = {name: _rates(records, whole=True) for name, records in self._records.items()}

    def rows(self) -> list[MethodSummary]:
        return [self._row(method) for method in self.methods if self._records[method["name"]]]

    def phases(self) -> dict[str, dict[str, float]]:
        """Return each phase's share of seconds after the first round, for our methods; `outside`: between rounds."""
        return {
            method["name"]: _phase_shares(self._records[method["name"]])
            for method in self.methods
            if method["engine"] == OURS and self._records[method["name"]]
        }

    def round_milliseconds(self) -> dict[str, dict[str, float]]:
        """Return mean milliseconds per phase of rounds after the first one, for our methods; `all` is their sum."""
        found = {}
        for method in self.methods:
            records = self._records[method["name"]]
            rounds = sum(record.stats["rounds"] - 1 for record in records)
            if method["engine"] != OURS or rounds < 1:
                continue
            each = {p: 1e3 * sum(r.stats["phase_seconds"][p] for r in records) / rounds for p in PHASES}
            found[method["name"]] = each | {"all": sum(each.values())}
        return found

    def partings(self) -> list[TextDifferences]:
        return [
            _parting(name, records)
            for name, records in self._records.items()
            if records and not self._is_plain(name) and _num_equal(records) is not None
        ]

    def agreement(self) -> tuple[int, int] | None:
        """Return on how many prompts the two engines' plain texts agree, of how many; None if only one engine ran."""
        records = [r for name in self._records if self._is_plain(name) for r in self._records[name]]
        tasks = _by_task([record for record in records if record.equal_to_other_plain is not None])
        return (sum(all(r.equal_to_other_plain for r in part) for part in tasks), len(tasks)) if tasks else None

    def _is_plain(self, name: str) -> bool:
        return any(method["name"] == name and method["job"] == "plain" for method in self.methods)

    def _row(self, method: Mapping[str, Any]) -> MethodSummary:
        name = method["name"]
        records = self._records[name]
        plain = next(m["name"] for m in self.methods if m["engine"] == method["engine"] and m["job"] == "plain")
        peer = self._peer_of(method)
        by_repeat = [total(_rates(part, whole=False)).value for part in _by_repeat(records)]
        known = [value for value in by_repeat if value is not None]
        return MethodSummary(
            method=method,
            num_prompts=len({record.task for record in records}),
            decoding=total(self._decoding[name]).value,
            slowest=min(known, default=None),
            fastest=max(known, default=None),
            whole=total(self._whole[name]).value,
            acceptance_length=_sum(records, "completion_tokens") / _sum(records, "rounds"),
            against_plain=ratio(self._decoding[name], self._decoding[plain]),
            whole_against_plain=ratio(self._whole[name], self._whole[plain]),
            against_peer=None if peer is None else ratio(self._decoding[name], self._decoding[peer]),
            whole_against_peer=None if peer is None else ratio(self._whole[name], self._whole[peer]),
            overhead=_overhead(records, draft_is_pass=method["draft_is_pass"]) if method["engine"] == OURS else None,
            num_equal=_num_equal(records),
        )

    def _peer_of(self, method: Mapping[str, Any]) -> str | None:
        if method["engine"] != OURS:
            return None
        names = [m["name"] for m in self.methods if m["engine"] != OURS and m["job"] == method["job"]]
        speeds = {name: total(self._decoding[name]).value or 0.0 for name in names if self._records[name]}
        return max(speeds, key=lambda name: speeds[name]) if speeds else None


def total(rates: Mapping[int, Rate]) -> Rate:
    return Rate(sum(rate.tokens for rate in rates.values()), sum(rate.seconds for rate in rates.values()))


def ratio(rates: Mapping[int, Rate], base: Mapping[int, Rate]) -> Ratio | None:
    """Return the ratio of rates on every group of prompts that both have; None if there is none."""
    pairs = [(rates[group].value, base[group].value) for group in rates if group in base]
    logs = [math.log(one / other) for one, other in pairs if one is not None and other is not None]
    if not logs:
        return None
    quartiles = statistics.quantiles(logs, n=4, method="inclusive") if len(logs) > 1 else [logs[0]] * 3
    return Ratio(math.exp(statistics.fmean(logs)), math.exp(quartiles[0]), math.exp(quartiles[2]))


def _rates(records: Iterable[Record], *, whole: bool) -> dict[int, Rate]:
    """Return tokens and seconds of each group of prompts, as medians over repeats."""
    calls: dict[int, dict[int, list[Record]]] = {}
    for record in records:
        calls.setdefault(record.group, {}).setdefault(record.repeat, []).append(record)
    rates = {}
    for group, repeats in calls.items():
        each = [_call_rate(part, whole=whole) for part in repeats.values()]
        rates[group] = Rate(
            statistics.median(rate.tokens for rate in each), statistics.median(rate.seconds for rate in each)
        )
    return rates


def _call_rate(records: Sequence[Record], *, whole: bool) -> Rate:
    """Return the rate of one call; a batch shares its rounds, and the longest text's seconds are the call's."""
    if whole:
        return Rate(_sum(records, "completion_tokens"), records[0].seconds)
    after_first = sum(r.stats["tokens_per_second"] * r.stats["decode_seconds"] for r in records)
    return Rate(round(after_first), max(record.stats["decode_seconds"] for record in records))


def _by_repeat(records: Sequence[Record]) -> list[list[Record]]:
    repeats = dict.fromkeys(record.repeat for record in records)
    return [[record for record in records if record.repeat == repeat] for repeat in repeats]


def _by_task(records: Sequence[Record]) -> list[list[Record]]:
    tasks: dict[str, list[Record]] = {}
    for record in records:
        tasks.setdefault(record.task, []).append(record)
    return list(tasks.values())


def _num_equal(records: Sequence[Record]) -> int | None:
    if any(record.equal_to_plain is None for record in records):
        return None
    return sum(all(record.equal_to_plain for record in part) for part in _by_task(records))


def _sum(records: Iterable[Record], name: str) -> float:
    return float(sum(record.stats[name] for record in records))


def _overhead(records: Sequence[Record], *, draft_is_pass: bool) -> float | None:
    seconds = _sum(records, "decode_seconds")
    if seconds <= 0:
        return None
    passes = ("score", "draft") if draft_is_pass else ("score",)
    inside = sum(record.stats["phase_seconds"][phase] for record in records for phase in passes)
    return 1.0 - inside / seconds


def _phase_shares(records: Sequence[Record]) -> dict[str, float]:
    seconds = {phase: sum(r.stats["phase_seconds"][phase] for r in records) for phase in PHASES}
    # in a batch seconds are shared: time outside the rounds is measurable only for single prompts
    outside = sum(r.seconds - r.stats["prefill_seconds"] - r.stats["decode_seconds"] for r in records)
    alone = len({(record.group, record.repeat) for record in records}) == len(records)
    seconds["outside"] = max(0.0, outside) if alone else 0.0
    whole = sum(seconds.values()) or 1.0
    return {phase: value / whole for phase, value in seconds.items()}


def _parting(name: str, records: Sequence[Record]) -> TextDifferences:
    tasks = _by_task(records)
    # repeats of one prompt usually differ at the same place: the first one that differs represents all
    parted = [
        next(r for r in part if not r.equal_to_plain) for part in tasks if not all(r.equal_to_plain for r in part)
    ]
    partings = [record.divergence for record in parted if record.divergence is not None]
    return TextDifferences(
        name,
        len(tasks),
        len(parted),
        tuple(sorted(d.gap for d in partings if d.gap is not None)),
        tuple(d.between for d in partings if d.between is not None),
    )
