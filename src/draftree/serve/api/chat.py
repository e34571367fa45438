"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from draftree.core.errors import InvalidRequestError
from draftree.engine.sequence import Update
from draftree.serve.api.beams import searched
from draftree.serve.api.common import ERRORS, GENERATED, NO_NAMES, model_of, running_job, server_of
from draftree.serve.beam_params import chat_request
from draftree.serve.chat_messages import adds_prompt, template_messages, template_variables
from draftree.serve.errors import invalid
from draftree.serve.job import Job, JobOptions
from draftree.serve.json_text import JsonResponse
from draftree.serve.params import chat_params, draft_of, named_error, note_unenforced
from draftree.serve.pool import ServedModel
from draftree.serve.reasoning import reasoning_variables
from draftree.serve.render.chat import ChatWriter
from draftree.serve.render.head import Head, Report
from draftree.serve.schema.chat import ChatBody
from draftree.serve.sse import EventStream, respond
from draftree.serve.token_limits import Encode
from draftree.serve.tools.deltas import Delta, ReasoningDelta
from draftree.serve.tools.plan import ToolPlan

router = APIRouter(prefix="/v1", tags=["chat"], responses=ERRORS)


@router.post("/chat/completions", summary="Answer a conversation", responses=GENERATED)
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Answer a conversation, at once or as a stream of server-sent events."""
    if body.use_beam_search:
        return await respond(request, _beams(body, request))
    if body.stream:
        return EventStream(_events(body, request))
    return await respond(request, _object(body, request))


async def _object(body: ChatBody, request: Request) -> Response:
    async with running_chat(body, request) as chat:
        report = Report(chat.job, body)
        completions = await chat.job.finish(report.add)
        writer = ChatWriter(chat.job, body, chat.head, chat.plan)
        return JsonResponse(writer.whole(completions) | report.fields(completions))


async def _events(body: ChatBody, request: Request) -> AsyncGenerator[bytes, None]:
    async with running_chat(body, request) as chat:
        yield b""
        async for data in ChatWriter(chat.job, body, chat.head, chat.plan).events():
            yield data


async def _beams(body: ChatBody, request: Request) -> Response:
    model, asked = _model(body, request), chat_request(body, server_of(request).settings)
    head = Head.of("chatcmpl", body, model)
    found = await searched(
        request,
        model,
        prompts=[template_messages(body.messages, model.chat_template)],
        asked=asked,
        priority=body.priority or 0,
        response_id=head.id,
        decoder=body.decoder,
        encode=_encoder(body, model),
    )
    return JsonResponse(found.chat(body, head))


def _model(body: ChatBody, request: Request) -> ServedModel:
    model = model_of(request, body.model)
    if not model.supports_chat:
        raise invalid(f"the model '{model.name}' has no chat template: use /v1/completions", "model")
    return model


def _encoder(
    body: ChatBody,
    model: ServedModel,
    tools: Sequence[Mapping[str, Any]] | None = None,
    names: Mapping[str, str] = NO_NAMES,
) -> Encode:
    """Return the function from messages to token ids."""
    variables = reasoning_variables(
        model,
        effort=body.reasoning_effort,
        is_enabled=body.enable_thinking,
        effort_name=names.get("reasoning_effort", "reasoning_effort"),
        switch_name=names.get("enable_thinking", "enable_thinking"),
    )
    return partial(
        model.llm.prompts.encode_chat,
        tools=tools,
        template_kwargs={**variables, **template_variables(body.chat_template_kwargs, model.tokenizer)},
        add_generation_prompt=adds_prompt(body),
        continue_final_message=bool(body.continue_final_message),
    )


@dataclass(frozen=True, slots=True)
class AnswerUpdate:
    """New parts of an answer."""

    deltas: Sequence[Delta]
    update: Update


@dataclass(frozen=True, slots=True)
class Chat:
    """A running answer.

    Attributes:
        job: its texts.
        head: identity of the response.
        plan: its tools.
        shows_reasoning: whether the response has its reasoning.
    """

    job: Job
    head: Head
    plan: ToolPlan
    shows_reasoning: bool

    async def updates(self) -> AsyncIterator[AnswerUpdate]:
        """Yield the parts of the first text, parsed."""
        parser = self.plan.parser(self.job.options.reasoning)
        async for found in self.job.updates():
            deltas = parser.push("".join(piece.text for piece in found.update.pieces))
            if found.update.is_last:
                deltas += parser.finish()
            if not self.shows_reasoning:
                deltas = [delta for delta in deltas if not isinstance(delta, ReasoningDelta)]
            yield AnswerUpdate(deltas, found.update)


@asynccontextmanager
async def running_chat(
    body: ChatBody,
    request: Request,
    *,
    prefix: str = "chatcmpl",
    names: Mapping[str, str] = NO_NAMES,
    clips_tokens: bool = False,
) -> AsyncIterator[Chat]:
    """Start the answers of a conversation, and abort what is unfinished at the end.

    Args:
        body: the request.
        request: of the client.
        prefix: of the id of the response.
        names: fields of `body` that the client's request has under another name.
        clips_tokens: whether a `max_tokens` that does not fit is reduced.

    Raises:
        ApiError: refused by the server or the engine.
    """
    model = _model(body, request)
    params, renamed = chat_params(body)
    renamed = {**names, **{param: names.get(field, field) for param, field in renamed.items()}}
    await note_unenforced(params, renamed, is_strict=body.has_strict_schema)
    plan = await _plan(body, model, answer=params.json_schema)
    head = Head.of(prefix, body, model)
    options = JobOptions(
        draft_of(body, model),
        body.priority or 0,
        request_id=head.id,
        trace=body.reports.rounds,
        names=renamed if plan.grammar is None else {**renamed, "grammar": "tools"},
        decoder=body.decoder,
        clips_tokens=clips_tokens,
    )
    encode = _encoder(body, model, plan.tools, names)
    messages = plan.messages(template_messages(body.messages, model.chat_template), model.chat_template)
    async with running_job(
        request,
        model,
        prompts=[messages],
        params=plan.sampling(params),
        options=options,
        encode=encode,
        is_chat=True,
    ) as job:
        yield Chat(job, head, plan, body.include_reasoning is not False)


async def encoded_chat(body: ChatBody, request: Request) -> Sequence[int]:
    """Return the token ids of a conversation.

    Raises:
        ApiError: a conversation that the model cannot read.
    """
    model = _model(body, request)
    plan = await _plan(body, model)
    messages = plan.messages(template_messages(body.messages, model.chat_template), model.chat_template)
    try:
        return await _encoder(body, model, plan.tools)(messages)
    except InvalidRequestError as error:
        raise named_error(error, {"template_kwargs": "chat_template_kwargs"}) from error


async def _plan(body: ChatBody, model: ServedModel, *, answer: object = None) -> ToolPlan:
    return await ToolPlan.load(
        model.tokenizer,
        body.tools,
        tool_choice=body.tool_choice,
        is_parallel=body.parallel_tool_calls is not False,
        answer=answer,
    )
