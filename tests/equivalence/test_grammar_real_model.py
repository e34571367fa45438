"""Records of a real model parse and equal plain decoding's, with copied, counted and model drafts, in a batch."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from draftree import LLM, SamplingParams
from paced import steady
from real_weights import loaded_float32

pytestmark = pytest.mark.weights

NAME = "smollm2-135m-instruct"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "nationality": {"type": "string", "enum": ["British", "French", "Japanese", "Polish"]},
    },
    "required": ["name", "age", "nationality"],
}
TALKS = [
    "Write a record of this person in JSON: Ada Lovelace, a British mathematician of 36 years.",
    "Write a record of this person in JSON: Marie Curie, a Polish physicist and chemist, 66 years old.",
]


def records(draft: str | None, temperature: float) -> list[Any]:
    conversations = [[{"role": "user", "content": talk}] for talk in TALKS]
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=4, top_p=0.95, json_schema=SCHEMA)
    return LLM(loaded_float32(NAME), draft, plan=steady(draft)).chat(conversations, params)


@functools.cache
def plainly(temperature: float) -> list[Any]:
    return records(None, temperature)


@pytest.mark.parametrize(
    ("draft", "temperature"),
    [
        ("ngram", 0.0),
        ("suffix", 1.0),
        (f"model:{NAME},k=4", 0.0),
        (f"suffix+model:{NAME},tree=best-8", 1.0),
    ],
)
def test_records_of_a_batch_parse_and_are_plain(draft: str, temperature: float) -> None:
    done, plain = records(draft, temperature), plainly(temperature)
    assert [(one.text, one.token_ids) for one in done] == [(one.text, one.token_ids) for one in plain]
    for one, slow in zip(done, plain, strict=True):
        record = json.loads(one.text)
        assert one.finish_reason == "stop"
        assert list(record) == list(SCHEMA["properties"])  # type: ignore[call-overload]
        assert 0 <= record["age"] <= 120
        assert record["nationality"] in ("British", "French", "Japanese", "Polish")
        assert one.stats.rounds <= 0.75 * slow.stats.rounds
        if "model" not in draft:  # a model guesses under the mask what is forced, too
            assert one.stats.accepted_by_source["grammar"] >= 3
