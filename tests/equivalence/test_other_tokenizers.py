"""Drafters with another tokenizer do not change the text: tiny random models, and the real pairs."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftree import LLM, SamplingParams
from draftree.core.errors import ConfigurationError
from families import fresh, target
from paced import steady
from real_weights import folder_of, loaded_float32
from spelling import tokenizer
from text_backends import byte_fallback, byte_level

DRAFTER = "smollm2-135m-instruct"
PROMPTS = ["the cab and a bank", "日本 in é 😀", "a", "in\nthe. end"]
DRAFTS = ["map=tokens", "map=strings,k=3", "map=tokens,tree=best-6", "map=strings,tree=2-2-1", "map=auto,tree=best-6"]


@pytest.fixture(scope="module", params=[byte_level, byte_fallback])
def drafter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param.__name__)
    backend = request.param()
    backend.save_pretrained(folder)
    fresh("llama", vocab_size=len(backend) + 5).save_pretrained(folder)
    return folder


def llm(draft: str | None, verify: str = "coupled") -> LLM:
    return LLM(target("llama"), draft, verify=verify, plan=steady(draft), tokenizer=tokenizer())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft", DRAFTS)
def test_the_text_is_plain_decodings(drafter: Path, draft: str, temperature: float) -> None:
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=3, n=2 if temperature else 1)
    plain = llm(None).generate(PROMPTS, params)
    done = llm(f"model:{drafter},{draft}").generate(PROMPTS, params)
    assert [(d.text, d.token_ids) for d in done] == [(p.text, p.token_ids) for p in plain]
    assert sum(d.stats.draft_tokens for d in done) > 20


@pytest.mark.parametrize("way", ["tokens", "strings"])
@pytest.mark.parametrize("draft", ["ngram,min=1+model:{},map={}", "model:{},map={}"])
def test_merged_matched_and_under_controls_too(drafter: Path, draft: str, way: str) -> None:
    params = SamplingParams(
        max_tokens=24, temperature=0.9, seed=4, repetition_penalty=1.2, top_k=20, bad_words=["cab"], min_tokens=3
    )
    plain = llm(None).generate(PROMPTS, params)
    for verify in ("coupled", "match"):
        fast = llm(draft.format(drafter, way), verify)
        assert f"map={way}" in fast.draft_note
        done = fast.generate(PROMPTS, params)
        assert [d.token_ids for d in done] == [p.token_ids for p in plain]


def test_rules_that_need_distributions_take_tokens(drafter: Path) -> None:
    greedy = SamplingParams(max_tokens=16, temperature=0, seed=1)
    plain = llm(None).generate(PROMPTS, greedy)
    for draft, verify in (("k=3", "token"), ("tree=wor-2-2", "recursive"), ("tree=iid-2-1", "multistep")):
        done = llm(f"model:{drafter},{draft}", verify).generate(PROMPTS, greedy)
        assert [d.token_ids for d in done] == [p.token_ids for p in plain]
        assert sum(d.stats.draft_tokens for d in done) > 0


@pytest.mark.parametrize(
    ("draft", "verify", "reason"),
    [
        ("model:nowhere,map=strings", "token", "free draws, but verifier 'token'"),
        ("model:nowhere,map=strings,tree=wor-2-2", "coupled", "strings are tokenized again"),
        ("model:nowhere,map=bytes", "coupled", "known: auto, strings, tokens"),
    ],
)
def test_rules_that_strings_do_not_support_are_refused_before_loading(draft: str, verify: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        LLM("nowhere-at-all", draft, verify=verify)


@pytest.mark.weights
@pytest.mark.parametrize(
    ("name", "draft"), [("gemma3-270m", "map=strings,tree=best-6,k=3"), ("stories15m", "map=tokens,k=3")]
)
def test_the_real_pairs_write_what_the_target_writes(name: str, draft: str) -> None:
    """The tokenizer of stories15m is that of Llama 2 and TinyLlama."""
    folder_of(DRAFTER)
    target_model = loaded_float32(name)
    prompts = ["Once upon a time, there was a little boat", "日本の首都は東京です。東京は"]
    greedy, sampled = (SamplingParams(max_tokens=12, temperature=heat, seed=5) for heat in (0.0, 0.8))
    params = [greedy, greedy, sampled, sampled]
    plain = LLM(target_model, "none").generate(prompts * 2, params)
    done = LLM(target_model, f"model:{DRAFTER},{draft}", plan="fixed").generate(prompts * 2, params)
    assert [(d.text, d.token_ids) for d in done] == [(p.text, p.token_ids) for p in plain]
    assert sum(d.stats.accepted_tokens for d in done) > 0
