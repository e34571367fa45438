"""Speculation per request: the drafter, predictions, and what is reported of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from serving import NAME, Running, events, running_server

URL = "/v1/chat/completions"
BODY: dict[str, Any] = {
    "model": NAME,
    "messages": [{"role": "user", "content": "The quick brown fox"}],
    "max_tokens": 40,
    "seed": 7,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_server(draft=("ngram", "suffix", "prediction"), plan="fixed") as running:
        yield running


def ask(http: httpx.Client, **given: Any) -> dict[str, Any]:
    answer = http.post(URL, json={**BODY, **given})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def test_the_drafter_changes_no_text(http: httpx.Client) -> None:
    texts = {text_of(ask(http, draft=draft)) for draft in ("none", "ngram", "suffix", "prediction", None)}
    assert len(texts) == 1


def test_statistics_add_up(http: httpx.Client) -> None:
    text = text_of(ask(http))
    answer = ask(http, prediction={"type": "content", "content": text})
    found = answer["metrics"]["speculative_decoding"]
    histogram = found["acceptance_histogram"]
    assert sum(histogram) == found["num_spec_steps"] > 0
    assert sum(count * rounds for count, rounds in enumerate(histogram)) == found["num_accepted_draft_tokens"] > 0
    assert found["mean_acceptance_length"] == 1 + found["num_accepted_draft_tokens"] / found["num_spec_steps"]
    assert found["draft_acceptance_rate"] == found["num_accepted_draft_tokens"] / found["num_draft_tokens"]
    assert len(histogram) == found["num_spec_tokens"] + 1
    assert "metrics" not in ask(http, draft="none")


def test_accepted_and_rejected_predictions(http: httpx.Client) -> None:
    text = text_of(ask(http))
    parts = [{"type": "text", "text": text[:10]}, {"type": "text", "text": text[10:]}]
    for content in (text, parts):
        answer = ask(http, prediction={"type": "content", "content": content}, temperature=1)
        details = answer["usage"]["completion_tokens_details"]
        found = answer["metrics"]["speculative_decoding"]
        assert details["accepted_prediction_tokens"] == found["num_accepted_draft_tokens"] > 0
        assert text_of(answer) == text
        drafted = details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"]
        assert drafted == found["num_draft_tokens"]


def test_a_prediction_for_another_drafter_is_ignored_with_a_hint(http: httpx.Client) -> None:
    answer = http.post(URL, json={**BODY, "draft": "ngram", "prediction": {"type": "content", "content": "x"}})
    assert text_of(answer.json()) == text_of(ask(http))
    assert "set 'draft' to 'prediction'" in answer.headers["warning"]


@pytest.mark.parametrize("stream", [False, True])
def test_pieces_and_rounds(http: httpx.Client, stream: bool) -> None:
    prediction = {"type": "content", "content": text_of(ask(http))}
    body = {**BODY, "prediction": prediction, "n": 2, "draftree": {"pieces": True, "rounds": True}}
    answers = list(events(http, URL, {**body, "stream": True})) if stream else [ask(http, **body)]
    reports = [answer["draftree"] for answer in answers if "draftree" in answer]
    pieces = [piece for report in reports for piece in report.get("pieces", [])]
    rounds = [row for report in reports for row in report.get("rounds", [])]
    plain = ask(http, n=2)
    for choice in plain["choices"]:
        own = [piece for piece in pieces if piece["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in own) == choice["message"]["content"]
    assert {piece["origin"] for piece in pieces} == {"drafted", "target"}
    accepted = [node for row in rounds for node in row["nodes"] if node["accepted"]]
    assert accepted
    assert {source for node in accepted for source in node["sources"]} == {"prediction"}
    assert all(-1 <= node["parent"] < place for row in rounds for place, node in enumerate(row["nodes"]))
    for row in rounds:
        # the verifier "coupled" walks along the target tokens: at the root and at every accepted node
        ids = [token["id"] for token in row["target_tokens"]]
        assert len(ids) == 1 + len(row["nodes"])
        path = [place for place, node in enumerate(row["nodes"]) if node["accepted"]]
        written = [*(row["nodes"][place]["id"] for place in path), row["bonus"]["id"]]
        assert [ids[place] for place in (0, *(1 + place for place in path))] == written
        assert all({"id", "text"} == set(token) for token in row["target_tokens"])
    stats = reports[-1]["stats"]
    assert [each["completion_tokens"] for each in stats] == [40, 40]
    assert sum(each["rounds"] for each in stats) == len(rounds)
    assert isinstance(reports[-1]["explain"], str)


def test_pieces_of_plain_decoding(http: httpx.Client) -> None:
    found = ask(http, draft="none", draftree={"pieces": True})["draftree"]
    assert {piece["origin"] for piece in found["pieces"]} == {"plain"}
    assert "rounds" not in found


def test_metrics_of_a_stream_come_with_usage(http: httpx.Client) -> None:
    body = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
    *_, last = events(http, URL, body)
    assert last["metrics"]["speculative_decoding"]["num_spec_steps"] > 0
    assert last["usage"]["completion_tokens"] == 40
