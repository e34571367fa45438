"""Trees of every shape, merged ones included, do not change the text under any rule."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from draftree import LLM, SamplingParams
from draftree.core.errors import ConfigurationError
from families import prompts, target
from paced import steady
from sequential import SequentialModel

RAGGED = prompts(3, 17, 9)
SHAPES = ("chain", "1-1-3-1-1", "2-2-1", "best-12", "iid-2-2-1", "wor-3-2")
DRAFTS = (
    *(f"model:{{}},tree={shape}" for shape in SHAPES),
    "lookahead,window=0",
    "lookahead,window=6,n=4",
    "ngram,min=1+lookahead,window=3,n=3",
)
PARTS = ("early-exit:1", "layer-skip,attention=0")
TEMPERATURES = (0.0, 1.0)


def writer(family: str, draft: str | None = None, **options: Any) -> LLM:
    return LLM(target(family), draft, plan=steady(draft), **options)


def params(temperature: float) -> SamplingParams:
    return SamplingParams(max_tokens=24, temperature=temperature, seed=11)


def ids(llm: LLM, temperature: float) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in llm.generate(RAGGED, params(temperature))]


@functools.cache
def plain(temperature: float) -> list[tuple[int, ...]]:
    return ids(writer("llama"), temperature)


@pytest.mark.essential
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("verify", ["coupled", "match"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_rules_that_walk_along_target_tokens_change_nothing(
    draft: str, verify: str, temperature: float, drafter: Path
) -> None:
    llm = writer("llama", draft.format(drafter), verify=verify)
    done = llm.generate(RAGGED, params(temperature))
    assert [c.token_ids for c in done] == plain(temperature)
    assert any(c.stats.accepted_tokens for c in done) or "model" not in draft, "a drafter that is never right"
    alone = [llm.generate(prompt, params(temperature))[0].token_ids for prompt in RAGGED]
    assert alone == [c.token_ids for c in done]


@pytest.mark.parametrize(
    ("verify", "draft"),
    [
        ("token", "ngram,min=1"),
        ("token", "model:{}"),
        ("block", "ngram,min=1"),
        ("block", "model:{}"),
        ("multistep", "model:{},tree=iid-2-2-1"),
        ("multistep", "model:{},tree=iid-2-1+ngram,min=1"),
        ("recursive", "model:{},tree=wor-2-2-1"),
        ("traversal", "model:{},tree=wor-2-2-1"),
        ("traversal", "model:{},tree=iid-2-2-1"),
        *(("traversal", f"{part},tree={tree}") for part in PARTS for tree in ("iid-2-2", "wor-2-2")),
        *((verify, part) for part in PARTS for verify in ("match", "token", "block", "traversal")),
    ],
)
def test_rules_with_draft_distributions_are_greedy_at_temperature_zero(verify: str, draft: str, drafter: Path) -> None:
    done = writer("llama", draft.format(drafter), verify=verify).generate(RAGGED, params(0.0))
    assert [c.token_ids for c in done] == plain(0.0)
    assert sum(c.stats.draft_tokens for c in done) > 0


def test_wider_trees_accept_more_than_the_chain_in_them(drafter: Path) -> None:
    folder = drafter

    def accepted(shape: str) -> int:
        done = writer("llama", f"model:{folder},tree={shape}").generate(RAGGED, params(0.0))
        return sum(completion.stats.rounds for completion in done)

    assert accepted("3-3-1") < accepted("1-1-1")


@pytest.mark.parametrize("shape", ["iid-2-2", "wor-2-2"])
def test_draws_may_be_merged_where_no_distribution_is_read(shape: str, drafter: Path) -> None:
    draft = f"ngram,min=1+model:{drafter},tree={shape}"
    assert ids(writer("llama", draft), 1.0) == plain(1.0)


def test_a_merged_tree_counts_every_source(drafter: Path) -> None:
    name = f"model:{drafter}"
    completion = writer("llama", f"ngram,min=1+{name}").generate(RAGGED[1], params(0.0))[0]
    stats = completion.stats
    assert set(stats.drafted_by_source) == {"ngram,min=1", name}
    assert sum(stats.drafted_by_source.values()) >= stats.draft_tokens
    assert max(stats.accepted_by_source.values()) <= stats.accepted_tokens <= sum(stats.accepted_by_source.values())


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_sequence_based_scoring_is_the_same_text_in_the_same_rounds(
    temperature: float, batched: bool, drafter: Path
) -> None:
    draft = f"model:{drafter},tree=2-2-1"
    slow = LLM(SequentialModel(target("llama"), batched=batched), draft, plan="fixed").generate(
        RAGGED, params(temperature)
    )
    fast = writer("llama", draft).generate(RAGGED, params(temperature))
    assert [c.token_ids for c in slow] == [c.token_ids for c in fast]
    assert [c.stats.rounds for c in slow] == [c.stats.rounds for c in fast]


@pytest.mark.parametrize(
    ("draft", "verify"),
    [("tree=2-2", "token"), ("tree=2-2", "multistep"), ("tree=best-8", "recursive"), ("tree=iid-2-2", "block")],
)
def test_trees_that_a_rule_does_not_accept_are_refused_before_weights_load(draft: str, verify: str) -> None:
    with pytest.raises(ConfigurationError, match=verify):
        LLM("no-such-model", f"model:no-such-drafter,{draft}", verify=verify)


def test_the_same_drafter_twice_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="twice"):
        LLM("no-such-model", "ngram+ngram")


def test_trees_need_a_target_that_scores_trees(drafter: Path) -> None:
    with pytest.raises(ConfigurationError, match="chains only"):
        writer("bloom", f"model:{drafter},tree=2-2")
