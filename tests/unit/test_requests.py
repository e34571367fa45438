"""Requests of many types: each is interpreted correctly, or refused before generation."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from draftree import LLM, SamplingParams
from draftree.core.errors import ConfigurationError, InvalidRequestError
from draftree.models.table import TableLM, hashed
from engine_samples import VOCAB, request, table_llm
from families import VOCAB_SIZE, target
from spelling import tokenizer

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
def test_invalid_prompts_are_refused(llm: LLM, prompts: Any, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        llm.generate(prompts, PARAMS)
    assert llm.engine.is_idle


@pytest.mark.parametrize("params", [{"temperature": 0}, "greedy", 5, [{"temperature": 0}], ["greedy"]])
def test_invalid_parameters_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(InvalidRequestError, match="give SamplingParams"):
        llm.generate([[1, 2]], params)
    if not isinstance(params, list):
        with pytest.raises(InvalidRequestError, match="give SamplingParams"):
            list(llm.stream([1, 2], params))


def test_none_among_parameters_is_the_defaults(llm: LLM) -> None:
    one, other = llm.generate(IDS, [PARAMS, None])  # type: ignore[list-item]
    assert (len(one.token_ids), len(other.token_ids)) == (3, SamplingParams().max_tokens)


@pytest.mark.parametrize(
    ("count", "max_tokens", "kept"),
    [(2, 4, 2), (1, 4, 1), (9, 4, 9), (50, 4, 10), (-1, 4, 6), (-1, 9, 1), (-1, None, 9)],
)
def test_only_the_last_tokens_of_a_prompt_are_kept(count: int, max_tokens: int | None, kept: int) -> None:
    """A context of ten tokens: -1 leaves room for max_tokens, or for one token where there is no limit."""
    short = LLM(TableLM(hashed(VOCAB, seed=5), max_length=10 if count == -1 else 4096), "none")
    ids = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1]
    given = SamplingParams(max_tokens=max_tokens, seed=1, truncate_prompt_tokens=count, prompt_logprobs=0)
    (done,) = short.generate([ids], given)
    assert done.prompt_logprobs is not None
    assert [entry and entry.token_id for entry in done.prompt_logprobs] == [None, *ids[len(ids) - kept :][1:]]
    assert done.stats.prompt_tokens == kept
    (cut,) = short.generate([ids[len(ids) - kept :]], SamplingParams(max_tokens=max_tokens, seed=1))
    assert done.token_ids == cut.token_ids


def test_without_text_there_are_token_ids_and_no_text_to_stream() -> None:
    llm = LLM(TableLM(hashed(VOCAB_SIZE, seed=5), order=3), "ngram,min=1", tokenizer=tokenizer())
    with_text, without = (
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=9, seed=1, detokenize=flag))[0] for flag in (True, False)
    )
    assert with_text.text
    assert (without.text, without.token_ids) == ("", with_text.token_ids)
    given = SamplingParams(max_tokens=9, seed=1, detokenize=False)
    with pytest.raises(InvalidRequestError, match="detokenize=False gives no text to stream"):
        next(llm.stream([1, 2, 3], given))
    updates = list(llm.stream_updates([1, 2, 3], given))
    assert tuple(token for update in updates for token in update.token_ids) == with_text.token_ids
    assert not any(update.pieces for update in updates)


def test_a_completion_as_json_has_the_stop_reason_and_log_probabilities_of_the_prompt(llm: LLM) -> None:
    given = SamplingParams(max_tokens=3, stop_token_ids=list(range(VOCAB)), prompt_logprobs=1)
    (done,) = llm.generate([[1, 2]], given)
    shown = json.loads(json.dumps(done.to_json()))
    assert shown["stop_reason"] == done.stop_reason == done.token_ids[0]
    assert shown["prompt_logprobs"][0] is None
    assert shown["prompt_logprobs"][1]["token_id"] == 2
    assert "logprobs" not in shown
    assert llm.generate([[1, 2]], PARAMS)[0].to_json()["stop_reason"] is None


def test_a_prompt_of_nothing_is_refused_in_a_stream(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="the prompt is None"):
        list(llm.stream(None, PARAMS))  # type: ignore[arg-type]


@pytest.mark.parametrize("priority", ["high", 1.5, True, None])
def test_a_priority_is_a_whole_number(llm: LLM, priority: Any) -> None:
    with pytest.raises(InvalidRequestError, match="priority is"):
        request(llm, [1, 2], priority=priority)


def test_a_tokenizers_name_is_not_a_tokenizer(llm: LLM) -> None:
    with pytest.raises(ConfigurationError, match="give a loaded one"):
        LLM(llm.model, "none", tokenizer="gpt2")


@pytest.mark.parametrize(
    ("prompt", "given", "param"),
    [
        ([], {}, "prompt"),
        ([VOCAB], {}, "prompt"),
        (["a"], {}, "prompt"),
        ("text", {}, "prompt"),
        ([1] * 5000, {}, "prompt"),
        ([{"role": "user", "content": "a"}], {}, "messages"),
        ([1], {"max_tokens": 10**6}, "max_tokens"),
        ([1], {"stop": "a"}, "stop"),
        ([1], {"prediction": "a"}, "prediction"),
        ([1], {"bad_words": ["a"]}, "bad_words"),
        ([1], {"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ([1], {"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        ([1], {"allowed_token_ids": [VOCAB]}, "allowed_token_ids"),
        ([1], {"logprobs": VOCAB + 1}, "logprobs"),
        ([1], {"regex": "a"}, "regex"),
        ([1], {"n": 2}, "n"),
    ],
)
def test_a_refused_request_names_the_argument_at_fault(prompt: Any, given: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        next(table_llm().stream(prompt, SamplingParams(**given)))
    assert refused.value.param == param


def test_a_grammar_without_a_text_in_the_vocabulary_names_its_parameter() -> None:
    llm = LLM(TableLM(hashed(VOCAB_SIZE, seed=5), order=3), "none", tokenizer=tokenizer())
    with pytest.raises(InvalidRequestError) as refused:
        llm.generate([[1]], SamplingParams(regex="\u4e2d{4}"))
    assert refused.value.param == "regex"


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "much"])
def test_the_memory_for_sequences_is_a_whole_number_of_bytes(count: Any) -> None:
    with pytest.raises(ConfigurationError, match="sequence_memory is"):
        table_llm(sequence_memory=count)


def test_the_memory_for_sequences_bounds_texts_and_batch() -> None:
    whole = LLM(target("llama"), "ngram")
    token = target("llama").footprint.token
    few = LLM(target("llama"), "ngram", sequence_memory=1000 * token)
    assert 0 < few.engine.longest < 1000
    assert few.engine.num_slots(64) < whole.engine.num_slots(64)
    given = SamplingParams(max_tokens=8, temperature=0)
    assert few.generate(IDS, given)[0].token_ids == whole.generate(IDS, given)[0].token_ids
    with pytest.raises(ConfigurationError, match=r"sequence_memory is 1000 bytes, but a text of 64 .*increase it"):
        LLM(target("llama"), "ngram", sequence_memory=1000)


def test_the_least_memory_that_a_refusal_names_is_enough() -> None:
    model = target("lfm2")  # of whose states larger trees have more
    with pytest.raises(ConfigurationError) as refused:
        LLM(model, "ngram", sequence_memory=1)
    least = int(str(refused.value).partition("takes ")[2].partition(":")[0])
    LLM(model, "ngram", sequence_memory=least)
    with pytest.raises(ConfigurationError, match=f"takes {least}:"):
        LLM(model, "ngram", sequence_memory=least - 1)
