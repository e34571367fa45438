"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import APIRouter, Request, Response

from draftree.sampling.params import SamplingParams
from draftree.serve.api.beams import searched
from draftree.serve.api.common import ERRORS, GENERATED, model_of, running_job, server_of
from draftree.serve.beam_params import completion_request
from draftree.serve.errors import invalid
from draftree.serve.job import Job, JobOptions
from draftree.serve.json_text import JsonResponse
from draftree.serve.params import completion_params, draft_of
from draftree.serve.pool import ServedModel
from draftree.serve.render.completions import CompletionWriter
from draftree.serve.render.head import Head, Report
from draftree.serve.schema.completions import CompletionBody
from draftree.serve.settings import MAX_PROMPTS
from draftree.serve.sse import EventStream, respond

router = APIRouter(prefix="/v1", tags=["completions"], responses=ERRORS)


@router.post("/completions", summary="Continue prompts", responses=GENERATED)
async def completions(body: CompletionBody, request: Request) -> Response:
    """Continue prompts, at once or as a stream of server-sent events."""
    if body.use_beam_search:
        return await respond(request, _beams(body, request))
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
        yield b""
        async for data in writer.events():
            yield data


@asynccontextmanager
async def _running(body: CompletionBody, request: Request) -> AsyncIterator[tuple[Job, CompletionWriter]]:
    model = model_of(request, body.model)
    prompts = _prompts(body)
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
        echoed: list[str] = []
        if body.echo:
            for prompt, submission in zip(prompts, job.submissions, strict=True):
                echoed.append(await _text_of(model, params, prompt, submission.prompt_ids))
        yield job, CompletionWriter(job, body, head, echoed)


async def _beams(body: CompletionBody, request: Request) -> Response:
    model = model_of(request, body.model)
    asked = completion_request(body, server_of(request).settings)
    head, prompts = Head.of("cmpl", body, model), _prompts(body)
    found = await searched(
        request,
        model,
        prompts=prompts,
        asked=asked,
        priority=body.priority or 0,
        response_id=head.id,
        decoder=body.decoder,
    )
    echoed: list[str] = []
    if body.echo:
        for prompt, result in zip(prompts, found.results, strict=True):
            echoed.append(await _text_of(model, asked.prompt, prompt, result.prompt_token_ids))
    return JsonResponse(found.completion(body, head, echoed))


def _prompts(body: CompletionBody) -> list[str | list[int]]:
    prompts = body.prompts()
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise invalid(f"{len(prompts)} prompts were given: give 1 to {MAX_PROMPTS}", "prompt")
    return prompts


async def _text_of(model: ServedModel, params: SamplingParams, prompt: str | list[int], ids: Sequence[int]) -> str:
    """Return the text of a prompt: as given, or decoded with all special tokens if it was token ids or truncated."""
    if isinstance(prompt, str) and params.truncate_prompt_tokens is None:
        return prompt
    if model.tokenizer is None:
        return ""
    text = await model.llm.prompts.decode(ids)
    return prompt if isinstance(prompt, str) and prompt in text else text
