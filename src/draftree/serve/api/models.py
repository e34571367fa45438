"""GET /v1/models and /v1/models/{name}."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from draftree.serve.api.common import ERRORS, model_of, server_of
from draftree.serve.json_text import JsonResponse
from draftree.serve.pool import ServedModel

router = APIRouter(prefix="/v1", tags=["models"], responses=ERRORS)


def model_json(model: ServedModel, name: str) -> dict[str, Any]:
    """Return a model under one of its names, with vLLM's and our own extra fields."""
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


@router.get("/models", summary="List the models")
async def list_models(request: Request) -> Response:
    """Return the models that the key may use, aliases included."""
    visible = server_of(request).pool.visible(server_of(request).key_of(request))
    rows = [model_json(model, name) for model in visible for name in model.names]
    return JsonResponse({"object": "list", "data": rows})


@router.get("/models/{name:path}", summary="One model")
async def one_model(name: str, request: Request) -> Response:
    """Return one model by name or alias."""
    return JsonResponse(model_json(model_of(request, name), name))
