"""Statistics of records: medians over repeats, ratios to plain and to the peer, shares of time. No torch.

A prompt's rate is its tokens divided by its seconds, both medians over repeats. A method's rate over many prompts is
the sum of tokens divided by the sum of seconds; its speed-up is the median of the prompts' ratios.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftree.lab.bench.records import OURS, Record, Results

PLAIN = "plain"
"""Job of plain decoding."""
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
    """Median and quartiles over prompts of the ratio of two rates."""

    median: float
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

    def _ours(self) -> Iterator[tuple[str, list[Record]]]:
        """Yield our methods that have records."""
        for method in self.methods:
            if method["engine"] == OURS and (records := self._records[method["name"]]):
                yield method["name"], records

    def phases(self) -> dict[str, dict[str, float]]:
        """Return each phase's share of seconds after the first round, for our methods; `outside`: between rounds."""
        return {name: _phase_shares(records) for name, records in self._ours()}

    def round_milliseconds(self) -> dict[str, dict[str, float]]:
        """Return mean milliseconds per phase of rounds after the first one, for our methods; `all` is their sum."""
        milliseconds = {}
        for name, records in self._ours():
            rounds = sum(record.stats["rounds"] - 1 for record in records)
            if rounds >= 1:
                each = {phase: 1e3 * seconds / rounds for phase, seconds in _phase_seconds(records).items()}
                milliseconds[name] = each | {"all": sum(each.values())}
        return milliseconds

    def partings(self) -> list[TextDifferences]:
        differences = []
        for method in self.methods:
            records = self._records[method["name"]]
            if not records or method["job"] == PLAIN or _num_equal(records) is None:
                continue
            tasks = _grouped(records, "task")
            # repeats of one prompt usually differ at the same place: the first one that differs represents all
            parted = [
                next(r for r in part if not r.equal_to_plain)
                for part in tasks
                if not all(r.equal_to_plain for r in part)
            ]
            places = [record.divergence for record in parted if record.divergence is not None]
            gaps = tuple(sorted(place.gap for place in places if place.gap is not None))
            between = tuple(place.between for place in places if place.between is not None)
            differences.append(TextDifferences(method["name"], len(tasks), len(parted), gaps, between))
        return differences

    def agreement(self) -> tuple[int, int] | None:
        """Return on how many prompts the two engines' plain texts agree, of how many; None if only one engine ran."""
        records = [
            record for method in self.methods if method["job"] == PLAIN for record in self._records[method["name"]]
        ]
        tasks = _grouped([record for record in records if record.equal_to_other_plain is not None], "task")
        return (sum(all(r.equal_to_other_plain for r in part) for part in tasks), len(tasks)) if tasks else None

    def _row(self, method: Mapping[str, Any]) -> MethodSummary:
        name, is_ours = method["name"], method["engine"] == OURS
        records = self._records[name]
        plain = next(m["name"] for m in self.methods if m["engine"] == method["engine"] and m["job"] == PLAIN)
        peers = [
            m["name"]
            for m in self.methods
            if is_ours and m["engine"] != OURS and m["job"] == method["job"] and self._records[m["name"]]
        ]
        peer = max(peers, key=lambda name: total(self._decoding[name]).value or 0.0, default=None)
        by_repeat = [total(_rates(part, whole=False)).value for part in _grouped(records, "repeat")]
        speeds = [speed for speed in by_repeat if speed is not None]
        return MethodSummary(
            method=method,
            num_prompts=len({record.task for record in records}),
            decoding=total(self._decoding[name]).value,
            slowest=min(speeds, default=None),
            fastest=max(speeds, default=None),
            whole=total(self._whole[name]).value,
            acceptance_length=_sum(records, "completion_tokens") / _sum(records, "rounds"),
            against_plain=ratio(self._decoding[name], self._decoding[plain]),
            whole_against_plain=ratio(self._whole[name], self._whole[plain]),
            against_peer=None if peer is None else ratio(self._decoding[name], self._decoding[peer]),
            whole_against_peer=None if peer is None else ratio(self._whole[name], self._whole[peer]),
            overhead=_overhead(records, draft_is_pass=method["draft_is_pass"]) if is_ours else None,
            num_equal=_num_equal(records),
        )


def total(rates: Mapping[int, Rate]) -> Rate:
    return Rate(sum(rate.tokens for rate in rates.values()), sum(rate.seconds for rate in rates.values()))


def ratio(rates: Mapping[int, Rate], base: Mapping[int, Rate]) -> Ratio | None:
    """Return the ratio of rates on every group of prompts that both have; None if there is none."""
    pairs = [(rates[group].value, base[group].value) for group in rates if group in base]
    ratios = [rate / base_rate for rate, base_rate in pairs if rate is not None and base_rate is not None]
    if not ratios:
        return None
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return Ratio(median, low, high)


def _grouped(records: Iterable[Record], field: str) -> list[list[Record]]:
    """Return the records by the value of a field, in order of appearance."""
    groups: dict[Any, list[Record]] = {}
    for record in records:
        groups.setdefault(getattr(record, field), []).append(record)
    return list(groups.values())


def _rates(records: Iterable[Record], *, whole: bool) -> dict[int, Rate]:
    """Return tokens and seconds of each group of prompts, as medians over repeats."""
    rates = {}
    for part in _grouped(records, "group"):
        calls = [_call_rate(call, whole=whole) for call in _grouped(part, "repeat")]
        tokens, seconds = ([getattr(call, name) for call in calls] for name in ("tokens", "seconds"))
        rates[part[0].group] = Rate(statistics.median(tokens), statistics.median(seconds))
    return rates


def _call_rate(records: Sequence[Record], *, whole: bool) -> Rate:
    """Return the rate of one call; a batch shares its rounds, and the longest text's seconds are the call's."""
    if whole:
        return Rate(_sum(records, "completion_tokens"), records[0].seconds)
    after_first = sum(r.stats["tokens_per_second"] * r.stats["decode_seconds"] for r in records)
    return Rate(round(after_first), max(record.stats["decode_seconds"] for record in records))


def _num_equal(records: Sequence[Record]) -> int | None:
    if any(record.equal_to_plain is None for record in records):
        return None
    return sum(all(record.equal_to_plain for record in part) for part in _grouped(records, "task"))


def _sum(records: Iterable[Record], name: str) -> float:
    return float(sum(record.stats[name] for record in records))


def _phase_seconds(records: Sequence[Record]) -> dict[str, float]:
    return {phase: sum(record.stats["phase_seconds"][phase] for record in records) for phase in PHASES}


def _overhead(records: Sequence[Record], *, draft_is_pass: bool) -> float | None:
    seconds = _sum(records, "decode_seconds")
    phases = _phase_seconds(records)
    return 1.0 - (phases["score"] + phases["draft"] * draft_is_pass) / seconds if seconds > 0 else None


def _phase_shares(records: Sequence[Record]) -> dict[str, float]:
    seconds = _phase_seconds(records)
    # in a batch seconds are shared: time outside the rounds is measurable only for single prompts
    outside = sum(r.seconds - r.stats["prefill_seconds"] - r.stats["decode_seconds"] for r in records)
    alone = len({(record.group, record.repeat) for record in records}) == len(records)
    seconds["outside"] = max(0.0, outside) if alone else 0.0
    whole = sum(seconds.values()) or 1.0
    return {phase: value / whole for phase, value in seconds.items()}
