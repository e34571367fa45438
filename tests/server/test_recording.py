"""Traces of a server, and OpenTelemetry spans of its requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftree.cli.main import run
from draftree.core.errors import ConfigurationError
from draftree.engine.trace import Trace
from draftree.serve.records import RequestRecord
from draftree.serve.rounds import trace_paths
from draftree.serve.settings import ModelChoice, ServerSettings
from draftree.serve.telemetry import Telemetry
from serving import HTTP, NAME, running_server, settings

REQUEST = {"model": NAME, "prompt": "one two three", "max_tokens": 20, "temperature": 0}


def test_a_server_records_its_rounds(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with running_server(settings_given=settings(record=str(path))) as server:
        answers = [HTTP.post(f"{server.url}/v1/completions", json=REQUEST).json() for _ in range(2)]
    trace = Trace.read(path)
    usage = sum(answer["usage"]["completion_tokens"] for answer in answers)
    steps = [step for one in trace.rounds for step in one.steps]
    assert sum(step.num_written for step in steps) == usage
    assert {step.sequence.split("/")[0] for step in steps} == {answer["id"] for answer in answers}
    assert trace.texts
    assert all(len(step.picks) == len(step.scored) + 1 for step in steps)


def test_each_of_several_models_has_a_file() -> None:
    models = (ModelChoice("a/b", "x"), ModelChoice("c", "y"))
    assert trace_paths(ServerSettings(models=models, record="t.jsonl")) == [Path("t-a_b.jsonl"), Path("t-c.jsonl")]
    assert trace_paths(ServerSettings(models=models[:1], record="t.jsonl")) == [Path("t.jsonl")]
    assert trace_paths(ServerSettings(models=models)) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--record", "nowhere/t.jsonl"], "its folder is missing"),
        (["--record", "t.jsonl", "--replicas", "2"], "without replicas"),
        (["--otlp-endpoint", "localhost:4318"], "write a URL"),
    ],
)
def test_traces_and_spans_that_cannot_be_written_are_refused(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", "no-such-model", *options]) == 1
    assert words in " ".join(capsys.readouterr().err.split())


def finished(**given: Any) -> RequestRecord:
    record = RequestRecord("req-1", "POST", "/v1/chat/completions", 100.0, endpoint="/v1/chat/completions", status=200)
    record.model, record.draft, record.response_id = "smollm2", "suffix", "chatcmpl-1"
    record.prompt_tokens, record.completion_tokens, record.accepted_tokens, record.rounds = 7, 12, 5, 7
    record.queue_seconds, record.first_token_seconds, record.seconds = 0.25, 0.5, 2.0
    for name, value in given.items():
        setattr(record, name, value)
    return record


def spans_of(*records: RequestRecord) -> list[Any]:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    telemetry = Telemetry(exporter, processor=SimpleSpanProcessor, clock=lambda: 102.5, wall=lambda: 9_000_000_000)
    for record in records:
        telemetry.send(record)
    telemetry.close()
    return list(exporter.get_finished_spans())


def test_a_request_is_a_span_with_its_phases() -> None:
    queue, first, decode, whole = spans_of(finished())
    assert [span.name for span in (queue, first, decode)] == ["queue", "first token", "decode"]
    assert whole.name == "POST /v1/chat/completions"
    # the request arrived 2.5 s before the clock was read
    assert (whole.start_time, whole.end_time) == (6_500_000_000, 8_500_000_000)
    assert (queue.start_time, queue.end_time) == (6_500_000_000, 6_750_000_000)
    assert (first.end_time, decode.end_time) == (7_000_000_000, 8_500_000_000)
    assert all(span.parent.span_id == whole.context.span_id for span in (queue, first, decode))
    assert whole.attributes["gen_ai.request.model"] == "smollm2"
    assert whole.attributes["gen_ai.usage.output_tokens"] == 12
    assert whole.attributes["draftree.accepted_tokens"] == 5
    assert whole.resource.attributes["service.name"] == "draftree"


def test_the_clients_trace_continues() -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    whole = spans_of(finished(traceparent=parent))[-1]
    assert f"{whole.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert f"{whole.parent.span_id:016x}" == "b7ad6b7169203331"


def test_errors_are_marked_and_probes_have_no_span() -> None:
    probe = finished(model=None)
    failed = finished(status=500, error="internal_error", first_token_seconds=None, queue_seconds=None)
    (whole,) = spans_of(probe, failed)
    assert not whole.status.is_ok
    assert whole.attributes["error.type"] == "internal_error"


def test_a_missing_sdk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftree.core.errors.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'draftree\[telemetry\]'"):
        Telemetry.sending_to("http://localhost:4318/v1/traces")
