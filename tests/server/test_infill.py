"""Fill-in-the-middle: `suffix` of completions and llama.cpp's /infill, for tokenizers that have the tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken

from draftree import AsyncLLM
from draftree.models.table import TableLM, hashed
from draftree.serve.pool import ServedModel
from serving import NAME, Running, running_server, tiny_async_llm
from text_backends import byte_level

GAP = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", "<|endoftext|>")
REVERSED = ("[PREFIX]", "[SUFFIX]")


def with_tokens(names: tuple[str, ...]) -> Any:
    backend = byte_level(None)
    backend.add_tokens([AddedToken(name, normalized=False, special=True) for name in names], special_tokens=True)
    return backend


BACKENDS = {"gap": with_tokens(GAP), "reversed": with_tokens(REVERSED)}
BEFORE, AFTER = "def add(first, second):\n    return", "\n\nprint(add(1, 2))\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    models = [
        ServedModel(name, AsyncLLM(TableLM(hashed(len(backend), 1, scale=3.0)), "ngram", tokenizer=backend))
        for name, backend in BACKENDS.items()
    ]
    with running_server([*models, ServedModel(NAME, tiny_async_llm())]) as running:
        yield running


def ids(model: str, *parts: str) -> list[int]:
    """The ids of texts, and of special tokens, one by one."""
    backend = BACKENDS[model]
    return [token for part in parts for token in backend.encode(part, add_special_tokens=False)]


def completed(http: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = http.post("/v1/completions", json={"seed": 3, "max_tokens": 20, **body})
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return {**choice, "prompt_tokens": answer.json()["usage"]["prompt_tokens"]}


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        ("gap", ("<|fim_prefix|>", BEFORE, "<|fim_suffix|>", AFTER, "<|fim_middle|>")),
        ("reversed", ("[SUFFIX]", AFTER, "[PREFIX]", BEFORE)),
    ],
)
def test_a_suffix_is_read_with_the_tokens_of_a_gap(http: httpx.Client, model: str, parts: tuple[str, ...]) -> None:
    wanted = completed(http, model=model, prompt=ids(model, *parts))
    assert completed(http, model=model, prompt=BEFORE, suffix=AFTER) == wanted
    assert completed(http, model=model, prompt=BEFORE, suffix="") == completed(http, model=model, prompt=BEFORE)
    echoed = completed(http, model=model, prompt=BEFORE, suffix=AFTER, echo=True)
    assert echoed["text"] == BEFORE + wanted["text"]


def test_infill_has_other_files_before_the_gap(http: httpx.Client) -> None:
    body = {"input_prefix": BEFORE[:-3], "prompt": BEFORE[-3:], "input_suffix": AFTER, "n_predict": 20, "seed": 3}
    body |= {"model": "gap", "input_extra": [{"filename": "a.py", "text": "x = 1"}], "samplers": ["top_k", "infill"]}
    parts = ("<|file_sep|>", "a.py\nx = 1\n", "<|fim_prefix|>", BEFORE, "<|fim_suffix|>", AFTER, "<|fim_middle|>")
    wanted = completed(http, model="gap", prompt=ids("gap", *parts))
    answer = http.post("/infill", json=body)
    found = answer.json()
    assert found["content"] == wanted["text"]
    assert (found["stop"], found["stop_type"], found["tokens_predicted"]) == (True, "limit", 20)
    assert found["tokens_evaluated"] == wanted["prompt_tokens"]
    assert "'samplers'" in answer.headers["warning"]
    with http.stream("POST", "/infill", json={**body, "stream": True}) as stream:
        chunks = [json.loads(line.removeprefix("data: ")) for line in stream.iter_lines() if line.startswith("data")]
    assert "".join(chunk["content"] for chunk in chunks) == found["content"]
    assert [chunk["stop"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


@pytest.mark.parametrize("end", ["<|endoftext|>", "<|file_sep|>"])
def test_a_gap_ends_at_the_next_file(http: httpx.Client, end: str) -> None:
    (token,) = ids("gap", end)
    body = {"model": "gap", "prompt": BEFORE, "logit_bias": {str(token): 100}}
    assert completed(http, **body, suffix=AFTER)["finish_reason"] == "stop"
    assert completed(http, **body)["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"model": NAME, "prompt": "a", "suffix": "b"}, "suffix"),
        ("/infill", {"model": NAME, "input_prefix": "a", "input_suffix": "b"}, "input_suffix"),
        ("/v1/completions", {"model": "gap", "prompt": [5], "suffix": "b"}, "suffix"),
        ("/v1/completions", {"model": "gap", "prompt": "a", "suffix": "b", "use_beam_search": True}, "suffix"),
        (
            "/v1/completions",
            {"model": "gap", "prompt": "a", "suffix": "b", "truncate_prompt_tokens": 3},
            "truncate_prompt_tokens",
        ),
        ("/v1/completions", {"model": "gap", "prompt": "a", "suffix": "b" * 10**6}, None),
        ("/infill", {"input_prefix": "a"}, "input_suffix"),
    ],
)
def test_refusals(http: httpx.Client, path: str, body: dict[str, Any], param: str | None) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
