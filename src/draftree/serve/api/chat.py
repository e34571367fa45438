"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from draftree.serve.api.beams import searched
from draftree.serve.api.common import ERRORS, GENERATED, model_of, running_job, server_of
from draftree.serve.beam_params import chat_request
from draftree.serve.chat_messages import adds_prompt, template_messages, template_variables
from draftree.serve.errors import invalid
from draftree.serve.job import Job, JobOptions
from draftree.serve.json_text import JsonResponse
from draftree.serve.params import chat_params, draft_of
from draftree.serve.pool import ServedModel
from draftree.serve.reasoning import reasoning_variables
from draftree.serve.render.chat import ChatWriter
from draftree.serve.render.head import Head, Report
from draftree.serve.schema.chat import ChatBody
from draftree.serve.sse import EventStream, respond
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
    async with _running(body, request) as chat:
        report = Report(chat.job, body)
        completions = await chat.job.finish(report.add)
        return JsonResponse(chat.writer.whole(completions) | report.fields(completions))


async def _events(body: ChatBody, request: Request) -> AsyncGenerator[bytes, None]:
    async with _running(body, request) as chat:
        yield b""
        async for data in chat.writer.events():
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
    body: ChatBody, model: ServedModel, tools: Sequence[Mapping[str, Any]] | None = None
) -> Callable[[Any], Awaitable[Sequence[int]]]:
    """Return the function from messages to token ids."""
    names = "reasoning_effort", "enable_thinking"
    variables = reasoning_variables(model, effort=body.reasoning_effort, is_enabled=body.enable_thinking, names=names)
    return partial(
        model.llm.prompts.encode_chat,
        tools=tools,
        template_kwargs={**variables, **template_variables(body.chat_template_kwargs, model.tokenizer)},
        add_generation_prompt=adds_prompt(body),
        continue_final_message=bool(body.continue_final_message),
    )


@dataclass(frozen=True, slots=True)
class _Chat:
    """A running answer."""

    job: Job
    writer: ChatWriter


@asynccontextmanager
async def _running(body: ChatBody, request: Request) -> AsyncIterator[_Chat]:
    model = _model(body, request)
    plan = await ToolPlan.load(
        model.tokenizer,
        body.tools,
        tool_choice=body.tool_choice,
        is_parallel=body.parallel_tool_calls is not False,
    )
    params, names = chat_params(body)
    head = Head.of("chatcmpl", body, model)
    options = JobOptions(
        draft_of(body, model),
        body.priority or 0,
        request_id=head.id,
        trace=body.reports.rounds,
        names=names,
        decoder=body.decoder,
    )
    encode = _encoder(body, model, plan.tools)
    async with running_job(
        request,
        model,
        prompts=[template_messages(body.messages, model.chat_template)],
        params=plan.sampling(params),
        options=options,
        encode=encode,
        is_chat=True,
    ) as job:
        yield _Chat(job, ChatWriter(job, body, head, plan))
