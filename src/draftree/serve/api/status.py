"""What the server is and does: /health, /ready, /version, /metrics, /v1/models, /draftree/status, /draftree/rounds."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request, Response

from draftree.serve.errors import JsonResponse
from draftree.serve.metrics import CONTENT_TYPE
from draftree.serve.pool import ServedModel
from draftree.serve.request import ERRORS, model_of, server_of
from draftree.serve.server import Server
from draftree.serve.streams import EventStream, event
from draftree.version import __version__

NO_KEY: dict[int | str, dict[str, Any]] = {401: ERRORS[401]}
router = APIRouter()


def model_json(model: ServedModel, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "draftree",
        "root": model.name,
        "parent": None,
        "max_model_len": model.max_context,
        "drafts": list(model.drafts),
        "supports_chat": model.supports_chat,
    }


@router.get("/v1/models", summary="List the models", tags=["models"], responses=ERRORS)
async def list_models(request: Request) -> Response:
    """Return the models that the key may use, aliases included."""
    visible = server_of(request).pool.visible(server_of(request).key_of(request))
    rows = [model_json(model, name) for model in visible for name in model.names]
    return JsonResponse({"object": "list", "data": rows})


@router.get("/v1/models/{name:path}", summary="One model", tags=["models"], responses=ERRORS)
async def one_model(name: str, request: Request) -> Response:
    """Return one model by name or alias."""
    return JsonResponse(model_json(model_of(request, name), name))


FAILED: dict[int | str, dict[str, Any]] = {503: {"description": "An engine has failed: restart the server"}}
NOT_READY: dict[int | str, dict[str, Any]] = {503: {"description": "The models are loading, or the server is draining"}}


@router.get("/health", summary="Liveness", tags=["operation"], responses=FAILED)
async def health(request: Request) -> Response:
    """Return 200 while the process works, also while it loads or drains; 503 if an engine has failed."""
    if server_of(request).has_failed:
        return JsonResponse({"status": "failed"}, 503)
    return JsonResponse({"status": "ok"})


@router.get("/ready", summary="Readiness", tags=["operation"], responses=NOT_READY)
async def ready(request: Request) -> Response:
    """Return 200 if new requests are accepted, else 503 with the reason."""
    server = server_of(request)
    if server.is_ready:
        return JsonResponse({"status": "ready"})
    reason = "failed" if server.has_failed else "draining" if server.gate.is_closed else "loading"
    return JsonResponse({"status": reason}, 503, headers={"Retry-After": "5"})


@router.get("/version", summary="Version", tags=["operation"])
async def version() -> Response:
    """Return the version of Draftree."""
    return JsonResponse({"version": __version__})


for path, endpoint in (("/health", health), ("/ready", ready), ("/version", version)):
    router.add_api_route(path, endpoint, methods=["HEAD"], tags=["operation"], include_in_schema=False)


@router.get("/metrics", summary="Prometheus metrics", tags=["operation"], response_class=Response, responses=NO_KEY)
async def metrics(request: Request) -> Response:
    """Return all metrics in Prometheus' text format."""
    return Response(server_of(request).metrics.text(), headers={"content-type": CONTENT_TYPE})


HELLO = b": rounds\n\n"  # the first bytes of the stream: a reader knows that it is connected


def model_status(server: Server, model: ServedModel) -> dict[str, Any]:
    llm = model.llm.llm
    return {
        "name": model.name,
        "aliases": list(model.aliases),
        "drafts": list(model.drafts),
        "draft_note": llm.draft_note,
        "context": model.max_context,
        "running": model.llm.num_running,
        "waiting": model.llm.num_waiting,
        **server.meters[model.name].rates(),
        "kernels": llm.kernels,
        "dtype": str(llm.model.dtype).removeprefix("torch."),
        "quantization": llm.quantization,
        "explain": llm.planner.explain(),
        "sampling": dataclasses.asdict(llm.requests.defaults),
        "learned": [] if llm.learned is None else [dataclasses.asdict(stats) for stats in llm.learned.stats],
    }


@router.get("/draftree/status", summary="Models and load", tags=["operation"], responses=NO_KEY)
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
    "/draftree/rounds",
    summary="Stream of rounds",
    tags=["operation"],
    response_class=EventStream,
    status_code=200,
    responses={401: ERRORS[401], 429: ERRORS[429]},
)
async def rounds(request: Request) -> Response:
    """Stream the rounds of the models that the key may use as server-sent events, without texts or tokens."""
    server = server_of(request)
    names = {model.name for model in server.pool.visible(server.key_of(request))}
    return EventStream(_events(server, names), done=b"")


async def _events(server: Server, names: set[str]) -> AsyncGenerator[bytes, None]:
    async with aclosing(server.rounds.read()) as batches:
        async for batch in batches:
            yield (
                b"".join(event(feed_round.as_json()) for feed_round in batch if feed_round.model in names)
                if batch
                else HELLO
            )
