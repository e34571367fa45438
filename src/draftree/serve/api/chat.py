"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, Request, Response

from draftree.serve.api.common import ERRORS, model_of, running_job
from draftree.serve.errors import invalid
from draftree.serve.job import Job, JobOptions
from draftree.serve.json_text import JsonResponse
from draftree.serve.params import chat_params, draft_of
from draftree.serve.render.chat import chat_events, chat_object
from draftree.serve.render.head import Head, Report
from draftree.serve.schema.chat import ChatBody, Message
from draftree.serve.sse import EventStream, respond

router = APIRouter(prefix="/v1", tags=["chat"], responses=ERRORS)
ROLES = {"developer": "system"}
"""Roles of the API that templates know under another name."""


@router.post("/chat/completions", summary="Answer a conversation")
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Answer a conversation, at once or as a stream of server-sent events."""
    if body.stream:
        return EventStream(_events(body, request))
    return await respond(request, _object(body, request))


async def _object(body: ChatBody, request: Request) -> Response:
    async with _job(body, request) as (job, head):
        report = Report(job, body)
        completions = await job.finish(report.add)
        return JsonResponse(chat_object(job, body, head, completions) | report.fields(completions))


async def _events(body: ChatBody, request: Request) -> AsyncGenerator[bytes, None]:
    async with _job(body, request) as (job, head):
        async for data in chat_events(job, body, head):
            yield data


@asynccontextmanager
async def _job(body: ChatBody, request: Request) -> AsyncIterator[tuple[Job, Head]]:
    model = model_of(request, body.model)
    if not model.supports_chat:
        raise invalid(f"the model '{model.name}' has no chat template: use /v1/completions", "model")
    if body.tools:
        raise invalid("'tools' are not supported by this model", "tools", code="unsupported_parameter")
    params, names = chat_params(body)
    head = Head.of("chatcmpl", body, model)
    options = JobOptions(
        draft_of(body, model), body.priority, request_id=head.id, trace=body.reports.rounds, names=names
    )
    async with running_job(request, model, prompts=[_messages(body)], params=params, options=options) as job:
        yield job, head


def _messages(body: ChatBody) -> list[dict[str, Any]]:
    return [_plain(message, place) for place, message in enumerate(body.messages)]


def _plain(message: Message, place: int) -> dict[str, Any]:
    if message.name is not None:
        raise invalid("the template has no place for names: leave 'name' out", f"messages[{place}].name")
    if message.content is None:
        raise invalid("a message needs 'content'", f"messages[{place}].content")
    return {"role": ROLES.get(message.role, message.role), "content": message.text}
