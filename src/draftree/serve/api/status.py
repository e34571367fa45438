"""GET /draftree/status and /draftree/rounds: what the page and `draftree watch` show. Without any text."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from draftree.serve.api.common import ERRORS, server_of
from draftree.serve.json_text import JsonResponse
from draftree.serve.learned import learned_status
from draftree.serve.pool import ServedModel
from draftree.serve.server import Server
from draftree.serve.sse import EventStream, event
from draftree.version import __version__

router = APIRouter(prefix="/draftree", tags=["operation"], responses={401: ERRORS[401]})
HELLO = b": rounds\n\n"
"""The first bytes of the stream: a reader knows that it is connected."""


def model_status(server: Server, model: ServedModel) -> dict[str, Any]:
    """Return facts and recent rates of a model."""
    llm, rates = model.llm.llm, server.meters[model.name].rates()
    return {
        "name": model.name,
        "aliases": list(model.aliases),
        "drafts": list(model.drafts),
        "draft_note": model.draft_note,
        "context": model.max_context,
        "running": model.llm.num_running,
        "waiting": model.llm.num_waiting,
        "tokens_per_second": rates.tokens_per_second,
        "acceptance_length": rates.acceptance_length,
        "acceptance_rate": rates.acceptance_rate,
        "kernels": llm.kernels,
        "dtype": str(llm.model.dtype).removeprefix("torch."),
        "quantization": llm.quantization,
        "explain": llm.planner.explain(),
        "sampling": dataclasses.asdict(llm.requests.defaults),
        "learned": learned_status(llm.learned),
    }


@router.get("/status", summary="Models and load")
async def status(request: Request) -> Response:
    """Return the models that the key may use with their load and rates of the last seconds, and the queue."""
    server = server_of(request)
    gate, visible = server.gate, server.pool.visible(server.key_of(request))
    return JsonResponse(
        {
            "models": [model_status(server, model) for model in visible],
            "queue": {
                "running": gate.num_running,
                "waiting": gate.num_waiting,
                "places": gate.num_places,
                "max_places": gate.max_running,
                "max_waiting": gate.max_waiting,
            },
            **({} if server.verify is None else {"verify": server.verify.status()}),
            "is_ready": server.is_ready,
            "uptime_seconds": round(server.uptime, 3),
            "version": __version__,
        }
    )


@router.get(
    "/rounds", summary="Stream of rounds", response_class=EventStream, status_code=200, responses={429: ERRORS[429]}
)
async def rounds(request: Request) -> Response:
    """Stream the rounds of the models that the key may use as server-sent events, without texts or tokens."""
    server = server_of(request)
    names = {model.name for model in server.pool.visible(server.key_of(request))}
    return EventStream(_events(server, names), done=b"")


async def _events(server: Server, names: set[str]) -> AsyncGenerator[bytes, None]:
    with server.rounds.reader() as reader:
        yield HELLO
        async with aclosing(server.rounds.batches(reader)) as batches:
            async for batch in batches:
                yield b"".join(event(one.as_json()) for one in batch if one.model in names)
