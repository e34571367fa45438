"""GET /metrics: Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from draftree.serve.api.common import ERRORS, server_of
from draftree.serve.metrics import CONTENT_TYPE

router = APIRouter(tags=["operation"], responses={401: ERRORS[401]})


@router.get("/metrics", summary="Prometheus metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Return all metrics in Prometheus' text format."""
    return Response(server_of(request).metrics.text(), headers={"content-type": CONTENT_TYPE})
