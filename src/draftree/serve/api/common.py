"""Common parts of the endpoints: the model and the life of a request, and the documented responses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request

from draftree.core.errors import InvalidRequestError
from draftree.engine.sequence import FinishReason
from draftree.options import DecoderOptions
from draftree.sampling.params import SamplingParams
from draftree.serve.errors import invalid
from draftree.serve.job import Job, JobOptions
from draftree.serve.params import (
    Encode,
    clipped,
    longest_prompt,
    named_error,
    require_choices,
    with_read_prediction,
    within_limits,
)
from draftree.serve.pool import ServedModel
from draftree.serve.reasoning import Reasoning
from draftree.serve.records import RequestRecord
from draftree.serve.server import Server, default_draft


class ErrorDetail(BaseModel):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """An error in OpenAI's shape."""

    error: ErrorDetail


Responses = dict[int | str, dict[str, Any]]


def documented_errors(body: type[BaseModel]) -> Responses:
    return {status: {"model": body, "description": text} for status, text in DESCRIPTIONS.items()}


DESCRIPTIONS = {
    400: "A field that cannot be honoured; `param` names it",
    401: "A missing or unknown API key",
    403: "The key may not do this",
    404: "No such model or path",
    405: "No such method",
    408: "The request did not arrive in time",
    413: "The body is too large",
    429: "Too many requests; retry after `Retry-After` seconds",
    500: "The server failed",
    503: "The queue is full, or the server is loading or shutting down",
    504: "The request took too long",
}
ERRORS = documented_errors(ErrorBody)
"""Documented error responses of all endpoints."""
NO_NAMES: Mapping[str, str] = {}
GENERATED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The texts: one JSON object, or server-sent events for stream=true",
        "content": {"application/json": {}, "text/event-stream": {}},
    }
}
"""Documented response of the endpoints that generate."""


def server_of(request: Request) -> Server:
    server: Server = request.app.state.server
    return server


def model_of(request: Request, name: str | None) -> ServedModel:
    """Return a model by name or alias, if the request's key may use it; for None the first."""
    server = server_of(request)
    model = server.pool.get(name, server.key_of(request))
    server.record_of(request).model = model.name
    return model


@asynccontextmanager
async def running_job(
    request: Request,
    model: ServedModel,
    *,
    prompts: Sequence[Any],
    params: SamplingParams,
    options: JobOptions,
    encode: Encode | None = None,
    is_chat: bool = False,
) -> AsyncIterator[Job]:
    """Admit a request and queue its prompts; at the end, abort what is unfinished."""
    server = server_of(request)
    options, encode = _encoding(model, options, encode)
    params = with_read_prediction(params, model, options.draft or default_draft(model))
    limit = server.settings.max_completion_tokens
    field = options.names.get("max_tokens", "max_tokens")
    if options.clips_tokens and limit is not None:
        params = clipped(params, limit, field)
    require_choices(server.settings, params, options.names)
    places = server.admit(request, texts=len(prompts) * params.n, priority=options.priority)
    if not server.has_one_key:
        options = replace(options, priority=0)  # in the engine, it would go before the texts of other keys
    options = replace(options, owner=server.key_of(request).name)
    async with places, server.metered(request, model, options):
        try:
            most = longest_prompt(server.settings, model, params)
            given = prompts if encode is None else [await encode(prompt, most=most) for prompt in prompts]
        except InvalidRequestError as error:
            raise named_error(error, options.names) from error
        if options.clips_tokens:
            params = clipped(params, model.max_context - max(map(len, given)), field)
        limited, ids = await within_limits(server.settings, model, prompts=given, params=params)
        if is_chat:
            options = replace(options, reasoning=await Reasoning.of(model, ids[0]))
            limited = limited if options.reasoning is None else options.reasoning.sampling(limited)
        if options.trace or params.logprobs is not None or params.prompt_logprobs is not None:
            await model.prepare_texts()
        async with await Job.start(model, ids, limited, options) as job:
            try:
                yield job
            finally:
                record = server.record_of(request)
                _note(record, job)
                if server.settings.log_prompts:
                    record.prompt = ["(a sound file)" if isinstance(one, bytes) else one for one in prompts]
                    record.texts = ["".join(one.texts) for each in job.submissions for one in each.sequences]


def _note(record: RequestRecord, job: Job) -> None:
    stats = job.stats()
    record.prompt_tokens = sum(len(submission.prompt_ids) for submission in job.submissions)
    record.cached_tokens = sum(one.cached_tokens for one in stats)
    record.completion_tokens = 0 if job.options.drops_text else sum(one.completion_tokens for one in stats)
    record.accepted_tokens = sum(one.accepted_tokens for one in stats)
    record.rounds = sum(one.rounds for one in stats)
    broken = "; ".join(dict.fromkeys(violation for one in stats for violation in one.violations))
    if broken:
        record.notes["violations"] = f"a text breaks its schema: {broken}"
    sequences = [sequence for submission in job.submissions for sequence in submission.sequences]
    record.finish_reasons = [str(one.finish_reason or FinishReason.ABORT) for one in sequences]
    if job.first_time is not None:
        record.note_first_token(job.first_time)


def _encoding(model: ServedModel, options: JobOptions, encode: Encode | None) -> tuple[JobOptions, Encode | None]:
    """Let the language of the prompts be read when they are encoded: later they are token ids, which have none."""
    spoken = options.decoder.get("source_lang")
    if spoken is None:
        return options, encode
    if encode is not None:
        raise invalid(
            "'source_lang' states the language of a text, and a chat template has no place for it: leave it out",
            "source_lang",
        )
    rest = DecoderOptions(
        decoder_prompt=options.decoder.get("decoder_prompt"), target_lang=options.decoder.get("target_lang")
    )
    return replace(options, decoder=rest), partial(model.llm.prompts.encode, source_lang=spoken)
