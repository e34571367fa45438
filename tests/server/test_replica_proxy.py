"""Answers of replicas, merged or repeated after the loss of one; with scripted replicas and without ray."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from draftree.serve.errors import unavailable
from draftree.serve.ray.proxy import (
    GENERATING,
    DivergedError,
    Proxy,
    ReplicaLostError,
    RetryPolicy,
    StreamRecord,
    merged_metrics,
    merged_status,
    prepared,
)
from draftree.serve.ray.routing import (
    AnswerStart,
    HttpRequest,
    Part,
    PrefixRouting,
    RoutingPolicy,
    call_app,
    prefix_blocks,
)

TEXTS = ["Once upon a time, there was a “red” ball. 🙂 It rolled\u2028down\x85the hill", "Tom saw it.\n\nTom ran."]


def cut(text: str, rng: random.Random) -> list[str]:
    places = sorted({0, len(text), *(rng.randrange(len(text)) for _ in range(rng.randrange(1, 9)))})
    return [text[start:end] for start, end in pairwise(places)]


def sse(data: dict[str, Any], name: str = "") -> str:
    return (f"event: {name}\n" if name else "") + f"data: {json.dumps(data)}"


def chat_events(seed: int, texts: list[str] = TEXTS) -> list[str]:
    """The events of one chat with two answers; the seed draws ids, times and the borders of the pieces."""
    rng = random.Random(seed)
    head = {"id": f"chatcmpl-{rng.random()}", "object": "chat.completion.chunk", "created": seed, "model": "m"}

    def chunk(index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "finish_reason": None, "logprobs": None} | more
        return head | {"choices": [choice], "usage": None}

    queues = []
    for index, text in enumerate(texts):
        events = [chunk(index, {"role": "assistant", "content": ""})]
        for piece in cut(text, rng):
            logprobs = {"content": [{"token": letter, "logprob": rng.random()} for letter in piece]}
            made = chunk(index, {"content": piece}, logprobs=logprobs)
            events.append(made | {"draftree": {"pieces": [{"index": index, "text": piece, "origin": "drafted"}]}})
        call = {"index": 0, "id": f"call_{rng.random()}", "type": "function"}
        events.append(chunk(index, {"tool_calls": [call | {"function": {"name": "f", "arguments": ""}}]}))
        for piece in cut('{"city": "Bern"}', rng):
            events.append(chunk(index, {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}))
        queues.append([*events, chunk(index, {}, finish_reason="stop")])
    order = [index for index, queue in enumerate(queues) for _ in queue]
    rng.shuffle(order)
    mixed = [sse(queues[index].pop(0)) for index in order]
    usage = head | {"choices": [], "usage": {"completion_tokens": 9}}
    return [*mixed, sse(usage), "data: [DONE]"]


def response_events(seed: int) -> list[str]:
    """The events of the responses API for one text."""
    rng = random.Random(seed)
    response, item = {"id": f"resp_{rng.random()}", "created_at": seed}, {"id": f"msg_{rng.random()}"}
    place = {"item_id": item["id"], "output_index": 0, "content_index": 0}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": response},
        {"type": "response.output_item.added", "output_index": 0, "item": item},
        *({"type": "response.output_text.delta", **place, "delta": piece} for piece in cut(TEXTS[0], rng)),
        {"type": "response.output_text.done", **place, "text": TEXTS[0]},
        {"type": "response.completed", "response": response | {"output": [item | {"text": TEXTS[0]}]}},
    ]
    return [sse(event | {"sequence_number": n}, event["type"]) for n, event in enumerate(events)]


def data_of(events: list[str]) -> list[Any]:
    lines = [line.removeprefix("data: ") for event in events for line in event.splitlines() if line.startswith("data")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def summary_of(events: list[str]) -> Any:
    """What a client composes of a chat: strings are appended, as official clients do."""
    answers: dict[int, dict[str, Any]] = {}
    usages, ids = [], set()
    for chunk in data_of(events):
        ids.add((chunk["id"], chunk["created"]))
        usages += [chunk["usage"]] if chunk["usage"] else []
        for choice in chunk["choices"]:
            answer = answers.setdefault(
                choice["index"], {"role": "", "content": "", "tokens": "", "name": "", "type": "", "arguments": ""}
            )
            answer["role"] += choice["delta"].get("role") or ""
            answer["content"] += choice["delta"].get("content") or ""
            answer["tokens"] += "".join(t["token"] for t in (choice.get("logprobs") or {}).get("content") or [])
            for call in choice["delta"].get("tool_calls") or []:
                answer.setdefault("ids", []).extend([call["id"]] if "id" in call else [])
                answer["type"] += call.get("type", "")
                answer["name"] += call["function"].get("name", "")
                answer["arguments"] += call["function"].get("arguments", "")
            answer.setdefault("ends", []).extend([choice["finish_reason"]] if choice["finish_reason"] else [])
        for piece in chunk.get("draftree", {}).get("pieces", []):
            answers[piece["index"]].setdefault("pieces", []).append(piece["text"])
    for answer in answers.values():
        answer["pieces"] = "".join(answer.get("pieces", []))
    return answers, usages, ids, events[-1]


STREAM = (b"content-type", b"text/event-stream; charset=utf-8")
PATIENT = RetryPolicy(window=600.0, first_pause=0.001, longest_pause=0.001)
IMPATIENT = RetryPolicy(window=0.05, first_pause=0.001, longest_pause=0.001)
"""For requests that no replica completes."""


class Scripted:
    """Replicas whose answers are scripts, one per attempt: parts, or an error to raise."""

    def __init__(self, *scripts: list[Part | Exception]) -> None:
        self.scripts = list(scripts)
        self.requests: list[HttpRequest] = []
        self.num_closed = 0

    async def stream(self, request: HttpRequest) -> AsyncGenerator[Part, None]:
        self.requests.append(request)
        try:
            for part in self.scripts.pop(0):
                if isinstance(part, Exception):
                    raise part
                yield part
                await asyncio.sleep(0)
        finally:
            self.num_closed += 1


def started(status: int = 200, *headers: tuple[bytes, bytes], replica: str = "a") -> AnswerStart:
    return AnswerStart(status, list(headers), replica)


def streamed(events: list[str], *, replica: str = "a") -> list[Part | Exception]:
    return [started(200, STREAM, replica=replica), *(f"{event}\n\n".encode() for event in events)]


def scope_of(path: str, method: str = "POST") -> dict[str, Any]:
    fixed = {"type": "http", "http_version": "1.1", "scheme": "http", "raw_path": path.encode(), "query_string": b""}
    return fixed | {"method": method, "path": path, "headers": [(b"content-length", b"1"), (b"x-request-id", b"7")]}


def ask(
    replicas: Any,
    body: object,
    *,
    path: str = "/v1/chat/completions",
    method: str = "POST",
    retry: RetryPolicy = PATIENT,
) -> tuple[int, dict[bytes, bytes], bytes]:
    """Send one request through the proxy."""
    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    async def run() -> None:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        bodies = [{"type": "http.request", "body": raw}]

        async def receive() -> Any:
            if bodies:
                return bodies.pop(0)
            await asyncio.Event().wait()
            raise AssertionError

        await Proxy(replicas, retry=retry)(scope_of(path, method), receive, send)

    asyncio.run(run())
    assert [m["type"] for m in messages].count("http.response.start") == 1
    assert [m.get("more_body") for m in messages[1:]] == [True] * (len(messages) - 2) + [False]
    return messages[0]["status"], dict(messages[0]["headers"]), b"".join(m["body"] for m in messages[1:])


def in_process(app: Callable[..., Any], *, take: int | None = None) -> list[Part]:
    """Call an app with one request and return the parts of its answer; leave after `take` of them."""

    async def run() -> list[Part]:
        parts: list[Part] = []
        answer = call_app(app, HttpRequest(scope_of("/x"), b"body"), replica="r")
        async for part in answer:
            parts.append(part)
            if len(parts) == take:
                break
        await answer.aclose()
        return parts

    return asyncio.run(run())


def test_an_app_gets_the_request_and_its_answer_is_yielded() -> None:
    async def echo(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        await send({"type": "http.response.start", "status": 201, "headers": [(b"a", b"b")]})
        await send({"type": "http.response.body", "body": message["body"] + scope["path"].encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"!"})

    assert in_process(echo) == [AnswerStart(201, [(b"a", b"b")], "r"), b"body/x!"]


def test_an_app_whose_client_left_is_told_and_ends() -> None:
    ended = []

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        ended.append((await receive())["type"])

    assert in_process(endless, take=1) == [AnswerStart(200, [], "r")]
    assert ended == ["http.disconnect"]


def test_metrics_of_all_replicas_are_merged_by_metric() -> None:
    head = "# HELP up Works\n# TYPE up gauge\n"
    texts = {"a": head + "up 1\n", "b": head + 'up{model="m}",key="k"} 0\n# TYPE n counter\nn_total 3\n'}
    assert merged_metrics(texts, num_repeated=2) == (
        head
        + 'up{replica="a"} 1\nup{model="m}",key="k",replica="b"} 0\n'
        + '# TYPE n counter\nn_total{replica="b"} 3\n'
        + "# HELP draftree_repeated_requests_total Requests that were repeated on another replica\n"
        + "# TYPE draftree_repeated_requests_total counter\ndraftree_repeated_requests_total 2\n"
    )


@pytest.mark.parametrize("is_allowed", [True, False])
def test_metrics_are_those_of_all_replicas_or_the_refusal_of_one(is_allowed: bool) -> None:
    class Two:
        async def everywhere(self, request: HttpRequest) -> list[list[Part]]:
            assert dict(request.scope["headers"])[b"x-request-id"] == b"7"
            second = [started(200, replica="b"), b"up 0\n"] if is_allowed else [started(401, replica="b"), b"no"]
            return [[started(200, (b"content-length", b"5"), replica="a"), b"up ", b"1\n"], second]

    status, headers, body = ask(Two(), b"", path="/metrics", method="GET")
    assert (status, headers) == (200 if is_allowed else 401, {})
    assert body.startswith(b'up{replica="a"} 1\nup{replica="b"} 0\n') if is_allowed else body == b"no"


def status(running: int, tokens: float, length: float | None, *, ready: bool = True) -> str:
    model = {"name": "m", "drafts": ["ngram"], "running": running, "waiting": 1, "explain": f"reason {running}"}
    model |= {"tokens_per_second": tokens, "acceptance_length": length, "acceptance_rate": length and length / 10}
    queue = {"running": running, "waiting": 2, "places": 2 * running, "max_places": 32, "max_waiting": 256}
    rest = {"is_ready": ready, "uptime_seconds": 10.0 * running, "version": "1"}
    return json.dumps({"models": [model], "queue": queue} | rest)


def test_the_status_of_all_replicas_is_summed() -> None:
    texts = {"a": status(1, 30.0, 2.0, ready=False), "b": status(3, 10.0, 4.0), "c": status(0, 0.0, None)}
    found = json.loads(merged_status(texts))
    (model,) = found["models"]
    assert (model["running"], model["waiting"], model["tokens_per_second"]) == (4, 3, 40.0)
    assert model["acceptance_length"] == pytest.approx(2.5)
    assert model["acceptance_rate"] == pytest.approx(0.25)
    assert (model["drafts"], model["explain"]) == (["ngram"], "reason 1")
    assert found["queue"] == {"running": 4, "waiting": 6, "places": 8, "max_places": 96, "max_waiting": 768}
    assert (found["is_ready"], found["uptime_seconds"], found["replicas"]) == (True, 30.0, ["a", "b", "c"])
    assert json.loads(merged_status({"c": status(0, 0.0, None)}))["models"][0]["acceptance_length"] is None


@pytest.mark.parametrize("is_allowed", [True, False])
def test_the_status_is_that_of_all_replicas_or_the_refusal_of_one(is_allowed: bool) -> None:
    class Two:
        async def everywhere(self, request: HttpRequest) -> list[list[Part]]:
            second = [started(200 if is_allowed else 401, replica="b"), status(2, 1.0, 2.0).encode()]
            return [[started(200, replica="a"), status(1, 1.0, 2.0).encode()], second]

    code, _, body = ask(Two(), b"", path="/draftree/status", method="GET")
    assert code == (200 if is_allowed else 401)
    assert json.loads(body)["queue"]["running"] == (3 if is_allowed else 2)


CHAT = {"messages": [{"role": "user", "content": "x" * 100}], "stream": True}
LOST = ReplicaLostError("the actor died")


def test_a_streamed_text_continues_on_another_replica_with_the_seed_that_the_proxy_chose() -> None:
    events = chat_events(1)
    replicas = Scripted(
        [*streamed(events[:5], replica="a"), LOST],
        [ReplicaLostError("died before its answer", "b")],
        streamed(chat_events(2), replica="c"),
    )
    status, _, body = ask(replicas, CHAT)
    received = body.decode().removesuffix("\n\n").split("\n\n")
    assert status == 200
    assert received[:5] == events[:5]
    assert summary_of(received)[0][1]["content"] == TEXTS[1]
    assert [request.avoid for request in replicas.requests] == [set(), {"a"}, {"a", "b"}]
    bodies = [json.loads(request.body) for request in replicas.requests]
    assert bodies[0] == bodies[1] == bodies[2]
    assert isinstance(bodies[0].pop("seed"), int)
    assert bodies[0] == CHAT
    for request in replicas.requests:
        assert dict(request.scope["headers"])[b"content-length"] == str(len(request.body)).encode()
        assert request.blocks == prefix_blocks(CHAT) != ()


@pytest.mark.parametrize("body", [CHAT | {"seed": 3}, CHAT | {"stream": False}, {"messages": []}, [1]])
def test_other_bodies_are_forwarded_unchanged(body: object) -> None:
    replicas = Scripted([started(), b"{}"])
    ask(replicas, body)
    assert json.loads(replicas.requests[0].body) == body
    assert dict(replicas.requests[0].scope["headers"])[b"x-request-id"] == b"7"


def test_fresh_seeds_differ() -> None:
    replicas = Scripted(*([started(), b"{}"] for _ in range(2)))
    for _ in range(2):
        ask(replicas, CHAT | {"seed": -1})
    first, second = (json.loads(request.body)["seed"] for request in replicas.requests)
    assert first != second
    assert min(first, second) >= 0


def test_an_answer_that_is_no_stream_is_repeated_as_a_whole() -> None:
    replicas = Scripted(
        [started(), b'{"half"', LOST],
        [started(200, (b"x-replica", b"b"), (b"X-Request-Id", b"7")), b'{"who', b'le": 1}'],
    )
    status, headers, body = ask(replicas, CHAT | {"stream": False})
    assert (status, headers, body) == (200, {b"x-replica": b"b", b"x-draftree-replica": b"a"}, b'{"whole": 1}')
    assert replicas.num_closed == 2


@pytest.mark.parametrize("code", ["shutting_down", "process_lost"])
def test_a_replica_that_ends_is_left_for_another_one(code: str) -> None:
    shutting = sse({"error": {"message": "the server ends", "code": code}})
    replicas = Scripted(
        [started(503), b"{}"],
        # one chunk holds text and the error: the text is sent once
        [started(200, STREAM), "".join(f"{event}\n\n" for event in [*chat_events(1)[:4], shutting]).encode()],
        [started(429), b"{}"],
        streamed(chat_events(3)),
    )
    status, _, body = ask(replicas, CHAT)
    received = body.decode().removesuffix("\n\n").split("\n\n")
    assert status == 200
    assert summary_of(received)[0][0]["content"] == TEXTS[0]
    assert not replicas.scripts


def test_a_full_queue_and_other_refusals_are_answers() -> None:
    for status in (400, 401, 429):
        assert ask(Scripted([started(status), b'{"error": 1}']), CHAT)[0] == status
    assert ask(Scripted([started(503), b"draining"]), b"", path="/ready", method="GET")[0] == 503


def test_a_client_gets_an_error_if_no_replica_is_left() -> None:
    class Dead:
        async def stream(self, request: HttpRequest) -> AsyncGenerator[Part, None]:
            raise LOST
            yield b""

    status, headers, body = ask(Dead(), CHAT, retry=IMPATIENT)
    assert (status, headers[b"retry-after"]) == (503, b"5")
    assert json.loads(body)["error"]["code"] == "no_replica"


def test_a_stream_that_cannot_be_completed_ends_with_an_error_event() -> None:
    other = chat_events(2, ["Once upon a night", TEXTS[1]])
    for then, code, retry in (([LOST], "no_replica", IMPATIENT), (streamed(other), "diverged", PATIENT)):
        scripts: list[list[Part | Exception]] = [[*streamed(chat_events(1)[:-4]), LOST], *([then] * 200)]
        _, _, body = ask(Scripted(*scripts), CHAT, retry=retry)
        *_, error, done, empty = body.decode().split("\n\n")
        assert (data_of([error])[0]["error"]["code"], done, empty) == (code, "data: [DONE]", "")


def test_an_unexpected_error_is_not_shown() -> None:
    for before in ([], [started(200, STREAM), b"data: {}\n\n"]):
        _, _, body = ask(Scripted([*before, ZeroDivisionError("secret")]), CHAT)
        assert b"internal_error" in body
        assert b"secret" not in body


def test_streams_without_text_are_forwarded_as_they_are() -> None:
    events = [sse({"round": n}) for n in range(3)]
    _, _, body = ask(Scripted(streamed(events)), b"", path="/draftree/rounds", method="GET")
    assert body.decode() == "".join(f"{event}\n\n" for event in events)


def test_the_client_that_leaves_closes_the_stream_of_the_replica() -> None:
    async def run() -> bool:
        is_closed = asyncio.Event()

        class Endless:
            async def stream(self, request: HttpRequest) -> AsyncGenerator[Part, None]:
                yield started(200, STREAM)
                try:
                    while True:
                        await asyncio.sleep(0.001)
                        yield b": wait\n\n"
                finally:
                    is_closed.set()

        messages: Iterator[Any] = iter([{"type": "http.request", "body": b"{}"}, {"type": "http.disconnect"}])

        async def receive() -> Any:
            await asyncio.sleep(0.02)
            return next(messages)

        async def send(message: Any) -> None:
            pass

        proxy = Proxy(Endless(), retry=PATIENT)
        await proxy(scope_of("/v1/chat/completions"), receive, send)
        return is_closed.is_set()

    assert asyncio.run(run())


def test_a_request_without_an_id_gets_one_for_all_repetitions() -> None:
    replicas = Scripted([LOST], [started(), b"{}"])
    scope = scope_of("/v1/chat/completions") | {"headers": []}
    request, _ = prepared(scope, json.dumps(CHAT | {"seed": 1}).encode())
    ask(replicas, CHAT | {"seed": 1})
    assert dict(request.scope["headers"])[b"x-request-id"].startswith(b"req-")
    assert replicas.requests[0].scope == replicas.requests[1].scope


def messages_events(pieces: list[str], name: str) -> list[str]:
    """The stream of /v1/messages."""
    block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    deltas = [{"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": p}} for p in pieces]
    ends: list[dict[str, Any]] = [
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 9}},
        {"type": "message_stop"},
    ]
    start = {"type": "message_start", "message": {"id": f"msg_{name}", "content": []}}
    return [f"{sse(event, event['type'])}\n\n" for event in (start, block, *deltas, *ends)]


def infill_events(pieces: list[str], name: str) -> list[str]:
    chunks = [{"index": 0, "content": piece, "stop": False} for piece in pieces]
    return [f"{sse(chunk)}\n\n" for chunk in (*chunks, {"index": 0, "content": "", "stop": True, "stop_type": "eos"})]


def chat_lines(pieces: list[str], name: str) -> list[str]:
    """The stream of /api/chat."""
    lines = [{"done": False, "message": {"role": "assistant", "content": piece}} for piece in pieces]
    last = {"done": True, "message": {"role": "assistant", "content": ""}, "done_reason": "stop"}
    return [f"{json.dumps({'model': 'm', 'created_at': 'now', **line})}\n" for line in (*lines, last)]


def generate_lines(pieces: list[str], name: str) -> list[str]:
    lines = [{"done": False, "response": piece} for piece in pieces]
    return [f"{json.dumps(line)}\n" for line in (*lines, {"done": True, "response": "", "done_reason": "stop"})]


PROTOCOLS: dict[str, tuple[Callable[[list[str], str], list[str]], Callable[[dict[str, Any]], str]]] = {
    "/v1/messages": (messages_events, lambda event: event.get("delta", {}).get("text", "")),
    "/infill": (infill_events, lambda chunk: chunk["content"]),
    "/api/chat": (chat_lines, lambda line: line["message"]["content"]),
    "/api/generate": (generate_lines, lambda line: line["response"]),
}
LINES = (b"content-type", b"application/x-ndjson")


def content_of(path: str, body: str) -> list[dict[str, Any]]:
    if path.startswith("/api"):
        return [json.loads(line) for line in body.splitlines()]
    return data_of(body.removesuffix("\n\n").split("\n\n"))


@pytest.mark.parametrize("path", PROTOCOLS)
@pytest.mark.parametrize("cut_at", [1, 3, 5])
def test_streams_of_all_protocols_continue_on_another_replica(path: str, cut_at: int) -> None:
    made, text_of = PROTOCOLS[path]
    kind = LINES if path.startswith("/api") else STREAM
    first, second = made(["Once ", "upon ", "a ", "time"], "1"), made(["On", "ce upon a", " ti", "me"], "2")
    replicas = Scripted(
        [started(200, kind), *(event.encode() for event in first[:cut_at]), LOST],
        [started(200, kind, replica="b"), "".join(second).encode()],
    )
    _, _, body = ask(replicas, {"prompt": "x", "stream": True}, path=path)
    assert body.decode().startswith("".join(first[:cut_at]))
    found, whole = content_of(path, body.decode()), content_of(path, "".join(first))
    assert "".join(map(text_of, found)) == "Once upon a time"
    assert [event for event in found if not text_of(event)] == [event for event in whole if not text_of(event)]
    assert all(event.get("message", {}).get("role", "assistant") == "assistant" for event in found)
    bodies = [json.loads(request.body) for request in replicas.requests]
    assert bodies[0] == bodies[1]
    assert isinstance((bodies[0]["options"] if path.startswith("/api") else bodies[0])["seed"], int)


@pytest.mark.parametrize("path", PROTOCOLS)
def test_errors_have_the_form_of_the_protocol(path: str) -> None:
    made, _ = PROTOCOLS[path]
    kind = LINES if path.startswith("/api") else STREAM
    ends = made(["Once"], "1")[:2]
    scripts: list[list[Part | Exception]] = [[started(200, kind), *(event.encode() for event in ends), LOST]]
    _, _, body = ask(Scripted(*scripts, *([[LOST]] * 200)), {"prompt": "x", "stream": True}, path=path, retry=IMPATIENT)
    error = content_of(path, body.decode())[-1]["error"]
    assert "no replica" in (error if isinstance(error, str) else error["message"])
    status, _, whole = ask(Scripted(*([[LOST]] * 200)), {"prompt": "x"}, path=path, retry=IMPATIENT)
    assert (status, json.loads(whole)["error"]) == (503, error)
    ending = unavailable("shutting_down")
    ending.shape = GENERATING[path].shape
    refusal = f"{json.dumps(ending.body())}\n" if kind is LINES else f"{sse(ending.body())}\n\n"
    replicas = Scripted(
        [started(200, kind), refusal.encode()], [started(200, kind), *(event.encode() for event in ends)]
    )
    _, _, body = ask(replicas, {"prompt": "x", "stream": True}, path=path)
    assert content_of(path, body.decode()) == content_of(path, "".join(ends))


@pytest.mark.parametrize(
    "fields",
    [
        {"input": "x", "previous_response_id": "resp_1-abc"},
        {"input": [{"role": "user", "content": "x"}, {"type": "item_reference", "id": "msg_1-abc"}]},
    ],
)
def test_a_stored_conversation_is_continued_where_it_is(fields: dict[str, Any]) -> None:
    replicas = Scripted(*([started(), b"{}"] for _ in range(2)))
    for path in ("/v1/responses", "/v1/responses/input_tokens"):
        ask(replicas, fields, path=path)
        assert replicas.requests[-1].holder == "abc"
    routing = PrefixRouting(RoutingPolicy(), seed=1)
    assert routing.rank((), {"abc": 99, "b": 0}, holder="abc") == [["abc"]]
    assert routing.rank((), {"abc": 0, "b": 0}, holder="abc", avoid={"abc"}) == [["b"]]
    assert routing.rank((), {"b": 0}, holder="abc") == [["b"]]


@pytest.mark.parametrize("seed", range(60))
def test_a_stream_cut_anywhere_is_completed_by_other_streams_of_the_same_texts(seed: int) -> None:
    rng = random.Random(seed)
    record, received = StreamRecord(), []
    streams = [chat_events(1000 * seed + n) for n in range(3)]
    for number, events in enumerate(streams):
        if number:
            record.restart()
        is_last = number == len(streams) - 1
        for event in events if is_last else events[: rng.randrange(1, len(events) - 2)]:
            kept = record.push(event)
            received += [kept] if kept is not None else []
    whole = summary_of(streams[0])
    assert summary_of(received)[0][0]["content"] == TEXTS[0]
    assert "".join(received).isascii()
    composed = summary_of(received)
    for answers in (whole[0], composed[0]):
        for answer in answers.values():
            assert len(answer.pop("ids")) == 1
    assert composed == whole


@pytest.mark.parametrize("cut_at", range(1, 6))
def test_a_stream_of_the_responses_api_is_completed_with_one_numbering_and_one_set_of_ids(cut_at: int) -> None:
    record = StreamRecord()
    first, second = response_events(1), response_events(2)
    received = [kept for event in first[:cut_at] if (kept := record.push(event)) is not None]
    assert received == first[:cut_at]
    record.restart()
    received += [kept for event in second if (kept := record.push(event)) is not None]
    events = data_of(received)
    assert "".join(event.get("delta", "") for event in events) == TEXTS[0]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1
    items = {event.get("item_id") or event["item"]["id"] for event in events if "item_id" in event or "item" in event}
    assert len(items) == 1
    assert [e["type"] for e in events if "delta" not in e] == [e["type"] for e in data_of(first) if "delta" not in e]
    assert all(event.startswith("event: response.") for event in received)


def test_a_repeated_stream_with_another_text_is_refused() -> None:
    record = StreamRecord()
    for event in chat_events(1)[:-5]:
        record.push(event)
    record.restart()
    with pytest.raises(DivergedError):
        for event in chat_events(2, ["Once upon a night", TEXTS[1]]):
            record.push(event)
