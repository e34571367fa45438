"""Prometheus metrics: ours with the prefix `draftree_`, and those of vLLM that benchmark tools and dashboards read.

Rounds and requests are counted as plain numbers, which are cheap to update and read when metrics are collected. Each
object has one writer: a `ModelMeter` its engine's thread, a `RequestMeter` the event loop. A registry belongs to one
server.
"""

from __future__ import annotations

import dataclasses
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from draftree.async_llm import AsyncLLM
from draftree.beam.background import BeamCounts
from draftree.core.host import Clock
from draftree.core.types import RoundRecord, SequenceRecord
from draftree.drafters.learning.store import LearnedStats, LearningStore
from draftree.serve.gate import Gate
from draftree.serve.records import RequestRecord
from draftree.version import __version__

WINDOW_SECONDS = 5.0
WINDOW_ROUNDS = 1024
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
PHASES = ("plan", "draft", "score", "verify", "commit")
OTHER = "other"


@final
class Histogram:
    """Counts of values per bucket of increasing upper bounds; one more bucket has no bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count


@dataclass(slots=True)
class DraftTotals:
    """Counts of one model and one drafter; `accepted` counts sequences' rounds with a draft by accepted tokens."""

    drafts: int = 0
    draft_tokens: int = 0
    generated_tokens: int = 0
    accepted: list[int] = field(default_factory=lambda: [0, 0])
    token_gaps: Histogram = field(default_factory=lambda: Histogram(TOKEN_SECONDS))

    @property
    def accepted_tokens(self) -> int:
        return sum(count * rounds for count, rounds in enumerate(self.accepted))

    def accepted_per_position(self) -> list[int]:
        """Return how often the drafted token at position 0, 1, … was accepted."""
        return [sum(self.accepted[position + 1 :]) for position in range(len(self.accepted) - 1)]

    def count(self, row: SequenceRecord) -> None:
        self.generated_tokens += row.num_written
        if row.num_drafted:
            self.drafts += 1
            self.draft_tokens += row.num_drafted
            while len(self.accepted) <= row.num_accepted:
                self.accepted.append(0)
            self.accepted[row.num_accepted] += 1


@dataclass(slots=True)
class _Active:
    """A request in the engine.

    `times` has the last two rounds by index, the earlier None at first; prompts of one request share their indices.
    """

    draft: str
    times: dict[int, tuple[float | None, float]] = field(default_factory=dict)

    def gap(self, index: int, now: float) -> float | None:
        """Note a round, and return the seconds since the round before."""
        before, last = self.times.get(index, (None, now))
        if last != now:
            before = last
        self.times[index] = before, now
        return None if before is None else now - before


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of the last seconds; None where nothing was written or drafted."""

    tokens_per_second: float
    acceptance_length: float | None
    acceptance_rate: float | None


@final
class ModelMeter:
    def __init__(self, default_draft: str, *, clock: Clock = time.perf_counter) -> None:
        self.num_rounds = 0
        self.phase_seconds = dict.fromkeys(PHASES, 0.0)
        self.by_draft: dict[str, DraftTotals] = {default_draft: DraftTotals()}
        self._default_draft = default_draft
        self._clock = clock
        self._active: dict[str, _Active] = {}
        self._recent: deque[tuple[float, int, int, int, int]] = deque(maxlen=WINDOW_ROUNDS)

    def register(self, request_id: str, draft: str) -> None:
        self._active[request_id] = _Active(draft)

    def release(self, request_id: str) -> None:
        self._active.pop(request_id, None)

    def on_round(self, record: RoundRecord) -> None:
        """Count a round; for the engine's thread."""
        now = self._clock()
        self.num_rounds += 1
        seconds = self.phase_seconds
        seconds["plan"] += record.plan_seconds
        seconds["draft"] += record.draft_seconds
        seconds["score"] += record.score_seconds
        seconds["verify"] += record.verify_seconds
        seconds["commit"] += record.commit_seconds
        written = drafted = accepted = 0
        for row in record.sequences:
            self._count(row, now)
            written += row.num_written
            drafted += row.num_drafted
            accepted += row.num_accepted
        self._recent.append((now, written, len(record.sequences), drafted, accepted))

    def _count(self, row: SequenceRecord, now: float) -> None:
        active = self._active.get(row.request_id)
        draft = self._default_draft if active is None else active.draft
        totals = self.by_draft.get(draft)
        if totals is None:
            totals = self.by_draft[draft] = DraftTotals()
        totals.count(row)
        if active is not None and row.num_written:
            seconds = active.gap(row.index, now)
            if seconds is not None:
                totals.token_gaps.observe(seconds / row.num_written, row.num_written)

    def rates(self) -> Rates:
        now = self._clock()
        recent = [row for row in self._recent.copy() if now - row[0] <= WINDOW_SECONDS]
        written, rows, drafted, accepted = (sum(row[place] for row in recent) for place in (1, 2, 3, 4))
        return Rates(
            tokens_per_second=written / WINDOW_SECONDS,
            acceptance_length=written / rows if rows else None,
            acceptance_rate=accepted / drafted if drafted else None,
        )


@final
class RequestMeter:
    def __init__(self) -> None:
        self.by_status: Counter[tuple[str, str, int]] = Counter()
        self.finish_reasons: Counter[tuple[str, str]] = Counter()
        self.num_disconnected = 0
        self.queue_seconds = Histogram()
        self.first_token: dict[tuple[str, str], Histogram] = {}
        self.duration: dict[tuple[str, str], Histogram] = {}

    def observe(self, record: RequestRecord) -> None:
        self.by_status[record.endpoint or OTHER, record.model or OTHER, record.status or 500] += 1
        self.num_disconnected += record.is_disconnected
        if record.queue_seconds is not None:
            self.queue_seconds.observe(record.queue_seconds)
        if record.model is None or record.draft is None:
            return
        labels = (record.model, record.draft)
        for reason in record.finish_reasons:
            self.finish_reasons[record.model, reason] += 1
        if record.first_token_seconds is not None:
            self.first_token.setdefault(labels, Histogram()).observe(record.first_token_seconds)
            self.duration.setdefault(labels, Histogram()).observe(record.seconds)


def beam_metrics(models: Iterable[tuple[str, AsyncLLM]]) -> Iterator[Metric]:
    found = [((name,), llm.beam_counts) for name, llm in models]

    def family(kind: Any, name: str, text: str, value: Callable[[BeamCounts], int]) -> Metric:
        made: Metric = kind(name, text, labels=("model",))
        for labels, counts in found:
            made.add_metric(labels, value(counts))  # type: ignore[attr-defined]
        return made

    counter, gauge = CounterMetricFamily, GaugeMetricFamily
    yield family(gauge, "draftree_beam_searches_running", "Beam searches that have slots.", lambda c: c.running)
    yield family(gauge, "draftree_beam_searches_waiting", "Beam searches in the queue.", lambda c: c.waiting)
    yield family(counter, "draftree_beam_searches", "Beam searches that ended with a result.", lambda c: c.finished)
    yield family(counter, "draftree_beam_steps", "Passes of beam searches.", lambda c: c.steps)
    yield family(counter, "draftree_beam_rows", "Tokens computed in passes of beam searches.", lambda c: c.rows)


LABELS = ("model", "learner")


def learned_status(store: LearningStore | None) -> list[dict[str, Any]]:
    return [] if store is None else [dataclasses.asdict(stats) for stats in store.stats]


def learning_metrics(models: Iterable[tuple[str, AsyncLLM]]) -> Iterator[Metric]:
    """Yield the metrics of learning, by model and learner (`suffix` or `head`); none without learning."""
    found = [((name, stats.name), stats) for name, llm in models if llm.llm.learned for stats in llm.llm.learned.stats]
    if not found:
        return

    def family(kind: Any, name: str, text: str, value: Callable[[LearnedStats], float]) -> Metric:
        made: Metric = kind(name, text, labels=LABELS)
        for labels, stats in found:
            made.add_metric(labels, value(stats))  # type: ignore[attr-defined]
        return made

    counter, gauge = CounterMetricFamily, GaugeMetricFamily
    yield family(counter, "draftree_learned_texts", "Texts that were learned.", lambda s: s.texts)
    yield family(counter, "draftree_learned_tokens", "Verified tokens that were learned.", lambda s: s.tokens)
    yield family(counter, "draftree_learning_seconds", "Time of learning on the engine's thread.", lambda s: s.seconds)
    yield family(gauge, "draftree_learned_size", "Tokens in tables, or learned numbers of a head.", lambda s: s.size)
    yield family(gauge, "draftree_learned_bytes", "Memory of what was learned.", lambda s: s.num_bytes)
    yield family(gauge, "draftree_learned_owners", "Owners with a state of their own.", lambda s: s.scopes)
    yield family(gauge, "draftree_learned_active", "Owners whose drafts use what was learned.", lambda s: s.active)
    shares = GaugeMetricFamily(
        "draftree_learned_acceptance",
        "Running share of first draft tokens that the target picks, by whether the head is corrected.",
        labels=(*LABELS, "head"),
    )
    for labels, stats in found:
        for head, share in (("base", stats.base_acceptance), ("learned", stats.learned_acceptance)):
            if share is not None:
                shares.add_metric((*labels, head), share)
    yield shares


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Labels = tuple[str, ...]
VLLM_ENGINE = "0"


@dataclass(frozen=True, slots=True)
class ModelSource:
    name: str
    llm: AsyncLLM
    meter: ModelMeter


@final
class Metrics:
    """The metrics of one server, and a collector of its own registry."""

    def __init__(
        self,
        models: Callable[[], Iterable[ModelSource]],
        requests: RequestMeter,
        *,
        gate: Gate,
        is_ready: Callable[[], bool],
    ) -> None:
        self._models = models
        self._requests = requests
        self._gate = gate
        self._is_ready = is_ready
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        models = tuple(self._models())
        yield from self._server_metrics()
        yield from _model_metrics(models)
        yield from _speculation_metrics(models)
        yield from beam_metrics((source.name, source.llm) for source in models)
        yield from learning_metrics((source.name, source.llm) for source in models)
        yield from self._request_metrics()
        yield from self._vllm_metrics(models)

    def _server_metrics(self) -> Iterator[Metric]:
        yield _gauge("draftree_info", "Version.", ("version",), {(__version__,): 1})
        yield _gauge("draftree_ready", "1 while requests are accepted.", (), {(): float(self._is_ready())})
        yield _gauge("draftree_requests_running", "Requests that run.", (), {(): self._gate.num_running})
        yield _gauge("draftree_places_taken", "Places of running requests.", (), {(): self._gate.num_places})
        yield _gauge("draftree_requests_waiting", "Requests in the queue.", (), {(): self._gate.num_waiting})

    def _request_metrics(self) -> Iterator[Metric]:
        requests = self._requests
        by_status = {(endpoint, model, str(code)): n for (endpoint, model, code), n in requests.by_status.items()}
        names = ("endpoint", "model", "status")
        yield _counter("draftree_requests", "Requests by endpoint, model and status.", names, by_status)
        gone = {(): requests.num_disconnected}
        yield _counter("draftree_disconnected_requests", "Requests whose client left early.", (), gone)
        labels = ("model", "draft")
        queue = {(): requests.queue_seconds}
        yield _histogram("draftree_queue_seconds", "Time of a request in the queue.", (), queue)
        first, duration = requests.first_token, requests.duration
        yield _histogram("draftree_time_to_first_token_seconds", "Arrival to the first token.", labels, first)
        yield _histogram("draftree_request_seconds", "Arrival to the end of the response.", labels, duration)

    def _vllm_metrics(self, models: tuple[ModelSource, ...]) -> Iterator[Metric]:
        names = ("model_name", "engine")
        yield from _vllm_engine(models, names)
        yield from _vllm_speculation(models, names)
        requests = self._requests
        for name, text, found in (
            ("vllm:time_to_first_token_seconds", "Arrival to the first token.", requests.first_token),
            ("vllm:e2e_request_latency_seconds", "Arrival to the end of the response.", requests.duration),
        ):
            yield _histogram(name, text, names, _by_model(found))
        reasons = {(model, VLLM_ENGINE, reason): count for (model, reason), count in requests.finish_reasons.items()}
        success = "Finished texts by reason."
        yield _counter("vllm:request_success", success, (*names, "finished_reason"), reasons)


def _model_metrics(models: tuple[ModelSource, ...]) -> Iterator[Metric]:
    label = ("model",)

    def each(value: Callable[[ModelSource], float]) -> dict[Labels, float]:
        return {(source.name,): value(source) for source in models}

    yield _gauge("draftree_sequences_running", "Sequences in the batch.", label, each(lambda s: s.llm.num_running))
    yield _gauge("draftree_sequences_waiting", "Sequences before it.", label, each(lambda s: s.llm.num_waiting))
    slots = each(lambda s: s.llm.llm.model.num_open)
    yield _gauge("draftree_slots_open", "Open slots, those of cached prefixes included.", label, slots)
    room = each(lambda s: s.llm.llm.engine.num_slots(s.llm.llm.engine.longest))
    yield _gauge("draftree_slots_of_full_context", "Slots of full length that memory has room for.", label, room)
    stats = {source.name: source.llm.prefix_stats for source in models}
    prompts = {(name,): found.prompt_tokens for name, found in stats.items()}
    yield _counter("draftree_prompt_tokens", "Tokens of prompts.", label, prompts)
    cached = {(name,): found.cached_tokens for name, found in stats.items()}
    yield _counter("draftree_prefix_cache_hit_tokens", "Prompt tokens from the prefix cache.", label, cached)
    kept = {(name,): found.kept for name, found in stats.items()}
    yield _gauge("draftree_prefix_cache_entries", "Cached prefixes.", label, kept)
    rounds = each(lambda s: s.meter.num_rounds)
    yield _counter("draftree_rounds", "Rounds of the engine.", label, rounds)
    phases = {(s.name, phase): seconds for s in models for phase, seconds in s.meter.phase_seconds.items()}
    yield _counter("draftree_round_seconds", "Seconds of rounds by phase.", ("model", "phase"), phases)


def _speculation_metrics(models: tuple[ModelSource, ...]) -> Iterator[Metric]:
    labels = ("model", "draft")
    totals = {(s.name, draft): found for s in models for draft, found in tuple(s.meter.by_draft.items())}

    def each(value: Callable[[DraftTotals], float]) -> dict[Labels, float]:
        return {names: value(found) for names, found in totals.items()}

    yield _counter("draftree_generated_tokens", "Written tokens.", labels, each(lambda t: t.generated_tokens))
    yield _counter("draftree_drafts", "Drafts of sequences.", labels, each(lambda t: t.drafts))
    yield _counter("draftree_draft_tokens", "Drafted tokens.", labels, each(lambda t: t.draft_tokens))
    yield _counter("draftree_accepted_tokens", "Accepted drafted tokens.", labels, each(lambda t: t.accepted_tokens))
    positions = {
        (*names, str(position)): count
        for names, found in totals.items()
        for position, count in enumerate(found.accepted_per_position())
    }
    text = "Accepted drafted tokens by position in the draft, from 0."
    yield _counter("draftree_accepted_tokens_per_position", text, (*labels, "position"), positions)
    gaps = {names: found.token_gaps for names, found in totals.items()}
    yield _histogram("draftree_inter_token_seconds", "Seconds between two tokens.", labels, gaps)


def _vllm_engine(models: tuple[ModelSource, ...], names: Labels) -> Iterator[Metric]:
    def each(value: Callable[[ModelSource], float]) -> dict[Labels, float]:
        return {(source.name, VLLM_ENGINE): value(source) for source in models}

    yield _gauge("vllm:num_requests_running", "Sequences in the batch.", names, each(lambda s: s.llm.num_running))
    yield _gauge("vllm:num_requests_waiting", "Sequences before it.", names, each(lambda s: s.llm.num_waiting))
    prompts = each(lambda s: s.llm.prefix_stats.prompt_tokens)
    yield _counter("vllm:prompt_tokens", "Tokens of prompts.", names, prompts)
    yield _counter("vllm:prefix_cache_queries", "Tokens of prompts.", names, prompts)
    cached = each(lambda s: s.llm.prefix_stats.cached_tokens)
    yield _counter("vllm:prefix_cache_hits", "Prompt tokens from the prefix cache.", names, cached)


def _vllm_speculation(models: tuple[ModelSource, ...], names: Labels) -> Iterator[Metric]:
    totals = {(s.name, VLLM_ENGINE): tuple(s.meter.by_draft.values()) for s in models}

    def each(value: Callable[[DraftTotals], float]) -> dict[Labels, float]:
        return {labels: sum(map(value, found)) for labels, found in totals.items()}

    yield _counter("vllm:generation_tokens", "Written tokens.", names, each(lambda t: t.generated_tokens))
    yield _counter("vllm:spec_decode_num_drafts", "Drafts of sequences.", names, each(lambda t: t.drafts))
    drafted = each(lambda t: t.draft_tokens)
    yield _counter("vllm:spec_decode_num_draft_tokens", "Drafted tokens.", names, drafted)
    accepted = each(lambda t: t.accepted_tokens)
    yield _counter("vllm:spec_decode_num_accepted_tokens", "Accepted drafted tokens.", names, accepted)
    positions: dict[Labels, float] = {}
    for labels, found in totals.items():
        for one in found:
            for position, count in enumerate(one.accepted_per_position()):
                key = (*labels, str(position))
                positions[key] = positions.get(key, 0) + count
    text = "Accepted drafted tokens by position in the draft, from 0."
    yield _counter("vllm:spec_decode_num_accepted_tokens_per_pos", text, (*names, "position"), positions)
    gaps = {labels: merged([one.token_gaps for one in found]) for labels, found in totals.items()}
    yield _histogram("vllm:inter_token_latency_seconds", "Seconds between two tokens.", names, gaps)


def merged(histograms: Iterable[Histogram]) -> Histogram:
    first, *others = histograms
    total = Histogram(first.bounds)
    total.counts = [sum(counts) for counts in zip(first.counts, *(one.counts for one in others), strict=True)]
    total.total = first.total + sum(one.total for one in others)
    return total


def _by_model(found: Mapping[Any, Histogram]) -> dict[Labels, Histogram]:
    models = sorted({model for model, _ in found})
    return {(model, VLLM_ENGINE): merged(h for labels, h in found.items() if labels[0] == model) for model in models}


def _gauge(name: str, text: str, labels: Labels, values: Mapping[Any, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _counter(name: str, text: str, labels: Labels, values: Mapping[Any, float]) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _histogram(name: str, text: str, labels: Labels, values: Mapping[Any, Histogram]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=labels)
    for key, found in values.items():
        bounds = [*map(str, found.bounds), "+Inf"]
        family.add_metric(key, list(zip(bounds, accumulate(found.counts), strict=True)), sum_value=found.total)
    return family
