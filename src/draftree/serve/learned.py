"""Counts of what drafters learned from verified texts, as metrics and for the status; no texts, no owners."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from draftree.async_llm import AsyncLLM
from draftree.drafters.learning.store import LearnedStats, LearningStore

__all__ = ["learned_status", "learning_metrics"]

LABELS = ("model", "learner")


def learned_status(store: LearningStore | None) -> list[dict[str, Any]]:
    """Return the statistics of every learner of a model; empty without learning."""
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
