"""Images in the messages of every protocol: the answers are those of the library, and only data URLs are read."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from draftree import AsyncLLM, SamplingParams
from draftree.serve.pool import ServedModel
from draftree.serve.settings import ModelChoice, ServerSettings
from serving import HTTP, Running, running_server
from vision_folders import picture, vision_folder

NAME = "seer"
TOKENS = 8


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vision")


@pytest.fixture(scope="module")
def server(where: Path) -> Iterator[Running]:
    folder = vision_folder("qwen2_5_vl", where)
    (where / "offered").mkdir()
    (where / "offered" / "a b.png").write_bytes(PNG)
    (where / "secret.png").write_bytes(PNG)
    llm = AsyncLLM(folder, "ngram,min=1", dtype="float32", kernels="torch", plan="fixed")
    choice = ModelChoice(NAME, str(folder))
    settings = ServerSettings(models=(choice,), image_folder=str(where / "offered"))
    with running_server([ServedModel(NAME, llm)], settings_given=settings) as running:
        yield running


def png(number: int) -> bytes:
    buffer = io.BytesIO()
    picture(number).save(buffer, "PNG")
    return buffer.getvalue()


PNG = png(1)
BASE64 = base64.b64encode(PNG).decode()
URL = f"data:image/png;base64,{BASE64}"


def expected(server: Running, **part: Any) -> str:
    """What the library writes for the picture."""
    llm = server.llm.llm
    parts = [{"type": "image", **part}, {"type": "text", "text": "w5 w6"}]
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0)
    with_lock = llm.engine.lock.between
    return with_lock(lambda: llm.chat([{"role": "user", "content": parts}], params))[0].text


def parts(url: str = URL) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "w5 w6"}]


def post(server: Running, path: str, body: dict[str, Any]) -> httpx.Response:
    return HTTP.post(server.url + path, json={"model": NAME, **body})


def asked(server: Running, url: str) -> httpx.Response:
    messages = [{"role": "user", "content": parts(url)}]
    return post(server, "/v1/chat/completions", {"messages": messages, "max_tokens": TOKENS, "temperature": 0})


@pytest.mark.parametrize("stream", [False, True])
def test_the_client_of_openai(server: Running, stream: bool) -> None:
    messages: Any = [{"role": "user", "content": parts()}]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer: Any = client.chat.completions.create(
            model=NAME, messages=messages, max_tokens=TOKENS, temperature=0, stream=stream
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in answer) if stream else None
    assert (text if stream else answer.choices[0].message.content) == expected(server, image=PNG)
    if not stream:
        messages[0]["content"] = [{"type": "image", "image": PNG}, messages[0]["content"][1]]
        assert answer.usage.prompt_tokens == len(server.llm.llm.prompts.encode_chat(messages))


def test_the_responses_of_openai(server: Running) -> None:
    content: Any = [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": "w5 w6"}]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.responses.create(
            model=NAME, input=[{"role": "user", "content": content}], max_output_tokens=TOKENS, temperature=0
        )
    assert answer.output_text == expected(server, image=PNG)


def test_the_messages_of_anthropic(server: Running) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": BASE64}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "w5 w6"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": TOKENS, "temperature": 0}
    answer = post(server, "/v1/messages", body).json()
    assert answer["content"][0]["text"] == expected(server, image=PNG)
    content[0]["source"] = {"type": "url", "url": "https://example.org/cat.png"}
    assert "remote URL" in post(server, "/v1/messages", body).json()["error"]["message"]


def test_the_images_of_ollama(server: Running) -> None:
    options = {"stream": False, "options": {"temperature": 0, "num_predict": TOKENS}}
    message = {"role": "user", "content": "w5 w6", "images": [BASE64]}
    chat = post(server, "/api/chat", {"messages": [message], **options}).json()
    assert chat["message"]["content"] == expected(server, image=PNG)
    generated = post(server, "/api/generate", {"prompt": "w5 w6", "images": [BASE64], **options}).json()
    assert generated["response"] == expected(server, image=PNG)
    assert "vision" in post(server, "/api/show", {}).json()["capabilities"]


def test_a_file_of_the_image_folder(server: Running) -> None:
    for url in ("file:a%20b.png", "a b.png", (Path(str(server.server.settings.image_folder)) / "a b.png").as_uri()):
        assert asked(server, url).json()["choices"][0]["message"]["content"] == expected(server, image=PNG)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://example.org/cat.png", "is a remote URL, and these are not fetched"),
        ("../secret.png", "there is no file"),
        ("file:///etc/passwd", "there is no file"),
        ("a\0b", "there is no file"),
        ("data:image/png;base64,???", "is not valid base64"),
    ],
)
def test_other_urls_are_refused(server: Running, url: str, words: str) -> None:
    answer = asked(server, url)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert words in error["message"]
    assert error["param"] == "messages[0].content[0].image_url.url"


def test_half_of_a_surrogate_pair_names_no_file(server: Running) -> None:
    for url in ("file:\ud800", "\ud800"):
        content = [{"type": "image_url", "image_url": {"url": url}}]
        body = json.dumps({"model": NAME, "messages": [{"role": "user", "content": content}]})
        headers = {"content-type": "application/json"}
        answer = HTTP.post(server.url + "/v1/chat/completions", content=body, headers=headers)
        assert answer.status_code == 400
        assert "\\ud800' in the image folder" in answer.json()["error"]["message"]


DAMAGED = base64.b64encode(PNG[:100]).decode()


def test_a_damaged_image_is_refused(server: Running) -> None:
    answer = asked(server, f"data:image/png;base64,{DAMAGED}")
    assert answer.status_code == 400
    assert "the image cannot be read" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "messages[0].content[0].image_url.url"


def test_every_protocol_names_the_field_of_a_wrong_image(server: Running) -> None:
    url = f"data:image/png;base64,{DAMAGED}"
    text = {"type": "text", "text": "w5"}
    block = {"type": "image", "source": {"type": "base64", "data": DAMAGED}}
    result = {"type": "tool_result", "tool_use_id": "call", "content": [text, block]}
    bodies: list[tuple[str, dict[str, Any], str]] = [
        (
            "/v1/messages",
            {"system": "w3", "messages": [{"role": "user", "content": [result, text]}], "max_tokens": 1},
            "messages[0].content[0].content[1].source.data",
        ),
        (
            "/v1/responses",
            {
                "instructions": "w3",
                "input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}],
            },
            "input[0].content[0].image_url",
        ),
        ("/api/chat", {"messages": [{"role": "user", "content": "w5", "images": [BASE64, DAMAGED]}]}, "images[1]"),
        ("/api/generate", {"prompt": "w5", "system": "w3", "images": [DAMAGED]}, "images[0]"),
    ]
    for path, body, place in bodies:
        answer = post(server, path, body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert place in (error if isinstance(error, str) else error["message"]), path


def test_results_of_tools_may_have_images(server: Running) -> None:
    call: dict[str, Any] = {"id": "call", "name": "look", "input": {}}
    image = {"type": "image", "source": {"type": "base64", "data": BASE64}}
    result = {"type": "tool_result", "tool_use_id": "call", "content": [{"type": "text", "text": "w7"}, image]}
    anthropic = {
        "messages": [
            {"role": "user", "content": "w5"},
            {"role": "assistant", "content": [{"type": "tool_use", **call}]},
            {"role": "user", "content": [result, {"type": "text", "text": "w6"}]},
        ],
        "max_tokens": TOKENS,
        "temperature": 0,
    }
    output = [{"type": "input_text", "text": "w7"}, {"type": "input_image", "image_url": URL}]
    responses = {
        "input": [
            {"role": "user", "content": "w5"},
            {"type": "function_call", "call_id": "call", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call", "output": output},
            {"role": "user", "content": "w6"},
        ],
        "max_output_tokens": TOKENS,
        "temperature": 0,
    }
    # the template has no tools: results are texts of the user
    end: dict[str, Any] = {"type": "text", "text": "\n"}
    told = [{"type": "text", "text": "<tool_response>"}, end, {"type": "text", "text": "w7"}]
    told += [{"type": "image", "image": PNG}, end, {"type": "text", "text": "</tool_response>"}, end]
    messages = [
        {"role": "user", "content": "w5"},
        {"role": "assistant", "content": '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'},
        {"role": "user", "content": [*told, {"type": "text", "text": "w6"}]},
    ]
    llm = server.llm.llm
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0)
    wanted = llm.engine.lock.between(lambda: llm.chat(messages, params))[0].text
    assert post(server, "/v1/messages", anthropic).json()["content"][0]["text"] == wanted
    answer = post(server, "/v1/responses", responses).json()
    assert answer["output"][0]["content"][0]["text"] == wanted


def test_tokens_of_an_image_are_counted(server: Running) -> None:
    messages = [{"role": "user", "content": parts()}]
    counted = post(server, "/tokenize", {"messages": messages}).json()
    assert counted["count"] == len(counted["tokens"]) == asked(server, URL).json()["usage"]["prompt_tokens"]
