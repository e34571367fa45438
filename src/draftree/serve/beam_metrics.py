"""Beam searches as metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from draftree.async_beams import BeamCounts
from draftree.async_llm import AsyncLLM

__all__ = ["beam_metrics"]


def beam_metrics(models: Iterable[tuple[str, AsyncLLM]]) -> Iterator[Metric]:
    """Yield the metrics of beam searches by model."""
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
