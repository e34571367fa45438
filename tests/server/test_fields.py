"""Fields without effect are accepted and named, those that would change a response are refused; none is unknown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from draftree.serve.api.responses import ResponsesBody
from draftree.serve.errors import validation_error
from draftree.serve.schema import Body, ChatBody, CompletionBody
from serving import NAME, Running, running_server, settings
from upstream_fields import UPSTREAM

BODIES: dict[str, type[Body]] = {"chat": ChatBody, "completions": CompletionBody, "responses": ResponsesBody}
URLS = {"chat": "/v1/chat/completions", "completions": "/v1/completions", "responses": "/v1/responses"}
PROMPTS: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
    "completions": {"prompt": "hello", "max_tokens": 2},
    "responses": {"input": "hello", "max_output_tokens": 2},
}
ENDPOINTS = pytest.mark.parametrize("endpoint", BODIES)


def post(http: httpx.Client, endpoint: str, **fields: Any) -> httpx.Response:
    return http.post(URLS[endpoint], json={"model": NAME, **PROMPTS[endpoint], **fields})


def error_of(endpoint: str, **fields: Any) -> dict[str, Any]:
    with pytest.raises(ValidationError) as caught:
        BODIES[endpoint].model_validate({**PROMPTS[endpoint], **fields})
    errors = [{**one, "loc": ("body", *one["loc"])} for one in caught.value.errors()]
    error: dict[str, Any] = validation_error(RequestValidationError(errors)).body()["error"]
    return error


def named(answer: httpx.Response) -> list[str]:
    """The fields of the `Warning` headers."""
    return [text.split("'")[1] for text in answer.headers.get_list("warning")]


@pytest.mark.parametrize("server_name", UPSTREAM)
def test_no_field_of_another_server_is_unknown(server_name: str) -> None:
    for endpoint, names in UPSTREAM[server_name].items():
        body = BODIES[endpoint]
        honoured = {field.alias or name for name, field in body.model_fields.items()}
        assert set(names.split()) - honoured - set(body.elsewhere) == set(), endpoint


@ENDPOINTS
def test_fields_without_effect_are_accepted_and_named(http: httpx.Client, endpoint: str) -> None:
    effects = BODIES[endpoint].elsewhere
    for start in range(0, len(effects), 16):
        given = [name for name in list(effects)[start : start + 16] if effects[name].is_ignored]
        answer = post(http, endpoint, **dict.fromkeys(given, "anything"))
        assert answer.status_code == 200, answer.text
        assert named(answer) == given


@ENDPOINTS
def test_values_that_ask_for_nothing_are_accepted_without_a_word(http: httpx.Client, endpoint: str) -> None:
    for place in range(4):
        values = {
            name: [None, *effect.neutral][min(place, len(effect.neutral))]
            for name, effect in BODIES[endpoint].elsewhere.items()
        }
        answer = post(http, endpoint, **values)
        assert answer.status_code == 200, answer.text
        assert named(answer) == []


@ENDPOINTS
def test_fields_that_would_change_the_response_are_refused(endpoint: str) -> None:
    for name, effect in BODIES[endpoint].elsewhere.items():
        if not effect.is_ignored:
            error = error_of(endpoint, **{name: "something"})
            assert (error["param"], error["code"]) == (name, "unsupported_parameter")
            assert error["message"].endswith(effect.reason)


@pytest.mark.parametrize(
    ("endpoint", "field", "hint"),
    [
        ("chat", "temprature", "temperature"),
        ("chat", "n_predict", "max_tokens"),
        ("completions", "n_predict", "max_tokens"),
        ("responses", "n_predict", "max_output_tokens"),
        ("chat", "maxTokens", "max_tokens"),
        ("responses", "instruction", "instructions"),
        ("chat", "unheard_of", "remove it"),
    ],
)
def test_misspelt_fields_are_refused_with_a_suggestion(endpoint: str, field: str, hint: str) -> None:
    error = error_of(endpoint, **{field: 1})
    assert error["param"] == field
    assert hint in error["message"]


@pytest.mark.parametrize(
    ("endpoint", "fields", "warned"),
    [
        ("chat", {"top_logprobs": 0}, []),
        ("chat", {"top_logprobs": 0, "logprobs": False}, []),
        ("chat", {"max_tokens": 2, "verbosity": "medium", "reasoning_effort": "none"}, []),
        ("chat", {"tool_choice": "auto"}, []),
        ("chat", {"chat_template_kwargs": {"enable_thinking": False}}, ["chat_template_kwargs.enable_thinking"]),
        ("chat", {"stream_options": {"include_usage": True}}, ["stream_options"]),
        ("chat", {"service_tier": "flex"}, ["service_tier"]),
        ("chat", {"tools": [{"type": "function", "function": {"name": "f"}}]}, ["tools"]),
        ("chat", {"prediction": {"type": "content", "content": "hello"}}, ["prediction"]),
        ("completions", {"prediction": {"type": "content", "content": "hello"}, "draft": "none"}, ["prediction"]),
        ("responses", {"tool_choice": "auto", "top_logprobs": 0, "reasoning": {"effort": None}}, []),
        ("responses", {"reasoning": {"effort": "none"}, "text": {"verbosity": "medium"}}, []),
        ("responses", {"include": ["reasoning.encrypted_content"], "truncation": "auto"}, ["truncation", "include"]),
        ("responses", {"metadata": {"a": "b"}, "user": "me", "store": False}, []),
    ],
    ids=json.dumps,
)
def test_values_of_real_clients_are_accepted(
    http: httpx.Client, endpoint: str, fields: dict[str, Any], warned: list[str]
) -> None:
    answer = post(http, endpoint, **fields)
    assert answer.status_code == 200, answer.text
    assert named(answer) == warned


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_limit_of_minus_one_is_no_limit(http: httpx.Client, endpoint: str) -> None:
    prompt = {"messages": PROMPTS["chat"]["messages"]} if endpoint == "chat" else {"prompt": "hello"}
    answers = [
        http.post(URLS[endpoint], json={**prompt, "seed": 3, "ignore_eos": True, "truncate_prompt_tokens": 4, **limit})
        for limit in ({"max_tokens": -1}, {"max_tokens": 508})
    ]
    whole, limited = (answer.json()["usage"]["completion_tokens"] for answer in answers)
    assert whole == limited == 508


def test_streams_have_the_header(http: httpx.Client) -> None:
    assert named(post(http, "chat", stream=True, keep_alive="5m", think=True)) == ["keep_alive", "think"]


@pytest.fixture(scope="module")
def strict_server() -> Iterator[Running]:
    with running_server(settings_given=settings(strict_fields=True)) as running:
        yield running


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"keep_alive": "5m"}, "keep_alive"),
        ({"prediction": {"type": "content", "content": "hello"}}, "prediction"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"service_tier": "flex", "stream": True}, "service_tier"),
    ],
)
def test_a_strict_server_refuses_them(strict_server: Running, fields: dict[str, Any], param: str) -> None:
    with httpx.Client(base_url=strict_server.url) as http:
        error = post(http, "chat", **fields).json()["error"]
        assert (error["param"], error["code"]) == (param, "ignored_parameter")
        assert post(http, "chat", store=False, reasoning_effort="none").status_code == 200
