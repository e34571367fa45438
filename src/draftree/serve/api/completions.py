"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from fastapi import APIRouter, Request, Response

from draftree.serve.api.common import ERRORS, GENERATED, model_of, running_job
from draftree.serve.errors import invalid
from draftree.serve.job import Job, JobOptions
from draftree.serve.json_text import JsonResponse
from draftree.serve.params import completion_params, draft_of
from draftree.serve.render.completions import CompletionWriter
from draftree.serve.render.head import Head, Report
from draftree.serve.schema.completions import CompletionBody
from draftree.serve.settings import MAX_PROMPTS
from draftree.serve.sse import EventStream, respond

router = APIRouter(prefix="/v1", tags=["completions"], responses=ERRORS)


@router.post("/completions", summary="Continue prompts", responses=GENERATED)
async def completions(body: CompletionBody, request: Request) -> Response:
    """Continue prompts, at once or as a stream of server-sent events."""
    if body.stream:
        return EventStream(_events(body, request))
    return await respond(request, _object(body, request))


async def _object(body: CompletionBody, request: Request) -> Response:
    async with _running(body, request) as (job, writer):
        report = Report(job, body)
        done = await job.finish(report.add)
        return JsonResponse(writer.whole(done) | report.fields(done))


async def _events(body: CompletionBody, request: Request) -> AsyncGenerator[bytes, None]:
    async with _running(body, request) as (_, writer):
        async for data in writer.events():
            yield data


@asynccontextmanager
async def _running(body: CompletionBody, request: Request) -> AsyncIterator[tuple[Job, CompletionWriter]]:
    model = model_of(request, body.model)
    prompts = body.prompts()
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise invalid(f"{len(prompts)} prompts were given: give 1 to {MAX_PROMPTS}", "prompt")
    params, names = completion_params(body)
    head = Head.of("cmpl", body, model)
    options = JobOptions(
        draft_of(body, model),
        body.priority or 0,
        request_id=head.id,
        trace=body.reports.rounds,
        drops_text=bool(body.echo) and body.max_tokens == 0,
        names=names,
        decoder=body.decoder,
    )
    async with running_job(request, model, prompts=prompts, params=params, options=options) as job:
        echoed = [await _text_of(job, place, prompt) for place, prompt in enumerate(prompts)] if body.echo else []
        yield job, CompletionWriter(job, body, head, echoed)


async def _text_of(job: Job, place: int, prompt: str | list[int]) -> str:
    """Return the text of a prompt: as given, or decoded if it was token ids or truncated."""
    if isinstance(prompt, str) and job.params.truncate_prompt_tokens is None:
        return prompt
    if job.served.tokenizer is None:
        return ""
    ids = job.submissions[place].prompt_ids
    return await job.served.llm.prompts.decode(ids, skip_special_tokens=job.params.skip_special_tokens)
