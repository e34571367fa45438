"""What cannot be honoured is refused in OpenAI's shape, with the field at fault in `param`."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from tokenizers import Regex, pre_tokenizers

from draftree.async_llm import AsyncLLM
from draftree.core.errors import ModelLoadError
from draftree.serve.pool import ServedModel
from draftree.serve.schema import CompletionBody
from serving import NAME, running_server, tiny_model
from text_backends import byte_level

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
MESSAGES: Any = [{"role": "user", "content": "hello"}]


def refused(http: httpx.Client, url: str, fields: dict[str, Any], status: int = 400) -> dict[str, Any]:
    given = {"messages": MESSAGES} if url == CHAT else {"prompt": "hello"}
    answer = http.post(url, json={"model": NAME, "max_tokens": 4, **given, **fields})
    assert answer.status_code == status, answer.text
    found = answer.json()
    assert found.keys() == {"error"}
    assert found["error"].keys() == {"message", "type", "param", "code"}
    error: dict[str, Any] = found["error"]
    return error


@pytest.mark.parametrize("name", ["prompt", "stop", "stop_token_ids", "allowed_token_ids", "bad_words"])
def test_a_list_of_wrong_items_is_one_error(name: str) -> None:
    with pytest.raises(ValidationError) as caught:
        CompletionBody.model_validate({"prompt": "hello", name: [{}] * 1000})
    assert caught.value.error_count() < 10  # each alternative of a field has one


def test_the_name_of_an_unknown_field_is_shortened(http: httpx.Client) -> None:
    error = refused(http, PLAIN, {"temperatur" + "e" * 100_000: 1})
    assert error["message"].startswith("'temperatureeeeeee")
    assert len(error["message"]) < 200


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": -1},
        {"temperature": "warm"},
        {"temperature": 20000},
        {"top_p": 0},
        {"top_p": 1.5},
        {"n": 0},
        {"n": 1.5},
        {"max_tokens": -2},
        {"max_tokens": 100000},
        {"stop": [""]},
        {"stop": 7},
        {"seed": 2**70},
        {"seed": "x"},
        {"logit_bias": {"a": 1}},
        {"logit_bias": {"5": 200}},
        {"logit_bias": {"5": "much"}},
        {"logit_bias": {"100000": 1}},
        {"presence_penalty": 3},
        {"frequency_penalty": -3},
        {"top_k": -2},
        {"min_p": 2},
        {"repetition_penalty": 0},
        {"min_tokens": 9},
        {"stop_token_ids": [-1]},
        {"allowed_token_ids": []},
        {"allowed_token_ids": [99999]},
        {"bad_words": [""]},
        {"no_repeat_ngram_size": -1},
        {"ngram_scope": "prompt"},
        {"truncate_prompt_tokens": 0},
        {"prompt_logprobs": -2},
        {"request_id": "a b"},
        {"priority": "high"},
        {"draft": "unknown"},
        {"draftree": {"trees": True}},
        {"guided_json": "{"},
        {"guided_regex": "("},
        {"guided_grammar": "not a grammar"},
        {"length_penalty": 2.0},
        {"early_stopping": True},
        {"cache_salt": "x"},
        {"unheard_of": 1},
    ],
    ids=json.dumps,
)
@pytest.mark.parametrize("url", [CHAT, PLAIN])
def test_the_field_is_named(http: httpx.Client, url: str, field: dict[str, Any]) -> None:
    (name,) = field
    param = refused(http, url, field)["param"]
    assert param is not None
    assert param == name or param.startswith((f"{name}.", f"{name}[")), param


@pytest.mark.parametrize(
    ("url", "field"),
    [
        (CHAT, {"audio": {"voice": "alloy", "format": "mp3"}}),
        (CHAT, {"modalities": ["text", "audio"]}),
        (CHAT, {"web_search_options": {}}),
        (CHAT, {"verbosity": "low"}),
        (CHAT, {"functions": [{"name": "f"}]}),
        (CHAT, {"function_call": {"name": "f"}}),
        (CHAT, {"chat_template": "{{ 1 }}"}),
        (CHAT, {"documents": [{"text": "a"}]}),
        (CHAT, {"top_logprobs": 3}),
        (CHAT, {"echo": True}),
        (CHAT, {"best_of": 3}),
        (CHAT, {"messages": []}),
        (CHAT, {"messages": "hello"}),
        (PLAIN, {"suffix": "end"}),
        (PLAIN, {"best_of": 3}),
        (PLAIN, {"prompt": []}),
        (PLAIN, {"prompt": ""}),
        (PLAIN, {"prompt": [5, 99999]}),
        (PLAIN, {"prompt_embeds": "x"}),
    ],
    ids=json.dumps,
)
def test_the_field_of_one_endpoint_is_named(http: httpx.Client, url: str, field: dict[str, Any]) -> None:
    (name,) = field
    assert refused(http, url, field)["param"] == name


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "wizard", "content": "a"}, "messages"),
        ({"role": "", "content": "a"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content[0]"),
        ({"role": "user", "content": "a", "contents": "red"}, "messages[0].contents"),
        ({"role": "user", "content": "a", "audio": {"id": "x"}}, "messages[0].audio"),
    ],
)
def test_the_part_of_a_message_is_named(http: httpx.Client, message: dict[str, Any], param: str) -> None:
    assert refused(http, CHAT, {"messages": [message]})["param"].startswith(param)


def test_null_asks_for_nothing(http: httpx.Client) -> None:
    fields = {"best_of": 1, "use_beam_search": False, **dict.fromkeys(("logit_bias", "stop", "n", "seed", "tools"))}
    answer = http.post(CHAT, json={"model": NAME, "messages": MESSAGES, "max_tokens": 2, **fields})
    assert answer.status_code == 200, answer.text


def test_several_equal_texts(http: httpx.Client) -> None:
    error = refused(http, CHAT, {"n": 2, "temperature": 0})
    assert "temperature=0" in error["message"]
    assert error["param"] in ("n", "temperature")


def test_an_unknown_model(http: httpx.Client) -> None:
    error = refused(http, CHAT, {"model": "other"}, 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'tiny'" in error["message"]


@pytest.mark.parametrize("lark", ['start: "a" | "b"', "%llguidance {}\nstart: /a/", '?start: x\nx.2: "a"'])
def test_lark_grammars_are_refused_with_the_alternative(http: httpx.Client, lark: str) -> None:
    error = refused(http, CHAT, {"structured_outputs": {"grammar": lark}})
    assert error["param"] == "structured_outputs"
    assert "root ::=" in error["message"]


def test_two_constraints(http: httpx.Client) -> None:
    fields = {"response_format": {"type": "json_object"}, "guided_regex": "a+"}
    assert refused(http, CHAT, fields)["param"] == "guided_regex"


@pytest.mark.parametrize("content", [b"{", b"", b"[]", b"1", b'{"model": NaN', b"\xff\xfe", b'"\\ud800"'])
def test_bodies_that_are_no_object(http: httpx.Client, content: bytes) -> None:
    answer = http.post(CHAT, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_half_a_surrogate_pair(http: httpx.Client) -> None:
    text = json.dumps({"model": NAME, "messages": [{"role": "user", "content": "\ud800"}]})
    answer = http.post(CHAT, content=text, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("messages")


def test_unknown_paths_and_methods(http: httpx.Client) -> None:
    missing, wrong = http.get("/v1/nothing"), http.get(CHAT)
    assert (missing.status_code, wrong.status_code) == (404, 405)
    assert wrong.headers["allow"] == "POST"
    for answer in (missing, wrong):
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}


def test_an_error_is_returned_before_a_stream_begins(http: httpx.Client) -> None:
    error = refused(http, CHAT, {"stream": True, "max_tokens": 100000})
    assert error["param"] == "max_tokens"


def test_an_unexpected_error_shows_no_details(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("/home/secret/path")

    monkeypatch.setattr("draftree.serve.api.chat.chat_options", fail)
    for stream in (False, True):
        answer = http.post(CHAT, json={"model": NAME, "messages": MESSAGES, "stream": stream})
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        assert "secret" not in answer.text
        assert "Traceback" not in answer.text
    assert "/home/secret/path" in caplog.text


def test_an_error_that_names_files_shows_no_details(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise ModelLoadError("the weights in /home/secret/path are damaged")

    monkeypatch.setattr("draftree.serve.api.completions.completion_options", fail)
    answer = http.post(PLAIN, json={"model": NAME, "prompt": "hello"})
    assert answer.status_code == 500
    assert "secret" not in answer.text


def test_the_first_model_is_the_default(http: httpx.Client) -> None:
    answer = http.post(PLAIN, json={"prompt": "hello", "max_tokens": 1})
    assert answer.json()["model"] == NAME


def test_a_panic_of_the_tokenizer_is_refused_in_the_shape_of_openai() -> None:
    backend = byte_level()
    backend.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    text = "a" * 40 + "b"
    models = [ServedModel(NAME, AsyncLLM(tiny_model(), "none", tokenizer=backend))]
    with running_server(models) as running, httpx.Client(base_url=running.url, timeout=60) as client:
        for url, fields in ((PLAIN, {"prompt": text}), (CHAT, {"messages": [{"role": "user", "content": text}]})):
            assert "cannot encode this" in refused(client, url, fields)["message"]
        refused(client, PLAIN, {"bad_words": [text]})
        assert client.get("/health").status_code == 200
