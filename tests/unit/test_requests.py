"""What is asked for comes in many kinds: each is read as it was meant, or refused before anything is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from draftree import LLM, SamplingParams
from draftree.core.errors import ConfigurationError, InvalidRequestError
from engine_samples import VOCAB, request, table_llm

PARAMS = SamplingParams(max_tokens=3, temperature=0)
IDS = [[1, 2, 3], [4, 5]]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return table_llm("ngram,min=1")


def written(llm: LLM, prompts: Any) -> list[tuple[int, ...]]:
    return [done.token_ids for done in llm.generate(prompts, PARAMS)]


@pytest.mark.parametrize(
    "prompts",
    [
        [torch.tensor(ids) for ids in IDS],
        [np.array(ids) for ids in IDS],
        [tuple(ids) for ids in IDS],
        (ids for ids in IDS),
        [[np.int64(token) for token in ids] for ids in IDS],
    ],
    ids=["tensors", "arrays", "tuples", "generator", "numbers"],
)
def test_rows_of_token_ids_of_any_kind_are_prompts(llm: LLM, prompts: Any) -> None:
    assert written(llm, prompts) == written(llm, IDS)


@pytest.mark.parametrize("kind", [torch.tensor, np.array])
def test_an_array_of_two_dimensions_is_a_prompt_a_row(llm: LLM, kind: Any) -> None:
    assert written(llm, kind([[1, 2], [4, 5]])) == written(llm, [[1, 2], [4, 5]])
    assert written(llm, kind([1, 2])) == written(llm, [1, 2])


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        ({"input_ids": [1, 2]}, "give its input_ids"),
        ({"role": "user", "content": "ab"}, r"holds messages .*: call chat"),
        ([{"role": "user", "content": "ab"}], r"holds messages .*: call chat"),
        ([[{"role": "user", "content": "ab"}], [{"role": "user", "content": "cd"}]], r"holds messages .*: call chat"),
        (["ab", [{"role": "user", "content": "cd"}]], r"holds messages .*: call chat"),
        (b"\x01\x02", "give a text, token ids"),
        ({1, 2}, "give a text, token ids"),
        (5, "give a text, token ids"),
        ([1, "two"], "the prompt is 1"),
        ([1.0, 2.0], "the prompt is 1.0"),
        ([None], "the prompt is None"),
        ([[1, 2.5]], "whole numbers, got 2.5"),
        ([[[1, 2]]], r"whole numbers, got \[1, 2\]"),
        ([torch.tensor([[1, 2]])], "whole numbers, got tensor"),
        ([[1, VOCAB]], f"the vocabulary ends at {VOCAB - 1}"),
    ],
)
def test_what_is_no_prompt_is_refused(llm: LLM, prompts: Any, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        llm.generate(prompts, PARAMS)
    assert llm.engine.is_idle


@pytest.mark.parametrize("params", [{"temperature": 0}, "greedy", 5, [{"temperature": 0}], ["greedy"]])
def test_what_are_no_parameters_is_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(InvalidRequestError, match="give SamplingParams"):
        llm.generate([[1, 2]], params)
    if not isinstance(params, list):
        with pytest.raises(InvalidRequestError, match="give SamplingParams"):
            list(llm.stream([1, 2], params))


def test_none_among_parameters_is_the_defaults(llm: LLM) -> None:
    one, other = llm.generate(IDS, [PARAMS, None])  # type: ignore[list-item]
    assert (len(one.token_ids), len(other.token_ids)) == (3, SamplingParams().max_tokens)


def test_a_prompt_of_nothing_is_refused_in_a_stream(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="the prompt is None"):
        list(llm.stream(None, PARAMS))  # type: ignore[arg-type]


@pytest.mark.parametrize("priority", ["high", 1.5, True, None])
def test_a_priority_is_a_whole_number(llm: LLM, priority: Any) -> None:
    with pytest.raises(InvalidRequestError, match="priority is"):
        request(llm, [1, 2], priority=priority)


def test_a_tokenizers_name_is_no_tokenizer(llm: LLM) -> None:
    with pytest.raises(ConfigurationError, match="give a loaded one"):
        LLM(llm.model, tokenizer="gpt2")
