"""`beam_options` of the server's beam search: equal to the library, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from draftree import BeamSearchParams, TokenTrie
from serving import NAME, tiny_llm

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
PROMPT = "The quick brown fox"
WIDTH = 4


@pytest.fixture(scope="module")
def library() -> Any:
    return tiny_llm()


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
    names = ["red", "green", "blue"]
    trie = TokenTrie([ids(library, name) for name in names])
    assert texts(client, {"allowed_texts": names}) == expected(library, allowed_trie=trie)
    assert {text for text, _ in texts(client, {"allowed_texts": names})} <= set(names)


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
