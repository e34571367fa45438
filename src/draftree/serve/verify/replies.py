"""Replies of a verify server that depend on a model or an error alone."""

from __future__ import annotations

from typing import Any

from draftree.models.source import EncoderDecoder
from draftree.remote.errors import FrameError
from draftree.remote.protocol import encode
from draftree.remote.tokenizers import tokenizer_fingerprint
from draftree.serve.errors import ApiError, api_error
from draftree.serve.gate import MAX_RETRY_SECONDS
from draftree.serve.pool import ServedModel
from draftree.serve.verify.settings import VerifySettings

__all__ = ["error_frame", "model_facts"]

RETRY_STATUS = frozenset({429, 503})


async def model_facts(model: ServedModel, settings: VerifySettings) -> dict[str, Any]:
    """Return the part of a greeting that depends on the model; measures its passes once.

    Raises:
        ApiError: 400, the model has an encoder.
    """
    llm, target = model.llm.llm, model.llm.llm.model
    if isinstance(target, EncoderDecoder):
        raise ApiError(400, f"the model '{model.name}' has an encoder: drafts are verified for causal models")
    costs = await model.llm.pass_costs(1 + settings.max_nodes)
    return {
        "model": model.name,
        "vocab": target.vocab_size,
        "context": min(target.max_length, llm.engine.longest),
        "eos": list(llm.requests.eos_ids),
        "tokenizer": await model.llm.prompts.with_tokenizer(tokenizer_fingerprint),
        "exact": target.is_exact,
        "trees": target.supports_trees,
        "nodes": settings.max_nodes,
        "texts": settings.max_texts,
        "lease": settings.lease,
        "passes": [[rows, seconds] for rows, seconds in sorted(costs.items())],
    }


def error_frame(error: Exception, number: int | None) -> bytes:
    """Return the reply for an error; texts of unexpected errors are not shown."""
    if isinstance(error, FrameError):
        return encode({"t": "error", "id": number, "code": error.code, "message": str(error), "status": 422})
    found = api_error(error)
    frame: dict[str, Any] = {"t": "error", "id": number, "code": found.code or "refused", "message": found.message}
    frame |= {"status": found.status, "param": found.param}
    if found.status in RETRY_STATUS:
        given = found.headers.get("Retry-After", "1")
        frame["retry_ms"] = 1000 * min(MAX_RETRY_SECONDS, int(given) if given.isdigit() else 1)
    return encode(frame)
