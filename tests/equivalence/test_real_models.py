"""The real models in float32: the same text with drafts, without drafts, and from transformers."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftree import LLM, SamplingParams
from real_weights import folder_of, loaded_float32

pytestmark = pytest.mark.weights

NUM_TOKENS = 48
TALKS = [
    "Write the same function with type annotations and nothing else:\n\n"
    "def area(width, height):\n    if width < 0 or height < 0:\n        raise ValueError('negative')\n"
    "    return width * height\n",
    "Repeat word for word: the ferry leaves the harbour at seven, and the ferry comes back at nine.",
    "Name three things that a lighthouse keeper does in the morning.",
]
TALES = ["Once upon a time, there was a little boat", "Tom and Lily went to the park. Tom and Lily"]


def params(temperature: float) -> SamplingParams:
    return SamplingParams(max_tokens=NUM_TOKENS, temperature=temperature, seed=8)


@pytest.mark.essential
def test_the_default_drafter_writes_the_plain_text() -> None:
    folder = str(folder_of("smollm2-135m-instruct"))
    conversations = [[{"role": "user", "content": talk}] for talk in TALKS]
    plain = LLM(folder, draft="none").chat(conversations, params(0.7))
    done = LLM("smollm2-135m-instruct", draft="auto").chat(conversations, params(0.7))
    assert [(d.text, d.token_ids) for d in done] == [(p.text, p.token_ids) for p in plain]
    assert sum(d.stats.accepted_tokens for d in done) > 0


@pytest.mark.parametrize("draft", ["ngram", "suffix"])
def test_a_chat_model_with_copied_drafts_answers_the_same(draft: str) -> None:
    model = loaded_float32("smollm2-135m-instruct")
    conversations = [[{"role": "user", "content": talk}] for talk in TALKS]
    plain = LLM(model).chat(conversations, params(0.0))
    done = LLM(model, draft, plan="fixed").chat(conversations, params(0.0))
    assert [(d.text, d.token_ids) for d in done] == [(p.text, p.token_ids) for p in plain]
    assert sum(d.stats.accepted_tokens for d in done) >= NUM_TOKENS // 2


def test_an_edit_that_is_mostly_predicted_is_the_same_and_takes_few_rounds() -> None:
    model = loaded_float32("smollm2-135m-instruct")
    conversation = [{"role": "user", "content": TALKS[0]}]
    (plain,) = LLM(model).chat(conversation, params(0.0))
    expected = plain.text.replace("negative", "below zero")
    given = dataclasses.replace(params(0.0), prediction=expected)
    (done,) = LLM(model, "prediction", plan="fixed").chat(conversation, given)
    assert (done.text, done.token_ids) == (plain.text, plain.token_ids)
    assert done.stats.rounds <= NUM_TOKENS // 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft", ["ngram,min=1", "model:stories15m,k=4"])
def test_a_story_model_as_target_and_as_its_own_drafter(draft: str, temperature: float) -> None:
    model = loaded_float32("stories15m")
    plain = LLM(model).generate(TALES, params(temperature))
    done = LLM(model, draft, plan="fixed").generate(TALES, params(temperature))
    assert [(d.text, d.token_ids) for d in done] == [(p.text, p.token_ids) for p in plain]
    if draft.startswith("model"):
        assert all(d.stats.accepted_tokens >= 0.9 * d.stats.draft_tokens for d in done)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_lookahead_leaves_the_story(temperature: float) -> None:
    model, params = loaded_float32("stories15m"), SamplingParams(max_tokens=40, temperature=temperature, seed=3)
    (plain,) = LLM(model).generate(TALES[1], params)
    for draft in ("lookahead,window=0", "lookahead,window=6,n=4"):
        (done,) = LLM(model, draft, plan="fixed").generate(TALES[1], params)
        assert done.token_ids == plain.token_ids
        assert done.stats.accepted_by_source["pool"]


def test_a_story_that_fills_the_context_is_the_same() -> None:
    model = loaded_float32("stories15m")
    context = model.model.max_length
    prompt = LLM(model).tokenizer.encode(TALES[0] * 20)[: context - NUM_TOKENS]  # type: ignore[union-attr]
    plain, done = (LLM(model, draft).generate([prompt], params(0.0))[0] for draft in (None, "model:stories15m"))
    assert done.token_ids == plain.token_ids
    assert done.stats.prompt_tokens + len(done.token_ids) <= context


@torch.inference_mode()
def test_the_story_model_writes_what_transformers_writes() -> None:
    peer = AutoModelForCausalLM.from_pretrained(folder_of("stories15m"), dtype=torch.float32)
    model = loaded_float32("stories15m")
    for tale in TALES:
        (done,) = LLM(model).generate([tale], params(0.0))
        ids = torch.tensor([LLM(model).tokenizer.encode(tale)])  # type: ignore[union-attr]
        theirs = peer.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False)
        assert list(done.token_ids) == theirs[0, ids.shape[1] :].tolist()
