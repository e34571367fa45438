"""Prometheus metrics: ours with the prefix `draftree_`, and those of vLLM that benchmark tools and dashboards read.

Rounds and requests are counted as plain numbers, which are cheap to update and read when metrics are collected. Each
object has one writer: a `ModelMeter` its engine's thread, a `RequestMeter` the event loop. A registry belongs to one
server.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter
from typing import Any, final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from draftree.async_llm import AsyncLLM
from draftree.core.host import Clock
from draftree.core.types import RoundRecord, SequenceRecord
from draftree.serve.gate import Gate
from draftree.serve.pool import ModelPool
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
        for phase in PHASES:
            self.phase_seconds[phase] += getattr(record, f"{phase}_seconds")
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

    def rates(self) -> dict[str, float | None]:
        """Return rates of the last seconds; None where nothing was written or drafted."""
        now = self._clock()
        recent = [row for row in self._recent.copy() if now - row[0] <= WINDOW_SECONDS]
        written, rows, drafted, accepted = (sum(row[place] for row in recent) for place in (1, 2, 3, 4))
        return {
            "tokens_per_second": written / WINDOW_SECONDS,
            "acceptance_length": written / rows if rows else None,
            "acceptance_rate": accepted / drafted if drafted else None,
        }


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


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Labels = tuple[str, ...]
VLLM_ENGINE = "0"
VLLM_LABELS = ("model_name", "engine")
DRAFT_LABELS = ("model", "draft")


@dataclass(frozen=True, slots=True)
class ModelSource:
    name: str
    llm: AsyncLLM
    meter: ModelMeter

    @property
    def num_full_slots(self) -> int:
        engine = self.llm.llm.engine
        return engine.num_slots(engine.longest)


@final
@dataclass(eq=False)
class Metrics:
    """The metrics of one server, and a collector of its own registry."""

    pool: ModelPool
    meters: Mapping[str, ModelMeter]
    requests: RequestMeter
    gate: Gate = field(kw_only=True)
    is_ready: Callable[[], bool] = field(kw_only=True)

    def __post_init__(self) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        models = tuple(ModelSource(model.name, model.llm, self.meters[model.name]) for model in self.pool)
        yield from self._server_metrics()
        yield from _model_metrics(models)
        yield from _speculation_metrics(models)
        yield from _beam_metrics(models)
        yield from _learning_metrics(models)
        yield from self._request_metrics()
        yield from self._vllm_metrics()

    def _server_metrics(self) -> Iterator[Metric]:
        gate = self.gate
        yield _family(GAUGE, "draftree_info", "Version.", ("version",), {(__version__,): 1})
        for name, text, value in (
            ("ready", "1 while requests are accepted.", float(self.is_ready())),
            ("requests_running", "Requests that run.", gate.num_running),
            ("places_taken", "Places of running requests.", gate.num_places),
            ("requests_waiting", "Requests in the queue.", gate.num_waiting),
        ):
            yield _family(GAUGE, f"draftree_{name}", text, (), {(): value})

    def _request_metrics(self) -> Iterator[Metric]:
        requests = self.requests
        by_status = {(endpoint, model, str(code)): n for (endpoint, model, code), n in requests.by_status.items()}
        names = ("endpoint", "model", "status")
        yield _family(COUNTER, "draftree_requests", "Requests by endpoint, model and status.", names, by_status)
        gone = {(): requests.num_disconnected}
        yield _family(COUNTER, "draftree_disconnected_requests", "Requests whose client left early.", (), gone)
        queue = {(): requests.queue_seconds}
        yield _histogram("draftree_queue_seconds", "Time of a request in the queue.", (), queue)
        for name, text, histograms in (
            ("time_to_first_token", "Arrival to the first token.", requests.first_token),
            ("request", "Arrival to the end of the response.", requests.duration),
        ):
            yield _histogram(f"draftree_{name}_seconds", text, ("model", "draft"), histograms)

    def _vllm_metrics(self) -> Iterator[Metric]:
        requests = self.requests
        for name, text, by_draft in (
            ("vllm:time_to_first_token_seconds", "Arrival to the first token.", requests.first_token),
            ("vllm:e2e_request_latency_seconds", "Arrival to the end of the response.", requests.duration),
        ):
            by_model = {
                (model, VLLM_ENGINE): merged(h for labels, h in by_draft.items() if labels[0] == model)
                for model in sorted({model for model, _ in by_draft})
            }
            yield _histogram(name, text, VLLM_LABELS, by_model)
        reasons = {(model, VLLM_ENGINE, reason): n for (model, reason), n in requests.finish_reasons.items()}
        success = "Finished texts by reason."
        yield _family(COUNTER, "vllm:request_success", success, (*VLLM_LABELS, "finished_reason"), reasons)


GAUGE = GaugeMetricFamily
COUNTER = CounterMetricFamily
MODEL = (
    (GAUGE, "draftree_sequences_running vllm:num_requests_running", "Sequences in the batch.", "llm.num_running"),
    (GAUGE, "draftree_sequences_waiting vllm:num_requests_waiting", "Sequences before it.", "llm.num_waiting"),
    (GAUGE, "draftree_slots_open", "Open slots, those of cached prefixes included.", "llm.llm.model.num_open"),
    (GAUGE, "draftree_slots_of_full_context", "Slots of full length that memory has room for.", "num_full_slots"),
    (
        COUNTER,
        "draftree_prompt_tokens vllm:prompt_tokens vllm:prefix_cache_queries",
        "Tokens of prompts.",
        "llm.prefix_stats.prompt_tokens",
    ),
    (
        COUNTER,
        "draftree_prefix_cache_hit_tokens vllm:prefix_cache_hits",
        "Prompt tokens from the prefix cache.",
        "llm.prefix_stats.cached_tokens",
    ),
    (GAUGE, "draftree_prefix_cache_entries", "Cached prefixes.", "llm.prefix_stats.kept"),
    (COUNTER, "draftree_rounds", "Rounds of the engine.", "meter.num_rounds"),
)
"""Kind, names, text and attribute of metrics of a `ModelSource`."""
SPECULATION = (
    ("generated_tokens", "generation_tokens", "Written tokens."),
    ("drafts", "spec_decode_num_drafts", "Drafts of sequences."),
    ("draft_tokens", "spec_decode_num_draft_tokens", "Drafted tokens."),
    ("accepted_tokens", "spec_decode_num_accepted_tokens", "Accepted drafted tokens."),
)
"""Attribute of `DraftTotals` and our name, vLLM's name, and text."""
BEAMS = (
    (GAUGE, "searches_running", "Beam searches that have slots.", "running"),
    (GAUGE, "searches_waiting", "Beam searches in the queue.", "waiting"),
    (COUNTER, "searches", "Beam searches that ended with a result.", "finished"),
    (COUNTER, "steps", "Passes of beam searches.", "steps"),
    (COUNTER, "rows", "Tokens computed in passes of beam searches.", "rows"),
)
"""Kind, name, text and attribute of `BeamCounts`."""
LEARNING = (
    (COUNTER, "learned_texts", "Texts that were learned.", "texts"),
    (COUNTER, "learned_tokens", "Verified tokens that were learned.", "tokens"),
    (COUNTER, "learning_seconds", "Time of learning on the engine's thread.", "seconds"),
    (GAUGE, "learned_size", "Tokens in tables, or learned numbers of a head.", "size"),
    (GAUGE, "learned_bytes", "Memory of what was learned.", "num_bytes"),
    (GAUGE, "learned_owners", "Owners with a state of their own.", "scopes"),
    (GAUGE, "learned_active", "Owners whose drafts use what was learned.", "active"),
)
"""Kind, name, text and attribute of `LearnedStats`."""


def _model_metrics(models: tuple[ModelSource, ...]) -> Iterator[Metric]:
    for kind, names, text, attribute in MODEL:
        value = attrgetter(attribute)
        for name in names.split():
            labels, more = (VLLM_LABELS, (VLLM_ENGINE,)) if name.startswith("vllm:") else (("model",), ())
            yield _family(kind, name, text, labels, {(source.name, *more): value(source) for source in models})
    phases = {(s.name, phase): seconds for s in models for phase, seconds in s.meter.phase_seconds.items()}
    yield _family(COUNTER, "draftree_round_seconds", "Seconds of rounds by phase.", ("model", "phase"), phases)


def _speculation_metrics(models: tuple[ModelSource, ...]) -> Iterator[Metric]:
    """Yield the metrics by model and drafter, and those of vLLM by model."""
    each: dict[tuple[str, str], DraftTotals] = {
        (s.name, draft): totals for s in models for draft, totals in tuple(s.meter.by_draft.items())
    }
    sums: dict[tuple[str, str], list[DraftTotals]] = {(s.name, VLLM_ENGINE): [] for s in models}
    for (model, _), totals in each.items():
        sums[model, VLLM_ENGINE].append(totals)
    for name, vllm_name, text in SPECULATION:
        count = attrgetter(name)
        values = {labels: count(totals) for labels, totals in each.items()}
        yield _family(COUNTER, f"draftree_{name}", text, DRAFT_LABELS, values)
        values = {labels: sum(map(count, group)) for labels, group in sums.items()}
        yield _family(COUNTER, f"vllm:{vllm_name}", text, VLLM_LABELS, values)
    positions: Counter[Labels] = Counter()
    vllm_positions: Counter[Labels] = Counter()
    for (model, draft), totals in each.items():
        for position, accepted in enumerate(totals.accepted_per_position()):
            positions[model, draft, str(position)] = accepted
            vllm_positions[model, VLLM_ENGINE, str(position)] += accepted
    text = "Accepted drafted tokens by position in the draft, from 0."
    name = "draftree_accepted_tokens_per_position"
    yield _family(COUNTER, name, text, (*DRAFT_LABELS, "position"), positions)
    name = "vllm:spec_decode_num_accepted_tokens_per_pos"
    yield _family(COUNTER, name, text, (*VLLM_LABELS, "position"), vllm_positions)
    text = "Seconds between two tokens."
    gaps = {labels: totals.token_gaps for labels, totals in each.items()}
    yield _histogram("draftree_inter_token_seconds", text, DRAFT_LABELS, gaps)
    gaps = {labels: merged(totals.token_gaps for totals in group) for labels, group in sums.items()}
    yield _histogram("vllm:inter_token_latency_seconds", text, VLLM_LABELS, gaps)


def _beam_metrics(models: tuple[ModelSource, ...]) -> Iterator[Metric]:
    for kind, name, text, attribute in BEAMS:
        values = {(source.name,): getattr(source.llm.beam_counts, attribute) for source in models}
        yield _family(kind, f"draftree_beam_{name}", text, ("model",), values)


def _learning_metrics(models: tuple[ModelSource, ...]) -> Iterator[Metric]:
    """Yield the metrics of learning, by model and learner (`suffix` or `head`); none without learning."""
    labels = ("model", "learner")
    stores = [(source.name, source.llm.llm.learned) for source in models]
    learners = {(name, stats.name): stats for name, store in stores if store for stats in store.stats}
    if not learners:
        return
    for kind, name, text, attribute in LEARNING:
        values = {key: getattr(stats, attribute) for key, stats in learners.items()}
        yield _family(kind, f"draftree_{name}", text, labels, values)
    shares = {
        (*key, head): share
        for key, stats in learners.items()
        for head, share in (("base", stats.base_acceptance), ("learned", stats.learned_acceptance))
        if share is not None
    }
    text = "Running share of first draft tokens that the target picks, by whether the head is corrected."
    yield _family(GAUGE, "draftree_learned_acceptance", text, (*labels, "head"), shares)


def merged(histograms: Iterable[Histogram]) -> Histogram:
    first, *others = histograms
    total = Histogram(first.bounds)
    total.counts = [
        sum(counts) for counts in zip(first.counts, *(histogram.counts for histogram in others), strict=True)
    ]
    total.total = first.total + sum(histogram.total for histogram in others)
    return total


def _family(kind: Any, name: str, text: str, labels: Labels, values: Mapping[Any, float]) -> Metric:
    family: Metric = kind(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)  # type: ignore[attr-defined]
    return family


def _histogram(name: str, text: str, labels: Labels, values: Mapping[Any, Histogram]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=labels)
    for key, histogram in values.items():
        bounds = [*map(str, histogram.bounds), "+Inf"]
        family.add_metric(key, list(zip(bounds, accumulate(histogram.counts), strict=True)), sum_value=histogram.total)
    return family
