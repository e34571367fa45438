"""A copying drafter merged with a sampling model: under ratio rules it adds acceptance, in any order."""

from __future__ import annotations

import functools

import pytest

from draftree import SamplingParams
from draftree.assembly import build_parts, choose_methods
from draftree.completion import CompletionStats, completion_of
from draftree.drafters.base import LoadedDraftModel
from draftree.engine.engine import Engine, Limits
from draftree.loading.load import LoadedModel
from draftree.models.table import TableLM, hashed, near
from draftree.requests import Requests

TABLE = hashed(16, seed=1, scale=3.0)
SMALL = near(TABLE, seed=2, distance=1.0)


@functools.cache
def written(draft: str, verify: str) -> tuple[CompletionStats, ...]:
    """Eight texts of 40 tokens, at temperature 1."""
    target = TableLM(TABLE, order=2)
    parts = build_parts(
        choose_methods(draft, verify, "fixed"),
        LoadedModel(target, None, (), "table"),
        None,
        dtype=target.dtype,
        device="cpu",
        load_draft=lambda name: LoadedDraftModel(TableLM(SMALL, order=2), None, name),
    )
    engine = Engine(parts, Limits(max_batch_size=8))
    requests = Requests(parts, None, eos_ids=(), longest=engine.longest)
    sequences = [
        sequence
        for seed in range(8)
        for sequence in requests.sequences([1, 2, seed], SamplingParams(max_tokens=40, temperature=1.0, seed=seed))
    ]
    engine.add(*sequences)
    while not engine.is_idle:
        engine.step()
    return tuple(completion_of(sequence, prompt_index=0).stats for sequence in sequences)


def accepted_per_round(draft: str, verify: str) -> float:
    done = written(draft, verify)
    return sum(one.accepted_tokens for one in done) / sum(one.rounds for one in done)


@pytest.mark.parametrize("verify", ["multistep", "recursive", "traversal"])
def test_the_order_of_the_spec_does_not_cost_acceptance(verify: str) -> None:
    alone = accepted_per_round("model:x,k=3", verify)
    merged = accepted_per_round("ngram,min=1+model:x,k=3", verify)
    assert merged == accepted_per_round("model:x,k=3+ngram,min=1", verify)
    assert merged >= alone


def test_statistics_name_both_drafters() -> None:
    totals: dict[str, int] = {}
    for one in written("ngram,min=1+model:x,k=3", "multistep"):
        for source, count in one.accepted_by_source.items():
            totals[source] = totals.get(source, 0) + count
    assert set(totals) == {"ngram,min=1", "model:x,k=3"}
