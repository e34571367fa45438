"""`allowed_token_ids`: the distribution over the allowed tokens, with drafts, in batches, in C, with ratio rules and
with grammars.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from draftree import LLM, Completion, SamplingParams
from draftree.core.errors import UnsatisfiableError
from draftree.core.noise import Noise
from draftree.models.table import TableLM, hashed
from draftree.text.tokenizer import Tokenizer
from native_samples import in_c, native
from slot_samples import at_once
from text_backends import byte_level

ALLOWED = [2, *range(20, 60, 3)]
PROMPTS = [[4, 5, 6, 45, 46, 4, 5], [30, 31, 32, 30, 31], [7]]
DRAFTS = ["ngram,min=1,k=4", "suffix,floor=0.05,k=4", "early-exit:1,k=3"]


def picked(model: Any, prompt: list[int], params: SamplingParams, length: int) -> list[int]:
    """Plain decoding by hand: one pass over the whole text for each token, and the noise of the request."""
    assert params.seed is not None
    text = list(prompt)
    for _ in range(length):
        row: Tensor = at_once(model, text)[-1].clone()
        masked = torch.full_like(row, -torch.inf)
        masked[ALLOWED] = row[ALLOWED]
        if params.sampling.temperature:
            masked = masked / params.sampling.temperature + Noise(params.seed).gumbel(len(text), torch.arange(len(row)))
        text.append(int(masked.argmax()))
    return text[len(prompt) :]


@in_c
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("draft", [None, *DRAFTS])
def test_passes_in_c_write_the_best_of_what_is_allowed(draft: str | None, temperature: float) -> None:
    model = native("llama")
    params = SamplingParams(max_tokens=12, temperature=temperature, seed=3, allowed_token_ids=ALLOWED, ignore_eos=True)
    llm = LLM(model, draft)
    for done, prompt in zip(llm.generate(PROMPTS, params), PROMPTS, strict=True):
        assert list(done.token_ids) == picked(model, prompt, params, 12)


@in_c
def test_a_batch_may_mix_rows_with_and_without() -> None:
    llm = LLM(native("llama"), "ngram,min=1,k=4")
    free = SamplingParams(max_tokens=12, temperature=0.8, seed=3)
    held = SamplingParams(max_tokens=12, temperature=0.8, seed=3, allowed_token_ids=ALLOWED)
    mixed = llm.generate(PROMPTS, [free, held, free])
    apart = [llm.generate(prompt, params)[0] for prompt, params in zip(PROMPTS, [free, held, free], strict=True)]
    assert [done.token_ids for done in mixed] == [done.token_ids for done in apart]
    assert set(mixed[1].token_ids) <= set(ALLOWED)


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level())


def write(draft: str | None, **params: Any) -> Completion:
    model = TableLM(hashed(len(tokenizer().vocabulary()), seed=1, scale=2.0), order=1)
    llm = LLM(model, draft, tokenizer=tokenizer())
    return llm.generate([[20, 30, 40]], SamplingParams(**({"max_tokens": 40, "seed": 5, "temperature": 0.8} | params)))[
        0
    ]


@pytest.mark.parametrize("draft", [None, "grammar", "ngram,min=1+grammar"])
def test_with_a_grammar_both_hold(draft: str | None) -> None:
    spelled = tokenizer().vocabulary()
    allowed = [place for place, token in enumerate(spelled) if re.fullmatch("[ac]+", token)]
    done = write(draft, regex="x?[abc]{6}", allowed_token_ids=[*allowed, tokenizer().eos_token_id])
    assert re.fullmatch("[ac]{6}", done.text)
    assert (
        done.token_ids
        == write(None, regex="x?[abc]{6}", allowed_token_ids=[*allowed, tokenizer().eos_token_id]).token_ids
    )
    assert (done.finish_reason, done.stop_reason) == ("stop", None)


def test_a_grammar_without_an_allowed_token_fails_the_request_with_a_message() -> None:
    with pytest.raises(UnsatisfiableError, match="no token agrees with allowed_token_ids and regex; change one"):
        write(None, regex="[0-9]{4}", allowed_token_ids=list(range(20, 30)))
