"""Every sampling control gives, with drafts, exactly the text of plain decoding: nodes see their own ancestors."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from draftree import LLM, Completion, SamplingParams
from families import VOCAB_SIZE, prompts, target
from paced import steady
from spelling import EOS, tokenizer

PROMPTS = [[4, 5, 6, 45, 46, 4, 5], *prompts(1, 12)]
NUM_TOKENS = 16
CONTROLS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "high temperature": {"temperature": 2.5},
    "top-k": {"top_k": 4},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.15},
    "all filters": {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 1.4},
    "repetition penalty": {"repetition_penalty": 1.6},
    "repetition reward": {"repetition_penalty": 0.7},
    "presence penalty": {"presence_penalty": 2.0},
    "frequency penalty": {"frequency_penalty": 1.5},
    "logit bias": {"logit_bias": {4: 6.0, 5: 5.0, 45: -100.0, 46: float("-inf")}},
    "no repeated token": {"no_repeat_ngram_size": 1},
    "no repeated pair": {"no_repeat_ngram_size": 2},
    "no repeated triple": {"no_repeat_ngram_size": 3, "logit_bias": {4: 8.0, 5: 8.0, 6: 8.0}},
    "no generated token again": {"no_repeat_ngram_size": 1, "ngram_scope": "generated"},
    "no generated triple again": {
        "no_repeat_ngram_size": 3,
        "ngram_scope": "generated",
        "logit_bias": {4: 8.0, 5: 8.0, 6: 8.0},
    },
    "bad words": {"bad_words": ["a", "bc", "the and", "cab"], "logit_bias": {4: 5.0, 5: 5.0, 6: 5.0}},
    "allowed tokens": {"allowed_token_ids": [EOS, *range(30, 60)]},
    "allowed tokens and others": {
        "allowed_token_ids": [*range(3, 20), 45, 46],
        "repetition_penalty": 1.4,
        "logit_bias": {4: 3.0, 45: 1.0},
        "bad_words": ["ab"],
        "top_p": 0.9,
        "min_p": 0.05,
    },
    "minimum before an ignored end": {"min_tokens": 9, "ignore_eos": True, "logit_bias": {EOS: 20.0}},
    "minimum of tokens": {"min_tokens": 9, "stop_token_ids": list(range(3, 50)), "logit_bias": {EOS: 20.0}},
    "all together": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "no_repeat_ngram_size": 3,
        "bad_words": ["ab"],
        "min_tokens": 5,
        "top_k": 30,
        "top_p": 0.95,
        "min_p": 0.01,
        "temperature": 0.9,
    },
}
DRAFTS = [
    "ngram,min=1,k=4",
    "suffix,floor=0.05,k=4",
    "model:{},k=4",
    "ngram,min=1,k=3+model:{},tree=best-6,k=3",
    "early-exit:1,tree=best-6,k=3+layer-skip,mlp=1,k=4",
    "lookahead,window=6,n=4",
]


@functools.cache
def writer(draft: str | None) -> LLM:
    return LLM(target("llama"), draft, plan=steady(draft), tokenizer=tokenizer())


def sampling(control: str, *, greedy: bool) -> SamplingParams:
    given = {"max_tokens": NUM_TOKENS, "seed": 11} | CONTROLS[control]
    return SamplingParams(**(given | {"temperature": 0.0} if greedy else given))


@functools.cache
def plain(control: str, greedy: bool) -> tuple[Completion, ...]:
    return tuple(writer(None).generate(PROMPTS, sampling(control, greedy=greedy)))


def shown(done: Completion) -> tuple[Any, ...]:
    return done.token_ids, done.text, done.finish_reason


@pytest.mark.essential
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("control", CONTROLS)
def test_a_control_holds_under_drafts(control: str, greedy: bool, draft: str, drafter: Path) -> None:
    done = writer(draft.format(drafter)).generate(PROMPTS, sampling(control, greedy=greedy))
    assert [shown(d) for d in done] == [shown(p) for p in plain(control, greedy)]


@pytest.mark.parametrize("control", [name for name in CONTROLS if not name.startswith(("temperature", "minimum"))])
def test_a_control_changes_the_text(control: str) -> None:
    """Else the comparison above compares nothing."""
    is_filter = not {"top_k", "top_p", "min_p", "temperature"}.isdisjoint(CONTROLS[control])
    free = plain("temperature", True) if not is_filter else tuple(writer(None).generate(PROMPTS, unfiltered()))
    assert [shown(d) for d in plain(control, not is_filter)] != [shown(d) for d in free]


def unfiltered() -> SamplingParams:
    return SamplingParams(max_tokens=NUM_TOKENS, seed=11)


def test_drafts_are_kept_under_controls(drafter: Path) -> None:
    done = [
        one
        for control in ("top-k", "top-p", "repetition penalty", "no repeated triple", "all together")
        for one in writer(DRAFTS[1].format(drafter)).generate(PROMPTS, sampling(control, greedy=False))
    ]
    assert sum(d.stats.accepted_tokens for d in done) > len(done)


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_log_probabilities_are_those_of_plain_decoding(draft: str, temperature: float, drafter: Path) -> None:
    params = SamplingParams(
        max_tokens=NUM_TOKENS, temperature=temperature, seed=4, logprobs=3, repetition_penalty=1.3, top_k=30
    )
    both = [writer(spec).generate(PROMPTS, params) for spec in (None, draft.format(drafter))]
    for one, other in zip(*both, strict=True):
        assert one.logprobs is not None
        assert other.logprobs is not None
        assert len(other.logprobs) == len(other.token_ids)
        for entry, same in zip(one.logprobs, other.logprobs, strict=True):
            assert entry.token_id == same.token_id
            assert same.logprob == pytest.approx(entry.logprob, abs=1e-4)
            assert [token for token, _ in entry.top] == [token for token, _ in same.top]
            assert [value for _, value in same.top] == pytest.approx([value for _, value in entry.top], abs=1e-4)


def test_a_batch_may_mix_controls(drafter: Path) -> None:
    names = list(CONTROLS)
    batch = [PROMPTS[i % 3] for i in range(len(names))]
    params = [sampling(name, greedy=i % 4 == 0) for i, name in enumerate(names)]
    done = writer(DRAFTS[2].format(drafter)).generate(batch, params)
    for i, (name, one) in enumerate(zip(names, done, strict=True)):
        assert shown(one) == shown(plain(name, i % 4 == 0)[i % 3]), name


def test_a_token_outside_of_what_controls_leave_is_never_written(drafter: Path) -> None:
    allowed = {7, 8, 9, 10, 30}
    params = SamplingParams(
        max_tokens=NUM_TOKENS,
        seed=2,
        logit_bias={token: float("-inf") for token in range(VOCAB_SIZE) if token not in allowed},
    )
    for draft in (None, *DRAFTS):
        for one in writer(draft and draft.format(drafter)).generate(PROMPTS, params):
            assert set(one.token_ids) <= allowed
