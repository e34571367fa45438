from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import pickle
import re
from typing import Any

import numpy as np
import pytest

from draftree.core.errors import InvalidRequestError
from draftree.sampling.params import ELSEWHERE, SamplingParams

NAN = float("nan")

REFUSED: list[tuple[str, Any, str]] = [
    ("n", 0, "at least 1"),
    ("n", True, "whole number"),
    ("n", "2", "whole number"),
    ("temperature", 1e-5, "from 0.0001 to 10000"),
    ("temperature", 1e5, "from 0.0001 to 10000"),
    ("temperature", 10**400, "from 0.0001 to 10000"),
    ("temperature", NAN, "from 0.0001 to 10000"),
    ("temperature", True, "0 (the most likely token)"),
    ("temperature", 1j, "0 (the most likely token)"),
    ("top_p", 0, "above 0 and up to 1"),
    ("top_p", 1.01, "above 0 and up to 1"),
    ("top_k", -2, "at least -1"),
    ("top_k", 5.5, "whole number"),
    ("min_p", 1.5, "from 0 to 1"),
    ("repetition_penalty", 0, "from 0.01 to 100"),
    ("presence_penalty", 2.1, "from -2 to 2"),
    ("frequency_penalty", -2.1, "from -2 to 2"),
    ("logit_bias", [1, 2], "mapping from token ids"),
    ("logit_bias", {-1: 1.0}, "mapping from token ids"),
    ("logit_bias", {"5": 1.0}, "mapping from token ids"),
    ("logit_bias", {5: 101}, "from -100 to 100"),
    ("logit_bias", {5: NAN}, "from -100 to 100"),
    ("logit_bias", {5: False}, "from -100 to 100"),
    ("no_repeat_ngram_size", -1, "at least 0"),
    ("ngram_scope", "prompt", "'all' or 'generated'"),
    ("bad_words", "word", "list of strings"),
    ("bad_words", ["word", ""], "list of strings"),
    ("bad_words", ["  "], "more than spaces"),
    ("min_tokens", -1, "at least 0"),
    ("max_tokens", 0, "at least 1 or None"),
    ("max_tokens", 1.5, "at least 1 or None"),
    ("stop", "", "not empty"),
    ("stop", ["a", ""], "not empty"),
    ("stop", [1], "list of strings"),
    ("stop", b"a", "list of strings"),
    ("stop_token_ids", 3, "list of token ids"),
    ("stop_token_ids", [-1], "list of token ids"),
    ("stop_token_ids", [True], "list of token ids"),
    ("ignore_eos", 1, "True or False"),
    ("include_stop_str_in_output", "yes", "True or False"),
    ("skip_special_tokens", None, "True or False"),
    ("seed", -(2**63) - 1, "whole number from"),
    ("seed", 2**64, "whole number from"),
    ("seed", False, "whole number from"),
    ("logprobs", -2, "at least 0, -1 (all tokens) or None"),
    ("prompt_logprobs", -2, "at least 0, -1 (all tokens) or None"),
    ("truncate_prompt_tokens", 0, "at least 1, -1 (as many as leave room for max_tokens) or None"),
    ("truncate_prompt_tokens", -2, "at least 1, -1"),
    ("truncate_prompt_tokens", "5", "at least 1, -1"),
    ("allowed_token_ids", [], "at least one token id"),
    ("allowed_token_ids", [-1], "list of token ids"),
    ("detokenize", 0, "True or False"),
    ("spaces_between_special_tokens", None, "True or False"),
    ("prediction", "", "at least one"),
    ("prediction", [], "at least one"),
    ("prediction", 3, "list of token ids"),
    ("prediction", [1, "2"], "list of token ids"),
    ("prediction", [-1], "list of token ids"),
    ("json_schema", 3, "a JSON schema"),
    ("json_schema", "{", "a JSON schema"),
    ("json_schema", "", "a JSON schema"),
    ("json_schema", "3", "a JSON schema"),
    ("json_schema", [], "a JSON schema"),
    ("json_schema", {"a": NAN}, "a JSON schema"),
    ("json_schema", {"a": object()}, "a JSON schema"),
    ("regex", "", "not empty"),
    ("regex", b"a", "not empty"),
    ("grammar", 3, "not empty"),
    ("grammar_prefix", 3, "not empty"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), REFUSED)
def test_refuses(name: str, value: Any, allowed: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert caught.value.param == name
    assert name in message
    assert allowed in message
    assert "is refused" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("stop", ["a"] * 65, "65 strings: at most 64"),
        ("stop", "a" * 1025, "1025 characters in one string: at most 1024"),
        ("stop_token_ids", range(4097), "4097 token ids: at most 4096"),
        ("bad_words", ["a"] * 1025, "1025 strings: at most 1024"),
        ("bad_words", ["a" * 257], "257 characters in one string: at most 256"),
        ("allowed_token_ids", np.zeros(2**18 + 1, np.int64), "262145 token ids: at most 262144"),
        ("logit_bias", dict.fromkeys(range(2**18 + 1), 1.0), "262145 token ids: at most 262144"),
        ("prediction", "a" * (2**20 + 1), "1048577 characters: at most 1048576"),
        ("prediction", range(2**20 + 1), "1048577 token ids: at most 1048576"),
    ],
)
def test_sizes_are_limited(name: str, value: Any, limit: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{name} has {limit} are allowed$") as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_a_long_value_is_shortened_in_the_message() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(bad_words=["x" * 5000, ""])
    assert len(str(caught.value)) < 300


def test_every_parameter_is_refused_somewhere_and_has_help() -> None:
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert {name for name, _, _ in REFUSED} == names
    assert all(set(field.metadata) == {"help", "check"} for field in dataclasses.fields(SamplingParams))
    helps = [field.metadata["help"] for field in dataclasses.fields(SamplingParams)]
    assert all(text and "\n" not in text and not text.endswith(".") for text in helps)


@pytest.mark.parametrize(
    ("values", "param", "words"),
    [
        ({"n": 2, "temperature": 0}, "n", ["n=2", "temperature=0", "set n=1"]),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", ["min_tokens=5", "max_tokens=4", "lower the former"]),
        ({"json_schema": {}, "regex": "a"}, "regex", ["json_schema and regex", "keep one"]),
        ({"detokenize": False, "stop": "a"}, "stop", ["detokenize=False", "stop_token_ids"]),
    ],
)
def test_refuses_contradictions(values: dict[str, Any], param: str, words: list[str]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**values)
    assert caught.value.param == param
    assert all(word in str(caught.value) for word in words)


def test_defaults() -> None:
    params = SamplingParams()
    assert dataclasses.asdict(params) == {
        "n": 1, "temperature": None, "top_p": None, "top_k": None, "min_p": None, "repetition_penalty": None,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": None, "no_repeat_ngram_size": 0,
        "ngram_scope": "all", "bad_words": (), "allowed_token_ids": None, "min_tokens": 0, "max_tokens": 16, "stop": (),
        "stop_token_ids": (), "ignore_eos": False,
        "include_stop_str_in_output": False, "detokenize": True, "skip_special_tokens": True,
        "spaces_between_special_tokens": True, "seed": None, "logprobs": None, "prompt_logprobs": None,
        "truncate_prompt_tokens": None,
        "prediction": None, "json_schema": None, "regex": None, "grammar": None,
        "grammar_prefix": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_token", "did you mean 'max_tokens'?"),
        ("max_new_tokens", "did you mean 'max_tokens'?"),
        ("top-p", "did you mean 'top_p'?"),
        ("prompt_logprob", "did you mean 'prompt_logprobs'?"),
        ("num_return_sequences", "did you mean 'n'?"),
        ("do_sample", "temperature=0"),
        ("zzz", "known: allowed_token_ids"),
    ],
)
def test_an_unknown_name_is_refused_with_a_suggestion(name: str, hint: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: 3})
    assert f"unknown sampling parameter '{name}'" in str(caught.value)
    assert hint in str(caught.value)
    assert caught.value.param == name
    with pytest.raises(InvalidRequestError):
        dataclasses.replace(SamplingParams(), **{name: 3})


def test_names_of_other_libraries_are_unknown_here_and_hints_name_what_is_known() -> None:
    known = {field.name for field in dataclasses.fields(SamplingParams)}
    assert not known & ELSEWHERE.keys()
    for hint in ELSEWHERE.values():
        words = set(re.findall(r"\w+", hint))
        assert words & known


def test_the_signature_is_that_of_the_dataclass() -> None:
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    assert list(inspect.signature(SamplingParams).parameters) == names
    assert SamplingParams(2, 0.5) == SamplingParams(n=2, temperature=0.5)


def test_a_seed_of_minus_one_is_a_fresh_one() -> None:
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(seed=-2).seed == -2


def test_limits_are_allowed() -> None:
    SamplingParams(temperature=0, top_p=1, top_k=-1, min_p=1, repetition_penalty=0.01, presence_penalty=-2)
    SamplingParams(temperature=1e-4, logit_bias={0: -100, 1: 100, 2: -math.inf}, min_tokens=3, max_tokens=3)
    SamplingParams(temperature=1e4, max_tokens=None, min_tokens=10**6, seed=2**64 - 1, logprobs=0)
    SamplingParams(seed=-(2**63), logprobs=-1, prompt_logprobs=-1, truncate_prompt_tokens=-1)
    SamplingParams(prompt_logprobs=0, truncate_prompt_tokens=1)


def test_values_are_normalised() -> None:
    params = SamplingParams(
        n=np.int64(2), temperature=np.float32(0.5), top_p=1, stop="###", bad_words=["a"], ignore_eos=np.True_,
        stop_token_ids=np.array([3, 4]), logit_bias={np.int32(7): np.float32(1.5)}, seed=np.uint64(2**64 - 1),
    )  # fmt: skip
    assert (params.stop, params.stop_strings, params.bad_words) == (("###",), ("###",), ("a",))
    assert (params.stop_token_ids, params.logit_bias) == ((3, 4), {7: 1.5})
    for value, kind in [
        (params.n, int), (params.temperature, float), (params.top_p, float), (params.ignore_eos, bool),
        (params.seed, int), (params.stop_token_ids[0], int), (next(iter(params.logit_bias or ())), int),
    ]:  # fmt: skip
        assert type(value) is kind
    assert SamplingParams(logit_bias={}).logit_bias is None
    assert SamplingParams(allowed_token_ids=np.array([4, 3, 4])).allowed_token_ids == (4, 3)


def test_the_callers_mapping_is_copied() -> None:
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 3.0
    assert params.logit_bias == {1: 2.0}


def test_can_be_replaced_copied_and_pickled() -> None:
    params = SamplingParams(stop=["a", "b"], logit_bias={1: 2.0}, seed=3)
    changed = dataclasses.replace(params, temperature=0.5)
    assert changed.temperature == 0.5
    assert dataclasses.replace(changed, temperature=None) == params
    assert copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == params
    with pytest.raises(InvalidRequestError):
        dataclasses.replace(params, top_p=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 4  # type: ignore[misc]
