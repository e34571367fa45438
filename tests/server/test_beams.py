"""Beam searches through the official client: texts and options equal to the library, limits, metrics, and refusals."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from draftree import BeamResult, BeamSearchParams, TokenTrie
from draftree.beam.background import BeamCounts
from operated import held, num_calls, wait_for
from serving import HTTP, NAME, Running, running_server, send, settings, tiny_llm

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]
PROMPT = "The quick brown fox"
BEAMS = {"use_beam_search": True}


def vllm(**given: Any) -> BeamSearchParams:
    return BeamSearchParams.preset("vllm", **given)


@pytest.fixture(scope="module")
def library() -> Any:
    return tiny_llm()


def test_texts_are_those_of_the_library(client: openai.OpenAI, library: Any) -> None:
    answer = client.completions.create(model=NAME, prompt=PROMPT, n=4, max_tokens=12, logprobs=0, extra_body=BEAMS)
    (expected,) = library.beam_search(PROMPT, vllm(beam_width=4, max_new_tokens=12))
    assert [choice.text for choice in answer.choices] == [found.text for found in expected.hypotheses]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    scores = [choice.model_extra["score"] for choice in answer.choices]  # type: ignore[index]
    assert scores == pytest.approx([found.score for found in expected.hypotheses])
    assert scores == sorted(scores, reverse=True)
    assert [choice.finish_reason for choice in answer.choices] == [f.finish_reason for f in expected.hypotheses]
    for choice, found in zip(answer.choices, expected.hypotheses, strict=True):
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == pytest.approx(list(found.token_logprobs))


@pytest.mark.parametrize(
    "fields",
    [
        {"best_of": 6},
        {"length_penalty": 0.0},
        {"length_penalty": 2.0, "early_stopping": True},
        {"early_stopping": False},
        {"early_stopping": "never"},
        {"ignore_eos": True},
        {"no_repeat_ngram_size": 2},
        {"min_tokens": 9},
        {"stop_token_ids": [5, 6, 7, 8, 9]},
    ],
    ids=json.dumps,
)
def test_fields_have_the_meaning_of_the_parameters(client: openai.OpenAI, library: Any, fields: dict[str, Any]) -> None:
    names = {"min_tokens": "min_new_tokens", "best_of": "beam_width"}
    given = {"beam_width": 3} | {names.get(name, name): value for name, value in fields.items()}
    (expected,) = library.beam_search(PROMPT, vllm(num_return_sequences=3, max_new_tokens=14, **given))
    answer = client.completions.create(model=NAME, prompt=PROMPT, n=3, max_tokens=14, extra_body={**BEAMS, **fields})
    assert [choice.text for choice in answer.choices] == [found.text for found in expected.hypotheses]


def test_temperature_0_is_the_models_own_distribution(client: openai.OpenAI) -> None:
    found = [
        client.completions.create(model=NAME, prompt=PROMPT, n=3, temperature=heat, extra_body=BEAMS).choices
        for heat in (0, 1, 0.4)
    ]
    assert [choice.text for choice in found[0]] == [choice.text for choice in found[1]]
    assert found[0][0].model_extra != found[2][0].model_extra


def test_a_stop_string_ends_texts(client: openai.OpenAI, library: Any) -> None:
    (plain,) = library.beam_search(PROMPT, vllm(beam_width=3, max_new_tokens=20))
    stop = plain.text[4:6]
    for keeps in (False, True):
        fields = {**BEAMS, "include_stop_str_in_output": keeps}
        answer = client.completions.create(model=NAME, prompt=PROMPT, n=3, max_tokens=20, stop=stop, extra_body=fields)
        ended = [choice for choice in answer.choices if choice.model_extra["stop_reason"] == stop]  # type: ignore[index]
        assert ended
        for choice in ended:
            assert choice.finish_reason == "stop"
            assert choice.text.endswith(stop) if keeps else stop not in choice.text


def test_a_chat_is_answered(client: openai.OpenAI, library: Any) -> None:
    answer = client.chat.completions.create(
        model=NAME, messages=MESSAGES, n=3, max_completion_tokens=8, logprobs=True, extra_body=BEAMS
    )
    (expected,) = library.beam_search(MESSAGES, vllm(beam_width=3, max_new_tokens=8))
    for choice, found in zip(answer.choices, expected.hypotheses, strict=True):
        assert choice.message.content == found.text
        assert choice.logprobs is not None
        assert [entry.logprob for entry in choice.logprobs.content or []] == pytest.approx(list(found.token_logprobs))


def test_a_chat_without_a_limit_is_limited_by_the_server(http: httpx.Client) -> None:
    body = {"model": NAME, "messages": MESSAGES, "n": 16, "use_beam_search": True, "ignore_eos": True}
    found = http.post(CHAT, json=body).json()
    assert found["usage"]["completion_tokens"] == 16 * (4096 // 16)


def test_usage_counts_the_returned_texts(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=NAME, prompt=PROMPT, n=2, best_of=4, max_tokens=9, extra_body={**BEAMS, "return_token_ids": True}
    )
    ids = [choice.model_extra["token_ids"] for choice in answer.choices]  # type: ignore[index]
    prompt = answer.choices[0].model_extra["prompt_token_ids"]  # type: ignore[index]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(map(len, ids))
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.total_tokens == len(prompt) + sum(map(len, ids))


def test_several_prompts_and_echo(client: openai.OpenAI, library: Any) -> None:
    prompts = [PROMPT, "one two"]
    answer = client.completions.create(
        model=NAME, prompt=prompts, n=2, max_tokens=6, logprobs=None, echo=True, extra_body=BEAMS
    )
    expected: list[BeamResult] = library.beam_search(prompts, vllm(beam_width=2, max_new_tokens=6))
    texts = [prompt + (f.text or "") for prompt, r in zip(prompts, expected, strict=True) for f in r.hypotheses]
    assert [choice.text for choice in answer.choices] == texts
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "field",
    [
        {"stream": True},
        {"top_p": 0.5},
        {"top_k": 5},
        {"min_p": 0.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.5},
        {"logit_bias": {"5": 3}},
        {"allowed_token_ids": [3]},
        {"bad_words": ["fox"]},
        {"prompt_logprobs": 1},
        {"skip_special_tokens": False},
        {"draft": "ngram"},
        {"prediction": {"type": "content", "content": "hello"}},
        {"draftree": {"rounds": True}},
        {"response_format": {"type": "json_object"}},
        {"guided_regex": "a+"},
        {"n": 5, "best_of": 2},
        {"n": 17},
        {"max_tokens": 5000},
        {"n": 16, "max_tokens": 300},
        {"length_penalty": 1000},
        {"early_stopping": "fcfs"},
        {"min_tokens": 50, "max_tokens": 5},
    ],
    ids=json.dumps,
)
@pytest.mark.parametrize("url", [CHAT, PLAIN])
def test_a_field_that_cannot_hold_is_named(http: httpx.Client, url: str, field: dict[str, Any]) -> None:
    check_refused(http, url, field)


def check_refused(http: httpx.Client, url: str, field: dict[str, Any]) -> None:
    prompt = {"messages": MESSAGES} if url == CHAT else {"prompt": PROMPT}
    answer = http.post(url, json={"model": NAME, **prompt, **BEAMS, **field})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] in field


def test_a_field_of_one_endpoint_is_named(http: httpx.Client) -> None:
    check_refused(http, PLAIN, {"logprobs": 2})
    check_refused(http, PLAIN, {"logprobs": 0, "echo": True})
    check_refused(http, CHAT, {"logprobs": True, "top_logprobs": 2})
    check_refused(http, CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]})
    check_refused(http, CHAT, {"tool_choice": "required"})


def test_fields_that_ask_for_nothing_pass(http: httpx.Client) -> None:
    neutral: dict[str, Any] = {
        "stream": False, "top_p": 1, "top_k": -1, "min_p": 0, "presence_penalty": 0, "frequency_penalty": 0.0,
        "repetition_penalty": 1, "logit_bias": {}, "bad_words": [], "skip_special_tokens": True, "draft": "none",
        "draftree": {}, "response_format": {"type": "text"}, "seed": 7, "user": "u", "priority": 3,
    }  # fmt: skip
    body = {"model": NAME, "prompt": PROMPT, "n": 2, **BEAMS}
    plain, found = http.post(PLAIN, json=body).json(), http.post(PLAIN, json={**body, **neutral}).json()
    assert found["choices"] == plain["choices"]


def test_a_text_beyond_the_context_is_refused(http: httpx.Client) -> None:
    body = {"model": NAME, "prompt": [5] * 500, "max_tokens": 13, **BEAMS}
    error = http.post(PLAIN, json=body).json()["error"]
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
    assert "set max_tokens to 12" in error["message"]
    cut = http.post(PLAIN, json={**body, "truncate_prompt_tokens": 4, "return_token_ids": True}).json()
    assert cut["choices"][0]["prompt_token_ids"] == [5] * 4


@pytest.fixture(scope="module")
def long() -> Iterator[Running]:
    """A server that takes searches of many tokens."""
    with running_server(settings_given=settings(max_beam_tokens=4000)) as running:
        yield running


def test_a_client_that_leaves_ends_its_search(long: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"model": NAME, "prompt": PROMPT, "n": 8, "max_tokens": 480, "ignore_eos": True, **BEAMS}
    goes_on, step, before = threading.Event(), long.llm._beams.step, long.llm.beam_counts

    def one_step(*, is_alone: bool) -> None:
        step(is_alone=is_alone)
        goes_on.wait()

    monkeypatch.setattr(long.llm._beams, "step", one_step)
    connection = send(long, PLAIN, body)
    wait_for(lambda: long.llm.beam_counts.running)
    connection.close()
    wait_for(lambda: num_calls(long))
    goes_on.set()
    wait_for(lambda: not long.llm.beam_counts.running)
    wait_for(lambda: not long.server.num_active)
    after = long.llm.beam_counts
    assert (after.finished, after.steps) == (before.finished, before.steps + 1), "it was not searched to the end"


def test_streams_go_on_beside_a_search(long: Running) -> None:
    body = {"model": NAME, "prompt": PROMPT, "n": 8, "max_tokens": 400, "ignore_eos": True, **BEAMS}
    counts: list[BeamCounts] = []
    chunks: list[Any] = []

    def read() -> None:
        with openai.OpenAI(base_url=f"{long.url}/v1", api_key="none", max_retries=0) as client:
            options: Any = {"seed": 1, "stream": True, "extra_body": {"ignore_eos": True}}
            chunks.extend(client.completions.create(model=NAME, prompt=PROMPT, max_tokens=20, **options))

    reader, remove = (
        threading.Thread(target=read),
        long.llm.on_round(lambda record: counts.append(long.llm.beam_counts)),
    )
    with held(long):
        connection = send(long, PLAIN, body)
        wait_for(lambda: num_calls(long) == 1)
        reader.start()
        wait_for(lambda: num_calls(long) == 2)
    reader.join()
    remove()
    assert chunks
    assert counts[-1].running, "the stream has ended before the search"
    steps = [each.steps for each in counts]
    assert max(late - early for early, late in itertools.pairwise(steps)) == 1
    connection.close()
    wait_for(lambda: not long.server.num_active)


def test_a_server_may_refuse_searches() -> None:
    with running_server(settings_given=settings(max_beam_tokens=0)) as running:
        answer = HTTP.post(f"{running.url}{PLAIN}", json={"model": NAME, "prompt": PROMPT, **BEAMS})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "use_beam_search"


def test_metrics_count_searches(http: httpx.Client, client: openai.OpenAI) -> None:
    def value(name: str) -> float:
        lines = http.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith(name + "{")).rsplit(" ", 1)[1])

    finished, steps = value("draftree_beam_searches_total"), value("draftree_beam_steps_total")
    client.completions.create(model=NAME, prompt=PROMPT, n=2, max_tokens=5, extra_body={**BEAMS, "ignore_eos": True})
    assert value("draftree_beam_searches_total") == finished + 1
    assert value("draftree_beam_steps_total") == steps + 5
    assert value("draftree_beam_searches_running") == 0


WIDTH = 4


def ids(library: Any, text: str) -> list[int]:
    found: list[int] = library.prompts.encode_text(text, add_special_tokens=False)
    return found


def texts(client: openai.OpenAI, options: dict[str, Any], **fields: Any) -> list[tuple[str, float]]:
    body = {"use_beam_search": True, "beam_options": options, **fields}
    answer = client.completions.create(model=NAME, prompt=PROMPT, n=WIDTH, max_tokens=12, extra_body=body)
    return [(choice.text, pytest.approx(choice.model_extra["score"], abs=1e-5)) for choice in answer.choices]  # type: ignore[index]


def expected(library: Any, **given: Any) -> list[tuple[str, float]]:
    (found,) = library.beam_search(
        PROMPT, BeamSearchParams.preset("vllm", beam_width=WIDTH, max_new_tokens=12, **given)
    )
    return [(one.text, one.score) for one in found.hypotheses]


@pytest.mark.parametrize(
    "options",
    [
        {"num_beam_groups": 2, "diversity_penalty": 2.0},
        {"num_beam_groups": 2, "diversity_penalty": 2.0, "diversity_discount": 0.5},
        {"sibling_penalty": 1.5},
        {"force_words_ids": [[5], [7, 8]]},
        {"force_words_ids": [[5], [7, 8]], "ordered": True, "strict": True},
        {"length_basis": "generated"},
        {"eos_rule": "walk", "force_eos": "model_score"},
        {"unk_token_id": "likeliest", "unk_penalty": 3.0},
        {"suppress_tokens": ["likeliest"]},
        {"prefix_token_ids": [9, 4], "count_prefix": False},
        {"prefix_token_ids": [9, 4], "prefix_bias_beta": 0.5},
        {"length_bounds": [0, 2, 0, 5]},
        {"match_source_len": True},
        {"max_len_ratio": 0.5},
        {"sampling": "beam", "top_k": 20},
        {"sampling": "independent", "top_p": 0.9},
    ],
    ids=json.dumps,
)
def test_options_have_the_meaning_of_the_parameters(
    client: openai.OpenAI, library: Any, options: dict[str, Any]
) -> None:
    draws = {"seed": 11} if "sampling" in options else {}
    if options.get("sampling") == "independent":
        options = options | {"eos_rule": "top_k"}
    (plain,) = library.beam_search(PROMPT, BeamSearchParams(beam_width=1, max_new_tokens=1))
    options = json.loads(json.dumps(options).replace('"likeliest"', str(plain.best.tokens[0])))
    wanted = expected(library, **options, **draws)
    assert texts(client, options, **draws) == wanted
    assert wanted != expected(library)


def test_phrases_and_allowed_texts_are_encoded(client: openai.OpenAI, library: Any) -> None:
    found = texts(client, {"force_phrases": ["xy", "fox"], "strict": True})
    assert found == expected(library, force_words_ids=[ids(library, "xy"), ids(library, "fox")], strict=True)
    assert all("xy" in text and "fox" in text for text, _ in found)
    names = ["red", "redder", "blue"]
    trie = TokenTrie([ids(library, name) for name in names])
    assert texts(client, {"allowed_texts": names}) == expected(library, allowed_trie=trie)
    assert {text for text, _ in texts(client, {"allowed_texts": names})} == set(names)


def test_chats_take_options(http: httpx.Client) -> None:
    body = {"model": NAME, "messages": [{"role": "user", "content": "hello"}], "n": 2, "max_tokens": 12}
    body |= {"use_beam_search": True, "beam_options": {"force_phrases": ["fox"], "strict": True}}
    answer = http.post(CHAT, json=body).raise_for_status().json()
    assert all("fox" in choice["message"]["content"] for choice in answer["choices"])


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"num_beam_group": 2}, "num_beam_group"),
        ({"beam_width": 2}, "beam_width"),
        ({"seed": 2}, "seed"),
        ({"lm_model": "tiny"}, "lm_model"),
        ({"num_beam_groups": 3}, "num_beam_groups"),
        ({"num_beam_groups": 2, "sibling_penalty": 1.0}, "num_beam_groups"),
        ({"force_phrases": "fox"}, "force_phrases"),
        ({"force_phrases": []}, "force_phrases"),
        ({"force_phrases": ["a"] * 65}, "force_phrases"),
        ({"force_phrases": ["a"], "force_words_ids": [[3]]}, "force_words_ids"),
        ({"force_phrases": ["a"], "num_beam_groups": 2}, "num_beam_groups"),
        ({"force_words_ids": [[3]] * 65}, "force_words_ids"),
        ({"force_words_ids": [[100000]]}, "force_words_ids"),
        ({"length_basis": "words"}, "length_basis"),
        ({"coverage_penalty": 1.0}, "coverage_penalty"),
        ({"ordered": True}, "ordered"),
        ({"top_k": 5}, "top_k"),
    ],
    ids=json.dumps,
)
def test_an_option_that_cannot_hold_is_named(http: httpx.Client, options: dict[str, Any], param: str) -> None:
    body = {"model": NAME, "prompt": PROMPT, "n": WIDTH, "max_tokens": 12, "use_beam_search": True}
    answer = http.post(PLAIN, json={**body, "beam_options": options})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == f"beam_options.{param}"


def test_the_limit_of_the_server_holds_for_lengths_by_the_prompt(http: httpx.Client) -> None:
    body = {"model": NAME, "prompt": PROMPT, "n": 16, "max_tokens": 12, "use_beam_search": True}
    error = http.post(PLAIN, json={**body, "beam_options": {"max_len_ratio": 100}}).json()["error"]
    assert (error["param"], "4096" in error["message"]) == ("beam_options.max_len_ratio", True)


@pytest.mark.parametrize("url", [CHAT, PLAIN, "/v1/responses"])
def test_options_without_beam_search_are_refused(http: httpx.Client, url: str) -> None:
    prompt = {CHAT: {"messages": [{"role": "user", "content": "hello"}]}, PLAIN: {"prompt": PROMPT}}
    body = {"model": NAME, **prompt.get(url, {"input": PROMPT}), "beam_options": {"sibling_penalty": 1.0}}
    answer = http.post(url, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "beam_options"
    assert http.post(url, json=body | {"beam_options": {}}).status_code == 200
