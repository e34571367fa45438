"""For many families plain decoding equals transformers', and speculation equals plain decoding, token for token."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch

from draftree import LLM, Completion, SamplingParams
from draftree.core.errors import UnsupportedModelError
from draftree.loading.transformers_model import wrap_model
from families import (
    CHAINS,
    DIVIDED,
    RECURRENT,
    REFUSED,
    SLOTTED,
    drafter_folder,
    fresh,
    peer,
    prompts,
    target,
    transformers_greedy,
)
from paced import steady

PROMPTS = prompts(1, 8, 21)
NUM_TOKENS = 16
SEED = 5
TREES = [*SLOTTED, *RECURRENT]
DECODED = [*TREES, *CHAINS]
TEMPERATURES = (0.0, 1.0)


def sampling(temperature: float) -> SamplingParams:
    return SamplingParams(max_tokens=NUM_TOKENS, temperature=temperature, seed=SEED)


@functools.cache
def writer(family: str, draft: str | None) -> LLM:
    return LLM(target(family), draft, plan=steady(draft))


def write(family: str, draft: str | None, temperature: float) -> list[Completion]:
    return writer(family, draft).generate(PROMPTS, sampling(temperature))


@functools.cache
def plain(family: str, temperature: float) -> tuple[tuple[int, ...], ...]:
    return tuple(done.token_ids for done in write(family, None, temperature))


def gap_where_they_part(family: str, prompt: list[int], ours: list[int], theirs: list[int]) -> str:
    """Where two texts part, and how far apart the two likeliest tokens are there: what a report of failure needs."""
    place = next(i for i, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other)
    with torch.inference_mode():
        logits = peer(family)(torch.tensor([prompt + theirs[:place]]), use_cache=False).logits[0, -1]
    best = logits.topk(2).values
    return f"{family}: token {place} is {ours[place]}, not {theirs[place]}; gap {float(best[0] - best[1]):.1e}"


@pytest.mark.parametrize("family", DECODED)
def test_families_with_slots_score_trees_and_others_chains(family: str) -> None:
    assert target(family).supports_trees is (family not in CHAINS)


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_does_not_continue_texts_is_refused_in_one_sentence(family: str) -> None:
    with pytest.raises(UnsupportedModelError, match=REFUSED[family][1]) as caught:
        wrap_model(fresh(family))
    assert not re.search(r"size of tensor|index out of range|Error|layer_idx|_indexer", str(caught.value))


@pytest.mark.parametrize("draft", ["early-exit,layers=1", "early-exit,layers=3", "layer-skip,mlp=1"])
@pytest.mark.parametrize("family", ["gemma3n_text", "gemma4_text"])
def test_layers_that_share_keys_cannot_run_alone(family: str, draft: str) -> None:
    with pytest.raises(UnsupportedModelError, match="shares keys and values between its layers"):
        LLM(target(family), draft)


@pytest.mark.essential
@pytest.mark.parametrize("family", DECODED)
def test_plain_decoding_is_transformers_greedy(family: str) -> None:
    for prompt, ours in zip(PROMPTS, plain(family, 0.0), strict=True):
        theirs = transformers_greedy(peer(family), prompt, NUM_TOKENS)
        assert list(ours) == theirs, gap_where_they_part(family, prompt, list(ours), theirs)


def drafted(family: str, draft: str, temperature: float, models: Path) -> tuple[int, int]:
    """Require the text of plain decoding; return the numbers of accepted and of drafted tokens."""
    done = write(family, draft.format(drafter_folder(family, models)) if "{}" in draft else draft, temperature)
    assert tuple(d.token_ids for d in done) == plain(family, temperature)
    return sum(d.stats.accepted_tokens for d in done), sum(d.stats.draft_tokens for d in done)


@pytest.mark.essential
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("draft", ["ngram,min=1,k=4", "model:{},k=3"])
@pytest.mark.parametrize("family", DECODED)
def test_chains_change_nothing(family: str, draft: str, temperature: float, models: Path) -> None:
    accepted, num_drafted = drafted(family, draft, temperature, models)
    assert num_drafted > 0
    if "model" in draft:
        assert 0 < accepted < num_drafted, "the drafter must be right now and then, and wrong now and then"


@pytest.mark.essential
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize(
    "draft", ["model:{},tree=best-6,k=3", "ngram,min=1,k=3+model:{},tree=2-2", "lookahead,window=6,n=4"]
)
@pytest.mark.parametrize("family", TREES)
def test_trees_change_nothing(family: str, draft: str, temperature: float, models: Path) -> None:
    accepted, _ = drafted(family, draft, temperature, models)
    assert accepted > 0 or "model" not in draft


@pytest.mark.essential
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("draft", ["ngram,min=1+early-exit:1,tree=best-8", "layer-skip,attention=1,tree=2-1-1"])
@pytest.mark.parametrize("family", sorted((DIVIDED | RECURRENT.keys()) - {"roberta"}))
def test_parts_of_the_model_change_nothing(family: str, draft: str, temperature: float, models: Path) -> None:
    drafted(family, draft, temperature, models)


@pytest.mark.parametrize("draft", [None, "model"])
@pytest.mark.parametrize("family", DECODED)
def test_a_text_is_the_same_alone_and_in_a_batch(family: str, draft: str | None, models: Path) -> None:
    spec = draft and f"model:{drafter_folder(family, models)},k=3"
    (alone,) = writer(family, spec).generate([PROMPTS[1]], sampling(1.0))
    assert alone.token_ids == plain(family, 1.0)[1]
