"""Common parts of the endpoints: the model and the life of a request, and the documented responses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request

from draftree.core.errors import InvalidRequestError
from draftree.engine.sequence import FinishReason
from draftree.options import RequestOptions, WholeStart
from draftree.serve.errors import invalid
from draftree.serve.job import Job
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
from draftree.serve.server import Server


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
NO_NAMES: Mapping[str, str] = {}
GENERATED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The texts: one JSON object, or server-sent events for stream=true",
        "content": {"application/json": {}, "text/event-stream": {}},
    }
}


def server_of(request: Request) -> Server:
    server: Server = request.app.state.server
    return server


def model_of(request: Request, name: str | None) -> ServedModel:
    """Return a model by name or alias, if the request's key may use it; for None the first."""
    server = server_of(request)
    model = server.pool.get(name, server.key_of(request))
    server.record_of(request).model = model.name
    return model


def chat_model_of(request: Request, name: str | None) -> ServedModel:
    model = model_of(request, name)
    if not model.supports_chat:
        raise invalid(f"the model '{model.name}' has no chat template: use /v1/completions", "model")
    return model


@asynccontextmanager
async def running_job(
    request: Request,
    model: ServedModel,
    *,
    prompts: Sequence[Any],
    options: RequestOptions,
    names: Mapping[str, str],
    encode: Encode | None = None,
    start: Callable[[], WholeStart | None] | None = None,
    is_chat: bool = False,
    clips_tokens: bool = False,
    drops_text: bool = False,
) -> AsyncIterator[Job]:
    """Admit a request and queue its prompts; at the end, abort what is unfinished.

    Args:
        names: the body's field of an option, where it has another name.
        encode: encodes a prompt; None for `AsyncLLM.prompts.encode`.
        start: returns the decoder's prompt, after the prompts are encoded.
        clips_tokens: whether a `max_tokens` that does not fit is reduced.
        drops_text: as for `Job`.
    """
    server = server_of(request)
    options, encode = _encoding(model, options, encode)
    options = with_read_prediction(options, model)
    limit = server.settings.max_completion_tokens
    field = names.get("max_tokens", "max_tokens")
    if clips_tokens and limit is not None:
        options = clipped(options, limit, field)
    require_choices(server.settings, options, names)
    places = server.admit(request, texts=len(prompts) * options.n, priority=options.priority)
    async with places, server.metered(request, model, options):
        try:
            most = longest_prompt(server.settings, model, options)
            given = prompts if encode is None else [await encode(prompt, most=most) for prompt in prompts]
        except InvalidRequestError as error:
            raise named_error(error, names) from error
        if start is not None:
            options = replace(options, decoder_prompt=start())
        if clips_tokens:
            options = clipped(options, model.max_context - max(map(len, given)), field)
        options, ids = await within_limits(server.settings, model, prompts=given, options=options)
        reasoning = await Reasoning.of(model, ids[0]) if is_chat else None
        options = replace(
            options if reasoning is None else reasoning.sampling(options),
            # in the engine, the priority would put it before the texts of other keys
            priority=options.priority if server.has_one_key else 0,
            owner=server.key_of(request).name,
        )
        if options.trace or options.logprobs is not None or options.prompt_logprobs is not None:
            await model.prepare_texts()
        async with await Job.start(model, ids, options, names=names) as job:
            job.reasoning = reasoning
            job.drops_text = drops_text
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
    record.completion_tokens = 0 if job.drops_text else sum(one.completion_tokens for one in stats)
    record.accepted_tokens = sum(one.accepted_tokens for one in stats)
    record.rounds = sum(one.rounds for one in stats)
    broken = "; ".join(dict.fromkeys(violation for one in stats for violation in one.violations))
    if broken:
        record.notes["violations"] = f"a text breaks its schema: {broken}"
    sequences = [sequence for submission in job.submissions for sequence in submission.sequences]
    record.finish_reasons = [str(one.finish_reason or FinishReason.ABORT) for one in sequences]
    if job.first_time is not None:
        record.note_first_token(job.first_time)


def _encoding(
    model: ServedModel, options: RequestOptions, encode: Encode | None
) -> tuple[RequestOptions, Encode | None]:
    """Let the language of the prompts be read when they are encoded: later they are token ids, which have none."""
    if options.source_lang is None:
        return options, encode
    if encode is not None:
        raise invalid(
            "'source_lang' states the language of a text, and a chat template has no place for it: leave it out",
            "source_lang",
        )
    encode = partial(model.llm.prompts.encode, source_lang=options.source_lang)
    return replace(options, source_lang=None), encode
