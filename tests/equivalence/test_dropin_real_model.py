"""The drop-in on a real model in float32, with its tokenizer: texts, stop strings and streamers of `generate`."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer

import draftree
from dropin_samples import plain
from real_weights import folder_of

pytestmark = pytest.mark.weights

TEXTS = [
    "To bake bread: mix flour and water. To bake bread: mix flour and",
    "The capital of France is Paris. The capital of Italy is",
]


@functools.cache
def loaded() -> tuple[Any, Any]:
    folder = folder_of("smollm2-135m-instruct")
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), tokenizer


def both(texts: list[str], **settings: Any) -> tuple[Any, Any]:
    """What generate writes and what it writes through the drop-in, with statistics."""
    model, tokenizer = loaded()
    inputs = dict(tokenizer(texts, return_tensors="pt", padding=True))
    given = {"max_new_tokens": 32, "pad_token_id": tokenizer.pad_token_id, **settings}
    wanted = plain(model, inputs, **given)
    got = plain(
        model,
        inputs,
        **given,
        custom_generate=draftree.generate,
        draft="ngram",
        plan="fixed",
        return_dict_in_generate=True,
    )
    return wanted, got


def test_a_batch_of_texts() -> None:
    wanted, got = both(TEXTS)
    assert torch.equal(got.sequences, wanted)
    assert sum(stats.accepted_tokens for stats in got.stats) > 0


@pytest.mark.parametrize("texts", [TEXTS[:1], TEXTS], ids=["one", "batch"])
def test_stop_strings_end_the_text_where_generate_ends_it(texts: list[str]) -> None:
    _, tokenizer = loaded()
    wanted, got = both(texts, stop_strings=["e mix", "rid"], tokenizer=tokenizer)
    assert torch.equal(got.sequences, wanted)
    new = wanted.shape[1] - tokenizer(texts, return_tensors="pt", padding=True)["input_ids"].shape[1]
    assert new < 32, "no text was stopped: the test shows nothing"


def test_a_text_streamer_receives_the_text() -> None:
    model, tokenizer = loaded()
    inputs = dict(tokenizer(TEXTS[:1], return_tensors="pt"))
    streamed = []
    for drafting in ({}, {"custom_generate": draftree.generate}):
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
        plain(model, inputs, streamer=streamer, **drafting)
        streamed.append("".join(streamer))
    assert streamed[0] == streamed[1] != ""
