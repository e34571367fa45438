"""GET /health, /ready and /version: whether the process works, whether it accepts requests, and what it is."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from draftree.serve.api.common import server_of
from draftree.serve.json_text import JsonResponse
from draftree.version import __version__

router = APIRouter(tags=["operation"])
FAILED: dict[int | str, dict[str, Any]] = {503: {"description": "An engine has failed: restart the server"}}
NOT_READY: dict[int | str, dict[str, Any]] = {503: {"description": "The models are loading, or the server is draining"}}


@router.get("/health", summary="Liveness", responses=FAILED)
async def health(request: Request) -> Response:
    """Return 200 while the process works, also while it loads or drains; 503 if an engine has failed."""
    if server_of(request).has_failed:
        return JsonResponse({"status": "failed"}, 503)
    return JsonResponse({"status": "ok"})


@router.get("/ready", summary="Readiness", responses=NOT_READY)
async def ready(request: Request) -> Response:
    """Return 200 if new requests are accepted, else 503 with the reason."""
    server = server_of(request)
    if server.is_ready:
        return JsonResponse({"status": "ready"})
    reason = "failed" if server.has_failed else "draining" if server.gate.is_closed else "loading"
    return JsonResponse({"status": reason}, 503, headers={"Retry-After": "5"})


@router.get("/version", summary="Version")
async def version() -> Response:
    """Return the version of Draftree."""
    return JsonResponse({"version": __version__})


for path, endpoint in (("/health", health), ("/ready", ready), ("/version", version)):
    router.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False)
