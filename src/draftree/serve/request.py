"""One request from its body to its running job: the options, the model, the server's limits, admission and encoding."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request

from draftree.core.errors import InvalidRequestError
from draftree.engine.sequence import FinishReason
from draftree.models.source import FeatureSource
from draftree.options import RequestOptions, WholeStart
from draftree.sampling.grammar.ebnf import literal
from draftree.sampling.grammar.schema import SchemaError
from draftree.sampling.grammar.schema_grammar import schema_grammar
from draftree.sampling.params import MAX_IDS, require_length
from draftree.serve.errors import invalid, named_error
from draftree.serve.images import without_images
from draftree.serve.job import Job
from draftree.serve.pool import ServedModel
from draftree.serve.reasoning import Reasoning
from draftree.serve.records import RequestRecord
from draftree.serve.schema import (
    BeamBody,
    ChatBody,
    CompletionBody,
    ResponseFormat,
    SamplingBody,
    StructuredOutputs,
    note,
)
from draftree.serve.server import Server
from draftree.serve.settings import ServerSettings

COMPLETION_TOKENS = 16
OTHER_MEANING = {"draft", "grammar", "json_schema", "logit_bias", "max_tokens", "prediction", "regex", "request_id"}
OPTION_FIELDS = tuple(
    field.name
    for field in dataclasses.fields(RequestOptions)
    if field.name in SamplingBody.model_fields and field.name not in OTHER_MEANING
)
"""Fields with the library's name and meaning; null means the library's default, which is OpenAI's."""
Checked = tuple[RequestOptions, dict[str, str]]
"""The options of a request, and the body's field of each library parameter that has another name there."""


async def chat_options(body: ChatBody, model: ServedModel, request_id: str, names: Mapping[str, str]) -> Checked:
    """Return the options of an answer; `names` are those that the client's request has for fields of the body."""
    _require_no_beams(body)
    limit, limit_name = chat_limit(body)
    if body.top_logprobs and not body.logprobs:
        raise invalid("'top_logprobs' needs logprobs=true", "top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    overrides = {"max_tokens": limit, "logprobs": logprobs, "request_id": request_id}
    return await _checked(body, model, overrides, {**names, "max_tokens": names.get(limit_name, limit_name)})


def chat_limit(body: ChatBody) -> tuple[int | None, str]:
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise invalid("'max_tokens' and 'max_completion_tokens' differ: give one of them", "max_tokens")
    if body.max_tokens is None:
        return _limit(body.max_completion_tokens), "max_completion_tokens"
    return _limit(body.max_tokens), "max_tokens"


def _limit(tokens: int | None) -> int | None:
    """Return a maximum number of tokens; None for -1, which means as many as fit."""
    return None if tokens == -1 else tokens


def _require_no_beams(body: BeamBody) -> None:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise invalid(
            f"best_of={body.best_of} is not supported: all 'n' texts are returned; leave it out, set it to n, or set "
            "use_beam_search=true",
            "best_of",
            code="unsupported_parameter",
        )
    for name, neutral in (("length_penalty", 1), ("early_stopping", False), ("beam_options", {})):
        if getattr(body, name) not in (None, neutral):
            message = f"'{name}' is not supported without beam search: leave it out, or set use_beam_search=true"
            raise invalid(message, name, code="unsupported_parameter")


async def completion_options(
    body: CompletionBody, model: ServedModel, request_id: str, names: Mapping[str, str]
) -> Checked:
    _require_no_beams(body)
    limit = completion_limit(body)
    overrides: dict[str, Any] = {"max_tokens": limit, "logprobs": body.logprobs, "request_id": request_id}
    if body.echo and limit == 0:
        # the prompt alone is wanted: one token is generated and dropped
        overrides["max_tokens"] = 1
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        overrides["prompt_logprobs"] = body.logprobs
    return await _checked(body, model, overrides, names)


def completion_limit(body: CompletionBody) -> int | None:
    """Return the maximum number of tokens of a plain completion; None for as many as fit."""
    return COMPLETION_TOKENS if body.max_tokens is None else _limit(body.max_tokens)


async def _checked(
    body: SamplingBody, model: ServedModel, overrides: Mapping[str, Any], names: Mapping[str, str]
) -> Checked:
    if body.stream and body.prompt_logprobs is not None:
        raise invalid("'prompt_logprobs' cannot be streamed: set stream=false", "prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        note("stream_options", "is ignored: the response is not streamed")
    values = {name: getattr(body, name) for name in OPTION_FIELDS if getattr(body, name) is not None}
    values["logit_bias"] = _logit_bias(body.logit_bias)
    values["prediction"] = (body.prediction.text or None) if body.prediction is not None else None
    values["draft"] = model.named_draft(body.draft)
    if body.prediction is not None and values["draft"] is None:
        values["draft"] = next(filter(model.reads_predictions, model.drafts), None)
    values["trace"] = body.reports.rounds
    renamed = {**names, "template_kwargs": "chat_template_kwargs"}
    constraint = _constraint(body)
    if constraint is not None:
        field, name, value = constraint
        values[name] = value
        renamed[name] = names.get(field, field)
    options = checked_options({**values, **overrides}, renamed)
    if isinstance(options.json_schema, str):
        await _note_unenforced(options.json_schema, renamed["json_schema"], is_strict=body.has_strict_schema)
    return options, renamed


async def _note_unenforced(schema: str, field: str, *, is_strict: bool) -> None:
    """Note what a schema says that no grammar can enforce."""
    try:
        grammar = await asyncio.to_thread(schema_grammar, schema)
    except SchemaError as error:
        raise invalid(f"'{field}' is refused: {error}", field) from error
    parts = "; ".join(grammar.unenforced)
    if parts and is_strict:
        reason = f"'{field}' has strict=true, but not all of it can be enforced ({parts})"
        raise invalid(f"{reason}: set strict=false, and finished texts are checked", field)
    if parts:
        note(field, f"is not enforced in part, and checked afterwards: {parts}")


def with_read_prediction(options: RequestOptions, model: ServedModel) -> RequestOptions:
    """Return the parameters without a prediction that the drafter does not read: it is a hint, and changes no text."""
    if options.prediction is None or model.reads_predictions(options.draft or model.default_draft):
        return options
    readers = list(filter(model.reads_predictions, model.drafts))
    remedy = f"set 'draft' to '{readers[0]}'" if readers else "no loaded drafter reads it (--draft prediction)"
    note("prediction", f"is ignored: {remedy}")
    return replace(options, prediction=None)


def checked_options(values: Mapping[str, Any], names: Mapping[str, str]) -> RequestOptions:
    try:
        return RequestOptions(**values)
    except InvalidRequestError as error:
        raise named_error(error, names) from error


def _logit_bias(biases: Mapping[str, float] | None) -> dict[int, float] | None:
    if not biases:
        return None
    require_length("logit_bias", biases, MAX_IDS, "token ids")
    for token in biases:
        if not re.fullmatch(r"[0-9]{1,9}", token):
            raise invalid(f"logit_bias has the key '{token[:40]}': keys must be token ids", "logit_bias")
    return {int(token): bias for token, bias in biases.items()}


CONSTRAINTS = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "guided_choice": "choice",
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
}
"""Fields that constrain the text, and the kinds of their constraints."""


def _constraint(body: SamplingBody) -> tuple[str, str, Any] | None:
    """Return the field that constrains the text, and the name and value of its library parameter; None without."""
    constraints = [
        ("response_format", "json_schema", _schema_of(body.response_format)),
        ("structured_outputs", *_structured(body.structured_outputs)),
        *((field, kind, getattr(body, field)) for field, kind in CONSTRAINTS.items()),
    ]
    constraints = [constraint for constraint in constraints if constraint[2] is not None]
    if not constraints:
        return None
    (field, kind, value), *others = constraints
    if others:
        raise invalid(f"'{field}' and '{others[0][0]}' both constrain the text: give one of them", others[0][0])
    if kind == "choice":
        return field, "grammar", "root ::= " + " | ".join(map(literal, value))
    return field, kind, value


def _schema_of(wanted: ResponseFormat | None) -> Any:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "object"} if wanted.schema_ is None else wanted.schema_
    if wanted.json_schema is None and wanted.schema_ is None:
        raise invalid("response_format of type json_schema needs the field 'json_schema'", "response_format")
    # without `strict` the schema is followed, too
    schema = wanted.schema_ if wanted.json_schema is None else wanted.json_schema.schema_
    return {} if schema is None else schema


def _structured(wanted: StructuredOutputs | None) -> tuple[str, Any]:
    if wanted is None:
        return "", None
    options = [
        ("json_schema", wanted.json_),
        ("regex", wanted.regex),
        ("grammar", wanted.grammar),
        ("choice", wanted.choice),
        ("json_schema", {"type": "object"} if wanted.json_object else None),
    ]
    options = [option for option in options if option[1] is not None]
    if len(options) != 1:
        message = "'structured_outputs' needs exactly one of json, regex, choice, grammar and json_object"
        raise invalid(message, "structured_outputs")
    return options[0]


Encode = Callable[..., Awaitable[Any]]
"""Encodes a prompt; beyond `most` tokens, a keyword argument, it may be refused without encoding it all."""


def longest_prompt(settings: ServerSettings, model: ServedModel, options: RequestOptions) -> int | None:
    """Return the most tokens that a prompt may have; None if it is truncated."""
    most = model.llm.llm.requests.longest_prompt(options)
    if most is None or settings.max_prompt_tokens is None:
        return most
    return min(most, settings.max_prompt_tokens)


def require_choices(settings: ServerSettings, options: RequestOptions, names: Mapping[str, str]) -> None:
    if options.n > settings.max_choices:
        raise invalid(f"n={options.n}: this server allows at most {settings.max_choices} texts per request", "n")
    limit = settings.max_completion_tokens
    if limit is not None and options.max_tokens is not None and options.max_tokens > limit:
        name = names.get("max_tokens", "max_tokens")
        raise invalid(f"{name}={options.max_tokens}: this server allows at most {limit}", name)


def clipped(options: RequestOptions, most: int, field: str) -> RequestOptions:
    """Return parameters without a maximum number of tokens if it is above what is possible, and note its field."""
    if options.max_tokens is None or options.max_tokens <= most:
        return options
    note(field, f"is reduced to {most}: more tokens do not fit")
    return replace(options, max_tokens=None)


def within_limits(
    settings: ServerSettings, model: ServedModel, *, prompts: Sequence[Any], options: RequestOptions
) -> RequestOptions:
    """Apply the server's limits to encoded prompts, and return the options with a maximum number of tokens."""
    # the features of sound have no tokens, and a fixed length
    lengths = [0 if isinstance(prompt, FeatureSource) else len(prompt) for prompt in prompts]
    kept = options.truncate_prompt_tokens
    longest = max((n if kept is None or kept < 0 else min(kept, n) for n in lengths), default=0)
    if settings.max_prompt_tokens is not None and longest > settings.max_prompt_tokens:
        text = f"the prompt has {longest} tokens: this server allows at most {settings.max_prompt_tokens}; shorten it"
        raise invalid(text, None, code="context_length_exceeded")
    if settings.max_completion_tokens is None or options.max_tokens is not None:
        return options
    return replace(options, max_tokens=min(settings.max_completion_tokens, max(1, model.max_context - longest)))


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
GENERATED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The texts: one JSON object, or server-sent events for stream=true",
        "content": {"application/json": {}, "text/event-stream": {}},
    }
}


def server_of(request: Request) -> Server:
    return request.app.state.server


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

    `names`: the body's field of an option, where it has another name. `encode`: encodes a prompt; None for
    `AsyncLLM.prompts.encode`. `start`: returns the decoder's prompt, after the prompts are encoded. `clips_tokens`:
    whether a `max_tokens` that does not fit is reduced. `drops_text`: as for `Job`.
    """
    server = server_of(request)
    encode = prompt_encoder(model, encode, options.source_lang)
    options = with_read_prediction(replace(options, source_lang=None), model)
    limit = server.settings.max_completion_tokens
    field = names.get("max_tokens", "max_tokens")
    if clips_tokens and limit is not None:
        options = clipped(options, limit, field)
    require_choices(server.settings, options, names)
    places = server.admit(request, texts=len(prompts) * options.n, priority=options.priority)
    async with places, server.metered(request, model, options):
        try:
            most = longest_prompt(server.settings, model, options)
            encoded = [await encode(prompt, most=most) for prompt in prompts]
        except InvalidRequestError as error:
            raise named_error(error, names) from error
        if start is not None:
            options = replace(options, decoder_prompt=start())
        if clips_tokens:
            options = clipped(options, model.max_context - max(map(len, encoded)), field)
        options = within_limits(server.settings, model, prompts=encoded, options=options)
        reasoning = await Reasoning.of(model, encoded[0]) if is_chat else None
        options = replace(
            options if reasoning is None else reasoning.sampling(options),
            # in the engine, the priority would put it before the texts of other keys
            priority=options.priority if server.has_one_key else 0,
            owner=server.key_of(request).name,
        )
        if options.trace or options.logprobs is not None or options.prompt_logprobs is not None:
            await model.prepare_texts()
        async with aclosing(await Job.start(model, encoded, options, names=names)) as job:
            job.reasoning = reasoning
            job.drops_text = drops_text
            try:
                yield job
            finally:
                record = server.record_of(request)
                _note(record, job)
                if server.settings.log_prompts:
                    record.prompt = [without_images(prompt) for prompt in prompts]
                    record.texts = ["".join(sequence.texts) for each in job.submissions for sequence in each.sequences]


def _note(record: RequestRecord, job: Job) -> None:
    stats = job.stats()
    record.prompt_tokens = sum(len(submission.prompt_ids) for submission in job.submissions)
    record.cached_tokens = sum(completion.cached_tokens for completion in stats)
    record.completion_tokens = 0 if job.drops_text else sum(completion.completion_tokens for completion in stats)
    record.accepted_tokens = sum(completion.accepted_tokens for completion in stats)
    record.rounds = sum(completion.rounds for completion in stats)
    broken = "; ".join(dict.fromkeys(violation for completion in stats for violation in completion.violations))
    if broken:
        record.notes["violations"] = f"a text breaks its schema: {broken}"
    sequences = [sequence for submission in job.submissions for sequence in submission.sequences]
    record.finish_reasons = [str(sequence.finish_reason or FinishReason.ABORT) for sequence in sequences]
    if job.first_time is not None:
        record.note_first_token(job.first_time)


def prompt_encoder(model: ServedModel, encode: Encode | None, source_lang: str | None) -> Encode:
    """Return the encoder of prompts; the default one for None, which reads the language of the prompt."""
    if encode is None:
        return partial(model.llm.prompts.encode, source_lang=source_lang)
    if source_lang is not None:
        raise invalid(
            "'source_lang' states the language of a text, and a chat template has no place for it: leave it out",
            "source_lang",
        )
    return encode
