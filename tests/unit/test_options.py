"""The options of a model and of a request: one object from the public call to the engine."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest

from draftree import LLM, SamplingParams
from draftree.core.errors import ConfigurationError, InvalidRequestError
from draftree.loading.load import load_model
from draftree.models.table import TableLM, hashed
from draftree.options import ModelOptions, RequestOptions, options_for

VOCAB = 30


def model() -> TableLM:
    return TableLM(hashed(VOCAB, seed=1), order=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kernels": "fast"}, "unknown kernels 'fast'"),
        ({"quantization": "int3"}, "unknown quantization 'int3'"),
        ({"quantization": "int8", "kernels": "torch"}, "needs native kernels"),
        ({"offload": "8"}, "offload is '8'"),
        ({"tp": 2, "offload": "8GB"}, "leave out offload, or tp and pp"),
        ({"threads": 0}, "threads is 0"),
        ({"max_batch_size": 1.5}, "max_batch_size is 1.5"),
    ],
)
def test_wrong_options_are_refused_where_they_are_built(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        ModelOptions("name", **options)


@pytest.mark.parametrize("function", [LLM, load_model])
def test_unknown_arguments_are_refused_with_a_suggestion(function: Any) -> None:
    with pytest.raises(TypeError, match="'kernel': did you mean 'kernels'"):
        function("no-such-model", kernel="torch")


def test_options_take_the_place_of_arguments_and_arguments_change_them() -> None:
    options = ModelOptions(model(), "ngram", plan="fixed")
    assert LLM(options).drafts == ("ngram",)
    assert LLM(options, draft="suffix").drafts == ("suffix",)


def test_options_of_a_loaded_model_keep_what_still_has_an_effect() -> None:
    options = ModelOptions("name", "ngram", device="cpu", dtype="float32", threads=2, exact=True)
    loaded = options.over(model(), plan="fixed")
    assert (loaded.draft, loaded.plan, loaded.exact) == ("ngram", "fixed", True)
    assert (loaded.device, loaded.dtype, loaded.threads) == ("auto", "auto", None)
    assert pickle.loads(pickle.dumps(options)) == options


def test_a_request_has_its_sampling_parameters_and_its_own_options() -> None:
    params = SamplingParams(temperature=0, max_tokens=4, stop="x", json_schema={"type": "object"})
    options = RequestOptions.of(params, draft="none", priority=2)
    assert all(getattr(options, field.name) == getattr(params, field.name) for field in dataclasses.fields(params))
    assert (options.draft, options.priority, options.owner) == ("none", 2, "")
    assert RequestOptions.of(options) is options
    assert RequestOptions.of(None) == RequestOptions()
    assert [one.draft for one in options_for([params, options], 2, draft="ngram")] == ["ngram", "ngram"]


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"priority": 0.5}, "priority is 0.5"),
        ({"request_id": ""}, "request_id is ''"),
        ({"drafts": "ngram"}, "did you mean 'draft'"),
    ],
)
def test_wrong_options_of_a_request_are_refused(keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        LLM(model(), "none").generate([1, 2], SamplingParams(max_tokens=1), **keywords)


@pytest.mark.parametrize("params", [{"temperature": 0}, 3])
def test_other_types_of_parameters_are_refused(params: Any) -> None:
    with pytest.raises(InvalidRequestError, match="give SamplingParams"):
        RequestOptions.of(params)
