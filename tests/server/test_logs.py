"""Logs: one line per request, request ids, no prompts, keys or paths of this machine."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from typing import Any

import pytest

from asgi import GONE, Answer, body_parts, call, echo, http_scope
from draftree.serve.records import ApiKey, RequestLog, configured_logs, log_request, record_of
from draftree.serve.schema import note


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 0.5
        return self.now


def logged(app: Any, scope: dict[str, Any], messages: list[Any], **options: Any) -> tuple[Answer, list[str]]:
    stream = io.StringIO()
    given = {"as_json": True, "level": "info"} | options
    with configured_logs(**given, stream=stream):
        log = RequestLog(app, on_end=log_request, clock=FakeClock())
        answer = asyncio.run(call(log, scope, messages))
    return answer, stream.getvalue().splitlines()


async def generates(scope: Any, receive: Any, send: Any) -> None:
    record = record_of(scope)
    record.key, record.model, record.draft = ApiKey("alice"), "smollm2", "suffix"
    record.prompt_tokens, record.completion_tokens, record.queue_seconds = 7, 12, 0.25
    record.finish_reasons = ["stop"]
    record.note_first_token(101.0)
    await echo(scope, receive, send)


def test_what_has_no_effect_is_in_headers_and_in_the_line() -> None:
    async def notes(scope: Any, receive: Any, send: Any) -> None:
        for field in ("ttl", "ttl", 'a"\r\nset-cookie: \\é', *map(str, range(20))):
            note(field, "is ignored")
        await echo(scope, receive, send)

    answer, (line,) = logged(notes, http_scope(), body_parts(b"{}"))
    headers = [value for name, value in answer.messages[0]["headers"] if name == b"warning"]
    assert headers[:2] == [b"299 draftree \"'ttl' is ignored\"", b"299 draftree \"'a???set-cookie: ??' is ignored\""]
    assert (len(headers), headers[-1]) == (16, b'299 draftree "7 further warnings are in the server\'s log"')
    assert len(json.loads(line)["warnings"]) == 22


def test_a_request_is_one_json_line() -> None:
    _, lines = logged(generates, http_scope(path="/v1/completions"), body_parts(b"{}"))
    (line,) = map(json.loads, lines)
    assert line.pop("time").endswith("Z")
    assert line.pop("request_id").startswith("req-")
    assert line == {
        "level": "info",
        "logger": "draftree.serve.requests",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "key": "alice",
        "model": "smollm2",
        "draft": "suffix",
        "prompt_tokens": 7,
        "completion_tokens": 12,
        "queue_seconds": 0.25,
        "first_token_seconds": 0.5,
        "seconds": 0.5,
        "finish_reasons": ["stop"],
    }


def test_a_text_line_has_the_same_facts() -> None:
    _, (line,) = logged(generates, http_scope(path="/v1/completions"), body_parts(b"{}"), as_json=False)
    assert " info POST /v1/completions 200 0.500 s request_id=req-" in line
    assert "completion_tokens=12" in line


@pytest.mark.parametrize("given", ["abc-1", "A" * 128, "a.b_c:d"])
def test_a_well_formed_request_id_is_kept_and_returned(given: str) -> None:
    answer, lines = logged(echo, http_scope(headers={"X-Request-Id": given}), body_parts(b""))
    assert answer.headers["x-request-id"] == given == json.loads(lines[0])["request_id"]


@pytest.mark.parametrize("given", ["", "a b", "A" * 129, 'x"y', "a\u00e4", "a\tb"])
def test_another_request_id_is_replaced(given: str) -> None:
    answer, lines = logged(echo, http_scope(headers={"X-Request-Id": given}), body_parts(b""))
    assert answer.headers["x-request-id"].startswith("req-")
    assert answer.headers["x-request-id"] in {json.loads(line)["request_id"] for line in lines}


def test_the_query_and_the_headers_are_not_logged() -> None:
    scope = http_scope(headers={"Authorization": "Bearer sk-secret-key"}) | {"query_string": b"api_key=sk-in-query"}
    _, lines = logged(echo, scope, body_parts(b'{"prompt": "private"}'))
    assert not any(word in lines[0] for word in ("sk-secret-key", "sk-in-query", "private"))


def test_a_client_that_leaves_early_is_logged_with_499() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await receive()

    _, (line,) = logged(app, http_scope(), [*body_parts(b""), GONE])
    assert json.loads(line)["status"] == 499
    assert json.loads(line)["disconnected"] is True


def test_a_client_that_leaves_after_the_end_was_not_early() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await echo(scope, receive, send)
        await receive()

    _, (line,) = logged(app, http_scope(), [*body_parts(b""), GONE])
    assert json.loads(line)["status"] == 200
    assert "disconnected" not in json.loads(line)


def test_a_request_that_raises_before_an_answer_is_logged_with_500() -> None:
    stream = io.StringIO()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("a mistake")

    with configured_logs(as_json=True, level="info", stream=stream), pytest.raises(ValueError, match="a mistake"):
        asyncio.run(call(RequestLog(app, on_end=log_request), http_scope()))
    assert json.loads(stream.getvalue())["status"] == 500


def test_probes_are_logged_only_for_debugging_or_if_they_fail() -> None:
    async def fails(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 503, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    assert logged(echo, http_scope("GET", "/health"), body_parts(b""))[1] == []
    assert len(logged(echo, http_scope("GET", "/health"), body_parts(b""), level="debug")[1]) == 1
    assert len(logged(fails, http_scope("GET", "/ready"), body_parts(b""))[1]) == 1


def test_at_level_warning_requests_are_not_logged() -> None:
    assert logged(echo, http_scope(), body_parts(b""), level="warning")[1] == []


@pytest.mark.parametrize("as_json", [True, False])
def test_a_line_stays_one_line_without_control_characters(as_json: bool) -> None:
    scope = http_scope(path="/a\x1b[31m\nforged\u2028x")
    _, lines = logged(echo, scope, body_parts(b""), as_json=as_json)
    assert len(lines) == 1
    assert not any(sign in lines[0] for sign in "\x1b\u2028")


def test_other_messages_of_the_server_have_the_same_form_and_loggers_are_restored() -> None:
    stream = io.StringIO()
    logger = logging.getLogger("draftree.serve.test")
    with configured_logs(as_json=True, level="warning", stream=stream):
        logger.warning("slot %d", 3)
        try:
            raise ValueError("inside")
        except ValueError:
            logger.exception("it failed")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["message"], first["level"]) == ("slot 3", "warning")
    assert "ValueError: inside" in second["traceback"]
    assert not logging.getLogger("draftree").handlers
