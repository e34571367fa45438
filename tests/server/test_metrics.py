"""Metrics: counts of requests and rounds, vLLM's names, the dashboard, registries."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from draftree.core.types import RoundRecord, SequenceRecord
from draftree.serve.metrics import Histogram, ModelMeter, merged
from serving import HTTP, NAME, Running, running_server

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "draftree.json"
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "operating.md"
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class FakeClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def row(written: int, drafted: int = 4, *, request_id: str = "a", index: int = 0) -> SequenceRecord:
    return SequenceRecord(request_id, 10, drafted, drafted, written - 1, written, written - 1, index=index)


def round_of(*rows: SequenceRecord) -> RoundRecord:
    return RoundRecord(0.1, 0.2, 0.3, 0.05, 0.05, 0.7, 5, rows)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A server that drafts in every round, whatever it has measured before."""
    with running_server(plan="fixed") as running:
        yield running


def samples(server: Running) -> Samples:
    text = HTTP.get(f"{server.url}/metrics").text
    found = {}
    for family in text_string_to_metric_families(text):
        for one in family.samples:
            found[one.name, tuple(sorted(one.labels.items()))] = one.value
    return found


def value(found: Samples, name: str, **labels: str) -> float:
    return found[name, tuple(sorted(labels.items()))]


def complete(server: Running, **given: Any) -> Any:
    body = {"model": NAME, "prompt": "ab ab ab ab ab", "max_tokens": 40, "seed": 3} | given
    answer = HTTP.post(f"{server.url}/v1/completions", json=body)
    answer.raise_for_status()
    return answer.json()


def test_counts_equal_those_of_the_responses(server: Running) -> None:
    before = samples(server)
    drafted = complete(server)
    after = samples(server)

    def change(name: str, **labels: str) -> float:
        key = name, tuple(sorted(labels.items()))
        return after[key] - before.get(key, 0.0)

    own = {"model": NAME, "draft": "ngram"}
    assert change("draftree_generated_tokens_total", **own) == drafted["usage"]["completion_tokens"]
    stats = drafted["metrics"]["speculative_decoding"]
    theirs = {"model_name": NAME, "engine": "0"}
    for ours, name, field in (
        ("draftree_draft_tokens_total", "vllm:spec_decode_num_draft_tokens_total", "num_draft_tokens"),
        ("draftree_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens_total", "num_accepted_draft_tokens"),
    ):
        assert change(ours, **own) == change(name, **theirs) == stats[field]
    assert stats["num_draft_tokens"] > 0
    per_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    positions = [key for key in after if key[0] == per_position]
    accepted = sum(after[key] - before.get(key, 0.0) for key in positions)
    assert accepted == stats["num_accepted_draft_tokens"]
    assert change("vllm:spec_decode_num_drafts_total", **theirs) > 0
    assert change("vllm:generation_tokens_total", **theirs) == drafted["usage"]["completion_tokens"]
    assert change("draftree_prompt_tokens_total", model=NAME) == drafted["usage"]["prompt_tokens"]
    assert change("draftree_requests_total", endpoint="/v1/completions", model=NAME, status="200") == 1
    assert change("vllm:request_success_total", finished_reason="length", **theirs) == 1
    for name in ("draftree_time_to_first_token_seconds", "draftree_request_seconds"):
        assert change(f"{name}_count", **own) == 1
    assert change("vllm:e2e_request_latency_seconds_count", **theirs) == 1
    first_round = drafted["usage"]["completion_tokens"] - change("draftree_inter_token_seconds_count", **own)
    assert 1 <= first_round <= 9, "every token has a gap but those of the first round"


def test_plain_requests_are_counted_apart(server: Running) -> None:
    before = samples(server)
    plain = complete(server, draft="none")
    after = samples(server)
    labels = (("draft", "none"), ("model", NAME))
    key = "draftree_generated_tokens_total", labels
    assert after[key] - before.get(key, 0) == plain["usage"]["completion_tokens"]
    assert after["draftree_draft_tokens_total", labels] == 0
    key = "draftree_inter_token_seconds_count", labels
    assert after[key] - before.get(key, 0) == plain["usage"]["completion_tokens"] - 1


def test_refused_requests_are_counted_by_status(server: Running) -> None:
    def counts() -> list[float]:
        found, name = samples(server), "draftree_requests_total"
        labels = [{"endpoint": path, "model": "other", "status": "404"} for path in ("/v1/completions", "other")]
        return [found.get((name, tuple(sorted(each.items()))), 0.0) for each in labels]

    before = counts()
    HTTP.post(f"{server.url}/v1/completions", json={"model": "unknown", "prompt": "a"})
    HTTP.get(f"{server.url}/nothing/here")
    assert counts() == [count + 1 for count in before]


def test_gauges_show_an_idle_server(server: Running) -> None:
    found = samples(server)
    for name in ("draftree_requests_running", "draftree_requests_waiting"):
        assert value(found, name) == 0
    assert value(found, "draftree_ready") == 1
    assert value(found, "draftree_sequences_running", model=NAME) == 0
    assert value(found, "vllm:num_requests_waiting", model_name=NAME, engine="0") == 0
    assert value(found, "draftree_slots_of_full_context", model=NAME) > 0
    assert any(name == "process_resident_memory_bytes" for name, _ in found)


def test_every_server_has_its_own_metrics(server: Running) -> None:
    complete(server)
    with running_server() as other:
        assert value(samples(other), "vllm:generation_tokens_total", model_name=NAME, engine="0") == 0


def test_every_metric_of_the_dashboard_exists(server: Running) -> None:
    complete(server)
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    expressions += [one["definition"] for one in dashboard["templating"]["list"] if one["type"] == "query"]
    assert len(expressions) > 15
    complete(server)  # some metrics exist from the first request on
    names = {name for name, _ in samples(server)}
    used = {name for text in expressions for name in re.findall(r"\b(?:draftree_|vllm:|process_)\w+", text)}
    assert used <= names
    assert all(re.search(r"draftree_|process_", text) for text in expressions)


def test_every_metric_of_the_guide_exists(server: Running) -> None:
    text = GUIDE.read_text(encoding="utf-8").partition("## Metrics")[2]
    named = set(re.findall(r"`((?:draftree_|vllm:|process_)\w+)`", text))
    assert len(named) > 25
    complete(server)  # some metrics exist from the first request on
    found = {name for name, _ in samples(server)}
    families = {re.sub(r"_(?:bucket|count|sum)$", "", name) for name in found}
    assert named <= found | families
    ours = {name for name in families if name.startswith("draftree_")}
    assert ours - {"draftree_info"} <= named, "and the guide names every metric of ours"


def test_gaps_between_tokens_are_measured_per_sequence() -> None:
    clock = FakeClock()
    meter = ModelMeter("suffix", clock=clock)
    meter.register("a", "suffix")
    meter.on_round(round_of(row(1)))
    clock.now = 0.06
    meter.on_round(round_of(row(3), row(1, index=1)))
    gaps = meter.by_draft["suffix"].token_gaps
    assert sum(gaps.counts) == 3, "the first round of a sequence has no gap"
    assert gaps.total == pytest.approx(0.06)
    assert gaps.counts[gaps.bounds.index(0.02)] == 3


def test_rates_are_those_of_the_last_seconds() -> None:
    clock = FakeClock()
    meter = ModelMeter("suffix", clock=clock)
    meter.on_round(round_of(row(5)))
    clock.now = 10.0
    meter.on_round(round_of(row(3), row(1)))
    assert meter.rates() == {"tokens_per_second": 4 / 5, "acceptance_length": 2.0, "acceptance_rate": 2 / 8}
    clock.now = 20.0
    assert meter.rates()["acceptance_length"] is None


def test_a_histogram_counts_values_up_to_each_bound() -> None:
    found = Histogram((1.0, 2.0))
    for one in (0.5, 1.0, 1.5, 7.0):
        found.observe(one)
    found.observe(2.0, 3)
    assert (found.counts, found.total) == ([2, 4, 1], 16.0)
    assert merged([found, found]).counts == [4, 8, 2]
