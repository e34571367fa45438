"""A server with the page and canned answers, for states that a real model does not reach on request.

It writes a fixed text in rounds with branching trees. Prompts select a state: "fail" breaks the stream with an error,
"busy" is refused with 429, "differ" writes another text without drafts, "slow" pauses before every round, and
"say TEXT" writes TEXT. The counters of `/metrics` grow with every reading.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import socket
import threading
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse

from draftree.serve.page import mount

TEXT = (
    "A cache keeps the results of earlier work close at hand. When a program needs the same result again, it reads the "
    "stored copy and skips the slow part. A cache is small, so it drops what was not used for a long time. A cache "
    "makes programs faster because most programs use the same few things again and again.\n\nThe cost is memory, and "
    "the care that a stored copy is never older than the original — naïve caches forget this."
)
MODEL = {
    "name": "fake-model",
    "aliases": [],
    "drafts": ["ngram", "suffix"],
    "context": 2048,
    "running": 1,
    "waiting": 3,
    "tokens_per_second": 41.25,
    "acceptance_length": 2.31,
    "acceptance_rate": 0.58,
    "kernels": "native",
    "dtype": "float32",
    "explain": "drafts of 4 tokens: 2.3 tokens per pass, a pass costs 1.2 times a plain one",
    "supports_chat": True,
}
METRICS = """# TYPE draftree_requests_running gauge
draftree_requests_running 2.0
draftree_places_taken 4.0
draftree_requests_waiting 5.0
draftree_sequences_running{{model="fake-model"}} 1.0
draftree_sequences_waiting{{model="fake-model"}} 3.0
draftree_request_seconds_count{{draft="ngram",model="fake-model"}} {requests}
draftree_generated_tokens_total{{draft="ngram",model="fake-model"}} {tokens}
draftree_generated_tokens_total{{draft="none",model="another"}} 1e9
draftree_drafts_total{{draft="ngram",model="fake-model"}} {drafts}
draftree_draft_tokens_total{{draft="ngram",model="fake-model"}} {drafted}
draftree_accepted_tokens_total{{draft="ngram",model="fake-model"}} {accepted}
"""
OTHERS = (" and", " the", " result", " of", " faster", " a", " copy", " which", " memory", ",")


def words_of(text: str) -> list[str]:
    """The tokens of a text: words with the space before them, and punctuation."""
    return re.findall(r"\s?\w+|[^\w\s]|\s+", text)


def rounds_of(tokens: list[str], *, is_plain: bool) -> Iterator[dict[str, Any]]:
    """The rounds that write the tokens, always the same."""
    chance, at = random.Random(5), 0
    while at < len(tokens):
        length = 0 if is_plain else min(chance.choice((0, 1, 1, 2, 3, 4)), len(tokens) - at - 1)
        nodes = [_node(tokens[at + i], i - 1, accepted=True) for i in range(length)]
        for _ in range(0 if is_plain else chance.randint(0, 4)):
            nodes.append(_node(chance.choice(OTHERS), chance.randint(-1, len(nodes) - 1), accepted=False))
        bonus = {"id": at + length, "text": tokens[at + length]}
        after = {-1: bonus if not length else nodes[0]}
        for place, node in enumerate(nodes):
            is_inner = node["accepted"] and place + 1 < length
            after[place] = nodes[place + 1] if is_inner else bonus if node["accepted"] else {"id": 7, "text": " then"}
        targets = [{"id": after[row]["id"], "text": after[row]["text"]} for row in range(-1, len(nodes))]
        yield {"index": 0, "position": 12 + at, "nodes": nodes, "bonus": bonus, "target_tokens": targets}
        at += length + 1


def _node(text: str, parent: int, *, accepted: bool) -> dict[str, Any]:
    number = zlib.crc32(text.encode()) % 1000
    return {"id": number, "text": text, "parent": parent, "accepted": accepted, "sources": ["ngram"]}


def fake_app(models_given: list[dict[str, Any]], *, hides_metrics: bool) -> FastAPI:
    app = FastAPI()
    mount(app)

    @app.get("/v1/models")
    async def models() -> Any:
        rows = [{"id": model["name"], "supports_chat": model["supports_chat"]} for model in models_given]
        return {"object": "list", "data": rows}

    @app.get("/draftree/status")
    async def status() -> Any:
        queue = {"running": 1, "waiting": 3, "places": 4, "max_places": 32, "max_waiting": 64}
        return {"models": models_given, "queue": queue, "uptime_seconds": 4000, "version": "0.0"}

    readings = itertools.count(1)

    @app.get("/metrics")
    async def metrics() -> Any:
        if hides_metrics:
            return _error(403, "Metrics are for the operator.")
        n = next(readings)
        text = METRICS.format(requests=3 * n, tokens=60 * n, drafts=10 * n, drafted=50 * n, accepted=29 * n)
        return PlainTextResponse(text)

    @app.post("/v1/chat/completions")
    @app.post("/v1/completions")
    async def write(request: Request) -> Any:
        body = await request.json()
        prompt = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
        if prompt == "busy":
            return _error(429, "The queue is full.", headers={"retry-after": "7"})
        pause = 0.3 if prompt == "slow" else 0.0
        return StreamingResponse(_events(body, prompt, pause), media_type="text/event-stream")

    return app


def _error(status: int, message: str, *, headers: dict[str, str] | None = None) -> Any:
    found = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": found}, status, headers=headers)


async def _events(body: dict[str, Any], prompt: str, delay: float) -> AsyncIterator[str]:
    is_plain = body.get("draft") == "none"
    text = TEXT.replace("close at hand", "near") if is_plain and prompt == "differ" else TEXT
    tokens = words_of(prompt.removeprefix("say ") if prompt.startswith("say ") else text)
    number = 0
    for number, found in enumerate(rounds_of(tokens, is_plain=is_plain), 1):
        if prompt == "fail" and number == 8:
            yield _event(
                {"error": {"message": "The model failed.", "type": "server_error", "param": None, "code": None}}
            )
            return
        await asyncio.sleep(delay)
        pieces = [{"index": 0, "text": n["text"], "origin": "drafted"} for n in found["nodes"] if n["accepted"]]
        pieces.append({"index": 0, "text": found["bonus"]["text"], "origin": "plain" if is_plain else "target"})
        text = "".join(piece["text"] for piece in pieces)
        delta = {"text": text} if "prompt" in body else {"delta": {"content": text}}
        choice = {"index": 0, "finish_reason": None, **delta}
        yield _event({"choices": [choice], "draftree": {"pieces": pieces, "rounds": [found]}})
    speed = 31.0 if is_plain else 58.9
    stats = [{"rounds": number, "tokens_per_second": speed, "completion_tokens": len(tokens)}]
    explain = "" if is_plain else MODEL["explain"]
    end = {"choices": [{"index": 0, "finish_reason": "stop", "delta": {}, "text": ""}]}
    yield _event(end)
    usage = {"prompt_tokens": 12, "completion_tokens": len(tokens), "total_tokens": 12 + len(tokens)}
    yield _event({"choices": [], "usage": usage, "draftree": {"explain": explain, "stats": stats}})
    yield "data: [DONE]\n\n"


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


@contextmanager
def fake_server(*models: dict[str, Any], hides_metrics: bool = False) -> Iterator[str]:
    """Run the server in a thread and yield its URL. `models` are changes of `MODEL`, one for each model."""
    listener = socket.create_server(("127.0.0.1", 0))
    app = fake_app([MODEL | change for change in models or ({},)], hides_metrics=hides_metrics)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
