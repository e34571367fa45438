"""Ollama's protocol: the same texts as chat and plain completions, in its lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from draftree import AsyncLLM
from draftree.serve.pool import ServedModel
from scripted import REASONING, SWITCHED, scripted
from serving import NAME, Running, running_server, tiny_async_llm, tiny_model
from text_backends import byte_level
from tool_templates import HERMES

THOUGHTS, ANSWER = "Rome is\n\nmild.", "It is 18 degrees."
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
BLOCK = f"<think>\n{THOUGHTS}\n</think>\n\n{ANSWER}"
MODELS = {
    "plain": (ANSWER, HERMES),
    "switched": (BLOCK, SWITCHED),
    "calling": (f"<think>\n{THOUGHTS}\n</think>\n\nI look.\n{CALL}\n{CALL}", REASONING),
}
ASK = [{"role": "user", "content": "How is Rome?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Weather", "parameters": PARAMETERS}}
CALLED = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    models = [ServedModel(name, AsyncLLM(draft="ngram", **scripted(*made))) for name, made in MODELS.items()]
    models.append(ServedModel("mute", AsyncLLM(tiny_model(), tokenizer=byte_level(None))))
    with running_server([ServedModel(NAME, tiny_async_llm()), *models]) as running:
        yield running


def ask(http: httpx.Client, path: str = "chat", model: str = "plain", **fields: Any) -> dict[str, Any]:
    """The answer, which must be the same as a whole and in lines."""
    body: dict[str, Any] = {"model": model, "options": {"temperature": 0}, **fields}
    if path == "chat":
        body = {"messages": ASK, **body}
    whole = http.post(f"/api/{path}", json={**body, "stream": False})
    assert whole.status_code == 200, whole.text
    found: dict[str, Any] = whole.json()
    with http.stream("POST", f"/api/{path}", json=body) as answer:
        assert answer.headers["content-type"] == "application/x-ndjson"
        lines = [json.loads(line) for line in answer.iter_lines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert joined(lines) == shown(found)
    assert {key: lines[-1][key] for key in ("done_reason", "prompt_eval_count", "eval_count")} == {
        key: found[key] for key in ("done_reason", "prompt_eval_count", "eval_count")
    }
    return found


def shown(answer: dict[str, Any]) -> dict[str, Any]:
    message = answer.get("message", {"content": answer.get("response"), "thinking": answer.get("thinking")})
    return {key: value for key, value in message.items() if value and key != "role"}


def joined(lines: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for line in lines:
        for key, value in shown(line).items():
            found[key] = found[key] + value if key in found else value
    return found


def test_an_answer(http: httpx.Client) -> None:
    found = ask(http, options={"temperature": 0, "num_ctx": 4096})
    assert found["message"] == {"role": "assistant", "content": ANSWER}
    assert (found["model"], found["done_reason"]) == ("plain", "stop")
    chat = {"model": "plain", "messages": ASK, "temperature": 0}
    usage = http.post("/v1/chat/completions", json=chat).json()["usage"]
    assert (found["prompt_eval_count"], found["eval_count"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert ask(http, model="plain:latest")["message"] == found["message"]


@pytest.mark.parametrize("content_type", [None, "application/x-www-form-urlencoded", "text/plain"])
def test_the_content_type_does_not_matter(http: httpx.Client, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    answer = http.post("/api/generate", content=b'{"model": "plain", "prompt": "Rome?"}', headers=headers)
    assert answer.status_code == 200, answer.text


def test_options(http: httpx.Client) -> None:
    options = {"seed": 5, "num_predict": 12, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "stop": ["zz"]}
    fields = {"seed": 5, "max_tokens": 12, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "stop": ["zz"]}
    wanted = http.post("/v1/chat/completions", json={"model": NAME, "messages": ASK, **fields}).json()["choices"][0]
    found = ask(http, model=NAME, options=options)
    assert found["message"]["content"] == wanted["message"]["content"]
    assert found["done_reason"] == "length"
    assert ask(http, options={"temperature": 0, "num_predict": 10**6})["message"]["content"] == ANSWER


@pytest.mark.parametrize(("think", "has_thinking"), [(None, True), (True, True), (False, False), ("low", True)])
def test_thinking(http: httpx.Client, think: Any, has_thinking: bool) -> None:
    found = ask(http, model="switched", think=think)
    if think != "low":  # the template writes the effort into the prompt, and the script ends there
        assert found["message"].get("thinking") == (THOUGHTS if has_thinking else None)
        assert found["message"]["content"] == ANSWER


def test_calls_and_their_results(http: httpx.Client) -> None:
    found = ask(http, model="calling", tools=[TOOL])
    message = found["message"]
    assert (message["thinking"], message["content"], message["tool_calls"]) == (THOUGHTS, "I look.", [CALLED, CALLED])
    results = [{"role": "tool", "tool_name": "weather", "content": text} for text in ("18 degrees", "19 degrees")]
    second = ask(http, model="calling", tools=[TOOL], messages=[*ASK, message, *results])
    assert second["prompt_eval_count"] > found["prompt_eval_count"] + 30


@pytest.mark.parametrize("form", ["json", {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}])
def test_formats(http: httpx.Client, form: Any) -> None:
    found = ask(http, model=NAME, format=form, options={"seed": 1, "num_predict": 400, "top_k": 50})
    if found["done_reason"] == "stop":
        assert isinstance(json.loads(found["message"]["content"]), dict)
    else:
        assert found["message"]["content"].startswith("{")


def test_logprobs(http: httpx.Client) -> None:
    found = ask(http, logprobs=True, top_logprobs=2)
    assert "".join(entry["token"] for entry in found["logprobs"][:-1]) == ANSWER
    assert {len(entry["top_logprobs"]) for entry in found["logprobs"]} == {2}


def test_generate(http: httpx.Client) -> None:
    options = {"seed": 2, "num_predict": 8}
    answer = ask(http, "generate", prompt="Hello", system="Be brief.", model=NAME, options=options)
    system = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert answer["response"] == ask(http, model=NAME, messages=system, options=options)["message"]["content"]
    raw = ask(http, "generate", prompt="Hello", raw=True, model=NAME, options=options)
    plain = http.post("/v1/completions", json={"model": NAME, "prompt": "Hello", "seed": 2, "max_tokens": 8}).json()
    assert raw["response"] == plain["choices"][0]["text"]
    mute = ask(http, "generate", prompt="Hello", model="mute", options=options)
    assert mute["response"] == raw["response"]
    thought = ask(http, "generate", prompt="How is Rome?", model="switched")
    assert (thought["thinking"], thought["response"]) == (THOUGHTS, ANSWER)


@pytest.mark.parametrize("path", ["chat", "generate"])
def test_a_request_without_a_prompt_asks_for_the_model(http: httpx.Client, path: str) -> None:
    found = http.post(f"/api/{path}", json={"model": "plain", "keep_alive": "5m"})
    assert (found.json()["done"], found.json()["done_reason"]) == (True, "load")
    assert "keep_alive" in found.headers["warning"]


def test_models(http: httpx.Client) -> None:
    names = [model["name"] for model in http.get("/api/tags").json()["models"]]
    assert names[0] == NAME
    assert {*MODELS} < {*names}
    shown = http.post("/api/show", json={"model": "calling"}).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert shown["template"] == REASONING
    assert shown["model_info"]["draftree.context_length"] == 4096


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("chat", {"model": "absent", "messages": ASK}, 404, "'absent' is not served"),
        ("show", {"model": "absent"}, 404, "'absent' is not served"),
        ("chat", {"messages": ASK}, 400, "'model' is missing"),
        ("chat", {"model": NAME, "messages": ASK, "option": {}}, 400, "did you mean 'options'?"),
        ("chat", {"model": NAME, "messages": ASK, "options": {"mirostat": 2}}, 400, "'options.mirostat'"),
        (
            "chat",
            {"model": NAME, "messages": [{"role": "user", "content": "a", "images": ["eA=="]}]},
            400,
            "reads no images",
        ),
        ("generate", {"model": NAME, "prompt": "a", "suffix": "b"}, 400, "fill-in-the-middle"),
        ("generate", {"model": NAME, "prompt": "a", "raw": True, "system": "b"}, 400, "'system'"),
        ("generate", {"model": NAME, "prompt": "a", "context": [1]}, 400, "/api/chat"),
    ],
)
def test_errors_are_texts(http: httpx.Client, path: str, body: dict[str, Any], status: int, words: str) -> None:
    answer = http.post(f"/api/{path}", json=body)
    assert answer.status_code == status
    assert words in answer.json()["error"]
