"""With all planners, batches and lengths the text equals plain decoding's."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from draftree import LLM, SamplingParams
from draftree.core.types import RoundRecord
from draftree.loading.load import load_model
from draftree.loading.transformers_model import wrap_model
from draftree.planners import PLANNERS
from families import drafter_folder, fresh, peer, prompts, target, transformers_greedy
from paced import Cost, compute_bound, memory_bound, paced_llm, steady

PROMPTS = prompts(3, 30, 1, 11)
NUM_TOKENS = 15
SHORT_CONTEXT = 40
PLANS = {
    "additive": ["additive", "additive,start=3"],
    "adaptive": ["adaptive", "adaptive,nodes=3"],
    "fixed": ["fixed", "fixed:0", "fixed:1", "fixed:3"],
    "heuristic": ["heuristic", "heuristic,start=1"],
    "threshold": ["threshold", "threshold:0.9", "threshold:0,k=2"],
}
"""Specs of every planner, besides its bare name."""


def sampling(temperature: float, **more: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": NUM_TOKENS, "temperature": temperature, "seed": 21} | more))


@functools.cache
def plain(temperature: float) -> list[tuple[int, ...]]:
    return [done.token_ids for done in LLM(target("llama"), "none").generate(PROMPTS, sampling(temperature))]


def planner_specs() -> list[str]:
    return [spec for name in PLANNERS.names() for spec in PLANS.get(name, [name])]


@pytest.mark.essential
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft", ["ngram,min=1", "model:{}", "model:{},tree=2-2-1"])
@pytest.mark.parametrize("plan", planner_specs())
def test_no_planner_changes_the_text(plan: str, draft: str, temperature: float, drafter: Path) -> None:
    done = LLM(target("llama"), draft.format(drafter), plan=plan).generate(PROMPTS, sampling(temperature))
    assert [d.token_ids for d in done] == plain(temperature)
    if plan == "fixed:0":
        assert sum(d.stats.draft_tokens for d in done) == 0


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("draft", ["none", "ngram,min=1", "suffix,floor=0", "model:{},tree=best-6"])
def test_places_in_the_batch_change_nothing(size: int, draft: str, drafter: Path) -> None:
    llm = LLM(target("llama"), draft.format(drafter), plan=steady(draft), max_batch_size=size)
    forward = llm.generate(PROMPTS, sampling(1.0))
    backward = llm.generate(PROMPTS[::-1], sampling(1.0))
    assert [d.token_ids for d in forward] == [d.token_ids for d in backward[::-1]] == plain(1.0)


@pytest.mark.parametrize("draft", ["ngram,min=1", "suffix+model:{}", "model:{}", "model:{},tree=best-6"])
def test_n_texts_are_the_same_with_drafts(draft: str, drafter: Path) -> None:
    params = sampling(1.0, n=3)
    plainly = LLM(target("llama"), "none").generate(PROMPTS[:2], params)
    done = LLM(target("llama"), draft.format(drafter), plan="fixed").generate(PROMPTS[:2], params)
    assert [(d.index, d.seed, d.token_ids) for d in done] == [(p.index, p.seed, p.token_ids) for p in plainly]
    assert len({d.token_ids for d in done}) == 6


@pytest.mark.parametrize(
    ("draft", "temperatures"),
    [
        ("model:{},k=4", (0.0, 1.0)),
        ("model:{},tree=2-1-2-1", (0.0, 1.0)),
        ("ngram,min=1,k=3+model:{},tree=1-2-1-1", (0.0, 1.0)),
        ("model:{},tree=iid-1-1-2-1", (0.0,)),
        ("model:{},tree=wor-1-3-1-1", (0.0,)),
    ],
)
def test_a_drafter_that_is_the_target_is_always_right(
    draft: str, temperatures: tuple[float, ...], models: Path
) -> None:
    """Any slip in what the small model's slots hold would show here, where equal texts cannot show it."""
    llm = LLM(target("llama"), draft.format(drafter_folder("llama", models, distance=0.0)), plan="fixed")
    for temperature in temperatures:
        done = llm.generate(PROMPTS, sampling(temperature))
        assert [d.token_ids for d in done] == plain(temperature)
        assert all((d.stats.rounds, d.stats.accepted_tokens) == (3, 12) for d in done)


def test_the_best_nodes_hold_the_pick_if_the_drafter_is_the_target(models: Path) -> None:
    folder = drafter_folder("llama", models, distance=0.0)
    llm = LLM(target("llama"), f"model:{folder},tree=best-12,k=4", plan="fixed")
    for temperature in (0.0, 1.0):
        for done in llm.generate(PROMPTS, sampling(temperature)):
            # its first child is the pick; the depth of the best twelve varies. The last round may have no room
            assert done.stats.accepted_by_depth[0] >= done.stats.rounds - 1


@functools.cache
def long_context() -> Any:
    return fresh("llama", max_position_embeddings=1400)


@pytest.mark.parametrize("length", [511, 512, 513, 1024, 1025, 1300])
def test_long_prompts_are_read_in_chunks(length: int, models: Path) -> None:
    (prompt,) = prompts(length)
    short = prompts(7)[0]
    params = sampling(0.0, max_tokens=10)
    drafter = drafter_folder("llama", models, max_position_embeddings=1400)
    model = wrap_model(long_context())
    done = LLM(model, f"model:{drafter},k=3").generate([prompt, short], params)
    assert list(done[0].token_ids) == transformers_greedy(fresh("llama", max_position_embeddings=1400), prompt, 10)
    assert done[1].token_ids == LLM(model, "none").generate([short], params)[0].token_ids
    sampled = [LLM(model, draft).generate([prompt, short], sampling(1.0, max_tokens=10)) for draft in (None, "ngram")]
    assert [d.token_ids for d in sampled[0]] == [d.token_ids for d in sampled[1]]


@pytest.mark.parametrize("draft", [None, "ngram,min=1", "model:{},tree=best-6"])
@pytest.mark.parametrize("free", [1, 2, 5])
def test_a_prompt_that_nearly_fills_the_context(free: int, draft: str | None, drafter: Path) -> None:
    model = wrap_model(fresh("llama", max_position_embeddings=SHORT_CONTEXT))
    (prompt,) = prompts(SHORT_CONTEXT - free)
    (done,) = LLM(model, draft and draft.format(drafter)).generate(prompt, sampling(0.0, max_tokens=None))
    assert list(done.token_ids) == transformers_greedy(peer("llama"), prompt, free)
    assert done.finish_reason == "length"


def test_packed_weights_write_the_same_texts(drafter: Path, models: Path) -> None:
    packed = load_model(drafter_folder("llama", models, distance=0.0), dtype="float32")
    for temperature in (0.0, 1.0):
        for draft in (None, "ngram,min=1", f"model:{drafter}"):
            done = LLM(packed, draft).generate(PROMPTS, sampling(temperature))
            assert [d.token_ids for d in done] == plain(temperature)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "draft", ["ngram,min=1", "model:{},k=4", "model:{},tree=best-8", "ngram,min=1+model:{},tree=2-2-1"]
)
def test_the_default_plan_drafts_and_prunes_where_drafts_pay(draft: str, temperature: float, drafter: Path) -> None:
    records: list[RoundRecord] = []
    spec = draft.format(drafter)
    done = paced_llm(target("llama"), spec, on_round=records.append).generate(PROMPTS, sampling(temperature))
    assert [d.token_ids for d in done] == plain(temperature)
    rows = [row for record in records for row in record.sequences]
    assert sum(row.num_drafted for row in rows) > 0
    if "tree" in draft:
        assert any(len(row.tree) < len(row.drafted) for row in rows), "no tree was cut"


@pytest.mark.parametrize("cost", [memory_bound, compute_bound])
@pytest.mark.parametrize("family", ["gemma2", "gpt2", "deepseek_v3", "qwen3_moe"])
def test_the_default_plan_keeps_texts_of_families(family: str, cost: Cost, models: Path) -> None:
    spec = f"ngram,min=1+model:{drafter_folder(family, models)},tree=2-2"
    wanted = LLM(target(family), "none").generate(PROMPTS, sampling(1.0))
    done = paced_llm(target(family), spec, cost=cost).generate(PROMPTS, sampling(1.0))
    assert [d.token_ids for d in done] == [w.token_ids for w in wanted]


def test_by_a_simulated_clock_rounds_repeat_themselves(drafter: Path) -> None:
    spec = f"model:{drafter},tree=best-8"
    counts = []
    for _ in range(2):
        done = paced_llm(target("llama"), spec).generate(PROMPTS, sampling(0.0))
        counts.append([(d.stats.rounds, d.stats.draft_tokens, d.stats.accepted_tokens) for d in done])
    assert counts[0] == counts[1]
