"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from fastapi import APIRouter, Request, Response

from draftree.serve.api.common import ERRORS, model_of, running_job
from draftree.serve.errors import invalid
from draftree.serve.job import Job, JobOptions
from draftree.serve.json_text import JsonResponse
from draftree.serve.params import completion_params, draft_of
from draftree.serve.render.completions import completion_events, completion_object
from draftree.serve.render.head import Head, Report
from draftree.serve.schema.completions import CompletionBody
from draftree.serve.settings import MAX_PROMPTS
from draftree.serve.sse import EventStream, respond

router = APIRouter(prefix="/v1", tags=["completions"], responses=ERRORS)


@router.post("/completions", summary="Continue prompts")
async def completions(body: CompletionBody, request: Request) -> Response:
    """Continue prompts, at once or as a stream of server-sent events."""
    if body.stream:
        return EventStream(_events(body, request))
    return await respond(request, _object(body, request))


async def _object(body: CompletionBody, request: Request) -> Response:
    async with _job(body, request) as (job, head):
        report = Report(job, body)
        done = await job.finish(report.add)
        return JsonResponse(completion_object(job, body, head, done) | report.fields(done))


async def _events(body: CompletionBody, request: Request) -> AsyncGenerator[bytes, None]:
    async with _job(body, request) as (job, head):
        async for data in completion_events(job, body, head):
            yield data


@asynccontextmanager
async def _job(body: CompletionBody, request: Request) -> AsyncIterator[tuple[Job, Head]]:
    model = model_of(request, body.model)
    prompts = body.prompts()
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise invalid(f"{len(prompts)} prompts were given: give 1 to {MAX_PROMPTS}", "prompt")
    params, names = completion_params(body)
    head = Head.of("cmpl", body, model)
    options = JobOptions(
        draft_of(body, model),
        body.priority,
        request_id=head.id,
        trace=body.reports.rounds,
        drops_text=bool(body.echo) and body.max_tokens == 0,
        names=names,
    )
    async with running_job(request, model, prompts=prompts, params=params, options=options) as job:
        yield job, head
