"""Prometheus metrics: ours with the prefix `draftree_`, and those of vLLM that benchmark tools and dashboards read.

A registry belongs to one server. Values are read from the meters when they are collected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from draftree.async_llm import AsyncLLM
from draftree.serve.beam_metrics import beam_metrics
from draftree.serve.gate import Gate
from draftree.serve.learned import learning_metrics
from draftree.serve.meters import DraftTotals, Histogram, ModelMeter, RequestMeter
from draftree.version import __version__

__all__ = ["CONTENT_TYPE", "Metrics", "ModelSource"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Labels = tuple[str, ...]
VLLM_ENGINE = "0"
"""The engine label of vLLM's metrics."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model whose numbers are collected."""

    name: str
    llm: AsyncLLM
    meter: ModelMeter


@final
class Metrics:
    """The metrics of one server, and a collector of its own registry.

    Args:
        models: returns the loaded models; none while they are loading.
        requests: counts of HTTP requests.
        gate: running and waiting requests.
        is_ready: whether new requests are accepted.
    """

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
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; called by the registry."""
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
    """Return the sum of histograms with equal bounds, at least one."""
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
