"""Chat completions through the official client: texts, streams, fields, and what the template formats."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from draftree import AsyncLLM, SamplingParams
from draftree.models.table import TableLM, hashed
from draftree.serve.pool import ServedModel
from reasoning_templates import FAMILIES
from serving import ALIAS, HTTP, NAME, events, plain_llm, running_server

MESSAGES: Any = [{"role": "user", "content": "The quick brown fox"}]


def ask(client: openai.OpenAI, **given: Any) -> Any:
    return client.chat.completions.create(**{"model": NAME, "messages": MESSAGES, "max_tokens": 24, "seed": 7, **given})


def expected(messages: Any = MESSAGES, **given: Any) -> list[Any]:
    return plain_llm().chat(messages, SamplingParams(**{"max_tokens": 24, "seed": 7, **given}))


def texts(answer: Any) -> list[str]:
    return [choice.message.content for choice in answer.choices]


@pytest.mark.essential
def test_text_equals_the_librarys(client: openai.OpenAI) -> None:
    answer = ask(client)
    assert texts(answer) == [done.text for done in expected()]
    assert answer.choices[0].finish_reason == "length"
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == NAME
    assert answer.system_fingerprint.startswith("fp_")


def test_streamed_choices_equal_the_librarys(client: openai.OpenAI) -> None:
    found, reasons, roles = ["", "", ""], {}, []
    for chunk in ask(client, n=3, stream=True):
        (choice,) = chunk.choices
        roles += [choice.delta.role] if choice.delta.role else []
        found[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    assert found == [done.text for done in expected(n=3)]
    assert roles == ["assistant"] * 3
    assert reasons == dict.fromkeys(range(3), "length")


@pytest.mark.parametrize(
    ("fields", "params"),
    [
        ({"temperature": 0}, {"temperature": 0}),
        ({"temperature": 0.7, "top_p": 0.8}, {"temperature": 0.7, "top_p": 0.8}),
        ({"top_k": 5, "min_p": 0.05}, {"top_k": 5, "min_p": 0.05}),
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"presence_penalty": 2, "frequency_penalty": 1}, {"presence_penalty": 2, "frequency_penalty": 1}),
        ({"logit_bias": {"49": 100, "39": 100}}, {"logit_bias": {49: 100, 39: 100}}),
        ({"allowed_token_ids": [49, 39, 18]}, {"allowed_token_ids": [49, 39, 18]}),
        ({"bad_words": ["M"]}, {"bad_words": ["M"]}),
        ({"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 2}),
        (
            {"no_repeat_ngram_size": 1, "ngram_scope": "generated"},
            {"no_repeat_ngram_size": 1, "ngram_scope": "generated"},
        ),
        ({"stop_token_ids": [49]}, {"stop_token_ids": [49]}),
        ({"min_tokens": 20, "stop": ["C", "M"]}, {"min_tokens": 20, "stop": ["C", "M"]}),
        ({"truncate_prompt_tokens": 4}, {"truncate_prompt_tokens": 4}),
        ({"ignore_eos": True, "skip_special_tokens": False}, {"ignore_eos": True, "skip_special_tokens": False}),
    ],
    ids="-".join,
)
def test_sampling_fields_have_the_librarys_meaning(
    http: httpx.Client, fields: dict[str, Any], params: dict[str, Any]
) -> None:
    body = {"model": NAME, "messages": MESSAGES, "max_tokens": 24, "seed": 7, **fields}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    (choice,), (done,) = answer.json()["choices"], expected(**params)
    assert choice["message"]["content"] == done.text
    assert (choice["finish_reason"], choice["stop_reason"]) == (done.finish_reason, done.stop_reason)


def test_the_matched_stop_string_is_reported(http: httpx.Client) -> None:
    body = {"model": NAME, "messages": MESSAGES, "max_tokens": 24, "seed": 7, "stop": ["nothing", "C"]}
    (choice,) = http.post("/v1/chat/completions", json=body).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "C")
    assert "C" not in choice["message"]["content"]
    *_, last = [chunk for chunk in events(http, "/v1/chat/completions", {**body, "stream": True}) if chunk["choices"]]
    assert last["choices"][0]["stop_reason"] == "C"
    kept = {**body, "include_stop_str_in_output": True}
    (choice,) = http.post("/v1/chat/completions", json=kept).json()["choices"]
    assert choice["message"]["content"].endswith("C")


def test_max_completion_tokens_and_the_alias(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=ALIAS, messages=MESSAGES, max_completion_tokens=5, seed=7)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    assert answer.model == NAME


def test_text_parts_and_the_developer_role(client: openai.OpenAI) -> None:
    parts: Any = [
        {"role": "developer", "content": "Be brief"},
        {"role": "user", "content": [{"type": "text", "text": "The quick"}, {"type": "text", "text": "brown fox"}]},
        {"role": "assistant", "content": "jumps"},
        {"role": "user", "content": "over"},
    ]
    plain = [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "The quick\nbrown fox"},
        {"role": "assistant", "content": "jumps"},
        {"role": "user", "content": "over"},
    ]
    assert texts(ask(client, messages=parts)) == [done.text for done in expected(plain)]


def test_stream_with_usage(http: httpx.Client) -> None:
    body = {"model": NAME, "messages": MESSAGES, "max_tokens": 6, "seed": 7, "stream": True}
    body["stream_options"] = {"include_usage": True}
    *chunks, last = events(http, "/v1/chat/completions", body)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 6
    assert last["usage"]["total_tokens"] == 6 + last["usage"]["prompt_tokens"]
    assert {chunk["id"] for chunk in chunks} == {last["id"]}
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_usage_of_every_chunk_counts_the_tokens_that_were_sent(http: httpx.Client) -> None:
    body = {"model": NAME, "messages": MESSAGES, "max_tokens": 20, "seed": 7, "n": 2, "stream": True}
    body |= {"stream_options": {"include_usage": True, "continuous_usage_stats": True}, "return_token_ids": True}
    num_sent = 0
    for chunk in events(http, "/v1/chat/completions", body):
        num_sent += sum(len(choice.get("token_ids", ())) for choice in chunk["choices"])
        assert chunk["usage"]["completion_tokens"] == num_sent
    assert num_sent == 40


def test_cached_tokens_are_reported(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "now the same prompt is sent twice, one after the other, in one test"}]
    first, second = (ask(client, messages=messages, max_tokens=2) for _ in range(2))
    assert first.usage.prompt_tokens == second.usage.prompt_tokens
    assert second.usage.prompt_tokens_details.cached_tokens > first.usage.prompt_tokens_details.cached_tokens


def test_logprobs(client: openai.OpenAI) -> None:
    answer = ask(client, logprobs=True, top_logprobs=3)
    (done,) = expected(logprobs=3)
    content = answer.choices[0].logprobs.content
    assert done.logprobs is not None
    assert [entry.logprob for entry in content] == pytest.approx([entry.logprob for entry in done.logprobs], abs=1e-3)
    assert all(len(entry.top_logprobs) == 3 for entry in content)
    assert b"".join(bytes(entry.bytes) for entry in content).decode(errors="replace") == done.text
    streamed = [
        entry
        for chunk in ask(client, logprobs=True, top_logprobs=3, stream=True)
        for choice in chunk.choices
        for entry in (choice.logprobs.content if choice.logprobs else [])
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]
    assert [entry.bytes for entry in streamed] == [entry.bytes for entry in content]


def test_prompt_logprobs_and_token_ids(http: httpx.Client) -> None:
    body = {"model": NAME, "messages": MESSAGES, "max_tokens": 6, "seed": 7, "prompt_logprobs": 1}
    answer = http.post("/v1/chat/completions", json={**body, "return_token_ids": True}).json()
    (done,) = expected(max_tokens=6)
    assert answer["choices"][0]["token_ids"] == list(done.token_ids)
    rows = answer["prompt_logprobs"]
    assert len(rows) == len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    assert rows[0] is None
    for token, row in zip(answer["prompt_token_ids"][1:], rows[1:], strict=True):
        assert row[str(token)]["logprob"] <= 0
        assert {entry["rank"] for entry in row.values()} == {1, row[str(token)]["rank"]}
    assert any(row[str(token)]["rank"] > 2 for token, row in zip(answer["prompt_token_ids"][1:], rows[1:], strict=True))


def test_streamed_token_ids(http: httpx.Client) -> None:
    body = {"model": NAME, "messages": MESSAGES, "max_tokens": 6, "seed": 7, "stream": True, "return_token_ids": True}
    first, *rest = events(http, "/v1/chat/completions", body)
    assert len(first["prompt_token_ids"]) > 4
    ids = [token for chunk in rest for choice in chunk["choices"] for token in choice["token_ids"]]
    assert ids == list(expected(max_tokens=6)[0].token_ids)


def test_the_request_id_is_part_of_the_id(http: httpx.Client) -> None:
    body = {"model": NAME, "messages": MESSAGES, "max_tokens": 1, "request_id": "mine-1"}
    assert http.post("/v1/chat/completions", json=body).json()["id"] == "chatcmpl-mine-1"


def test_without_a_limit_the_text_fills_the_context(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=NAME, messages=MESSAGES, seed=7, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.total_tokens == 512
    assert answer.choices[0].finish_reason == "length"


def test_an_answer_of_the_client_can_be_sent_back(client: openai.OpenAI) -> None:
    answer = ask(client, max_tokens=4).choices[0].message
    history = [*MESSAGES, answer.model_dump(), {"role": "user", "content": "more"}]
    assert ask(client, messages=history, max_tokens=4).choices[0].message.content


URL = "/v1/chat/completions"
OPEN: list[dict[str, Any]] = [{"role": "user", "content": "The quick"}, {"role": "assistant", "content": "brown fox"}]
BODY: dict[str, Any] = {"model": NAME, "max_tokens": 12, "seed": 3}


def test_the_final_message_is_continued(http: httpx.Client) -> None:
    llm = plain_llm()
    assert llm.tokenizer is not None
    ids = llm.tokenizer.apply_chat_template(OPEN[:1]) + llm.tokenizer.encode_literally("brown fox")
    (done,) = llm.generate([ids], SamplingParams(max_tokens=12, seed=3))
    answer = http.post(URL, json={**BODY, "messages": OPEN, "continue_final_message": True}).json()
    assert answer["choices"][0]["message"]["content"] == done.text
    assert answer["usage"]["prompt_tokens"] == len(ids)


def test_no_header_of_an_answer(http: httpx.Client) -> None:
    llm = plain_llm()
    assert llm.tokenizer is not None
    ids = llm.tokenizer.apply_chat_template(OPEN, add_generation_prompt=False)
    answer = http.post(URL, json={**BODY, "messages": OPEN, "add_generation_prompt": False, "return_token_ids": True})
    assert answer.json()["prompt_token_ids"] == ids


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": OPEN[:1], "continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_what_the_template_cannot_format_is_refused(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    answer = http.post(URL, json={**BODY, "messages": OPEN, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_reasoning_of_an_answer_goes_to_the_template() -> None:
    tokenizer = FAMILIES["glm"].tokenizer()
    question, answer = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
    wanted = tokenizer.apply_chat_template(
        [question, {**answer, "reasoning_content": "Easy sum."}], add_generation_prompt=False
    )
    model = AsyncLLM(TableLM(hashed(len(tokenizer.vocabulary()), seed=1)), tokenizer=tokenizer)
    with running_server([ServedModel(NAME, model)]) as running:

        def ask_with(**fields: Any) -> httpx.Response:
            body = {"messages": [question, {**answer, **fields}], "add_generation_prompt": False}
            return HTTP.post(f"{running.url}/v1/chat/completions", json={**body, "model": NAME, "max_tokens": 1})

        for fields in ({"reasoning_content": "Easy sum."}, {"reasoning": "Easy sum."}):
            assert ask_with(**fields).json()["usage"]["prompt_tokens"] == len(wanted)
        inline = ask_with(content="<think>\nEasy sum.\n</think>\n4")
        assert inline.json()["usage"]["prompt_tokens"] == len(wanted)
        for fields in ({"reasoning": "a", "reasoning_content": "b"}, {"role": "user", "reasoning": "a"}):
            assert ask_with(**fields).json()["error"]["param"] == "messages[1].reasoning"
