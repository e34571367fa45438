"""Models whose own code names the cache as another version of transformers does."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from draftree import LLM, SamplingParams
from draftree.models.torch.hf_cache import CachedModel
from draftree.models.torch.inspection import CACHE_NAMES, cache_name, prompt_inputs
from families import fresh, peer, prompts, transformers_greedy

FAMILY = "bloom"


def taking_cache_as(name: str) -> Any:
    """Return a model whose forward takes its cache by this name."""
    model = fresh(FAMILY)
    inner = model.forward

    def forward(input_ids: Any = None, **others: Any) -> Any:
        return inner(input_ids, **{cache_name(inner): others.pop(name, None)}, **others)

    known = inspect.signature(inner).parameters.values()
    shown = [parameter for parameter in known if parameter.name not in CACHE_NAMES]
    shown.insert(1, inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None))
    forward.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    model.forward = forward
    return model


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_the_cache_is_passed_by_the_name_that_the_forward_takes(name: str) -> None:
    model = CachedModel(taking_cache_as(name))
    (prompt,) = prompts(8)
    (done,) = LLM(model, "ngram").generate([prompt], SamplingParams(max_tokens=12, temperature=0.0))
    assert list(done.token_ids) == transformers_greedy(peer(FAMILY), prompt, 12)


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_prompts_are_read_into_the_cache_by_that_name(name: str) -> None:
    model, ids = taking_cache_as(name), torch.tensor(prompts(8))
    given = object()
    assert prompt_inputs(model, ids, cache=given, use_cache=True)[name] is given
    assert prompt_inputs(model, ids, use_cache=False).keys().isdisjoint(CACHE_NAMES)
    with torch.inference_mode():
        read = CachedModel(model).read(ids, None, {})[0]
        expected = peer(FAMILY)(ids).logits[0, -1]
    torch.testing.assert_close(read.logits, expected)


def test_a_forward_that_hides_its_arguments_gets_the_name_of_transformers() -> None:
    model = fresh(FAMILY)
    shown = cache_name(model.forward)
    assert cache_name(model) == shown  # the call of a module takes *args and **kwargs


def test_a_forward_without_a_cache_reads_the_whole_text_in_each_pass() -> None:
    model = fresh(FAMILY)
    inner, widths = model.forward, []

    def forward(input_ids: Any, attention_mask: Any = None, logits_to_keep: Any = 0, use_cache: bool = False) -> Any:
        widths.append(input_ids.shape[1])
        return inner(input_ids, attention_mask=attention_mask, logits_to_keep=logits_to_keep, use_cache=use_cache)

    model.forward = forward
    (prompt,) = prompts(8)
    llm = LLM(CachedModel(model), None)
    (done,) = llm.generate([prompt], SamplingParams(max_tokens=4, temperature=0.0))
    assert list(done.token_ids) == transformers_greedy(peer(FAMILY), prompt, 4)
    assert widths[-4:] == [8, 9, 10, 11]
