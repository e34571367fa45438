"""POST /v1/embeddings."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np
from fastapi import APIRouter, Request, Response

from draftree.core.errors import InvalidRequestError
from draftree.models.source import EncoderDecoder
from draftree.serve.errors import JsonResponse, invalid, named_error
from draftree.serve.request import ERRORS, model_of, server_of
from draftree.serve.schema import Body, Effect, Prompts, ignored, prompts_of, refused
from draftree.serve.settings import MAX_PROMPTS
from draftree.serve.streams import respond

NAMES = {"prompt": "input"}
router = APIRouter(prefix="/v1", tags=["embeddings"], responses=ERRORS)


class EmbeddingsBody(Body):
    """Texts to embed."""

    elsewhere: ClassVar[Mapping[str, Effect]] = {
        "dimensions": refused("embeddings have the width of the model"),
        "normalize": refused("embeddings have the length 1", True),
        "truncate_prompt_tokens": refused("shorten 'input'"),
        "user": ignored("requests are not attributed to end users"),
    }
    model: str | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = "float"
    pooling: Literal["mean", "last"] | None = None


@router.post("/embeddings", summary="Embed texts")
async def embeddings(body: EmbeddingsBody, request: Request) -> Response:
    """Return the model's hidden states of texts, pooled and scaled to length 1."""
    return await respond(request, _embedded(body, request))


async def _embedded(body: EmbeddingsBody, request: Request) -> Response:
    model = model_of(request, body.model)
    server = server_of(request)
    inputs = prompts_of(body.input)
    if isinstance(model.llm.llm.model, EncoderDecoder):
        raise invalid(f"the model '{model.name}' is no causal model: it computes no embeddings", "model")
    if len(inputs) > MAX_PROMPTS:
        raise invalid(f"{len(inputs)} texts were given: give 1 to {MAX_PROMPTS}", "input")
    most = server.settings.max_prompt_tokens or model.max_context
    data = []
    count = 0
    async with server.admit(request, texts=1, priority=0):
        try:
            for index, text in enumerate(inputs):
                ids = await model.llm.prompts.encode(text, most=min(most, model.max_context))
                if len(ids) > most:
                    raise invalid(f"'input[{index}]' has {len(ids)} tokens: this server allows at most {most}", "input")
                vector = await model.llm.embed(ids, pooling=body.pooling or "mean")
                data.append(
                    {"object": "embedding", "index": index, "embedding": _written(vector, body.encoding_format)}
                )
                count += len(ids)
        except InvalidRequestError as error:
            raise named_error(error, NAMES) from error
    record = server.record_of(request)
    record.prompt_tokens = count
    usage = {"prompt_tokens": count, "total_tokens": count}
    return JsonResponse({"object": "list", "data": data, "model": model.name, "usage": usage})


def _written(values: list[float], form: str | None) -> list[float] | str:
    return base64.b64encode(np.asarray(values, dtype="<f4").tobytes()).decode("ascii") if form == "base64" else values
