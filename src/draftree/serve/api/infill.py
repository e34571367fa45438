"""POST /infill: fill-in-the-middle in the form of llama.cpp, which editors use."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, ClassVar

from fastapi import APIRouter, Request, Response
from pydantic import Field

from draftree.serve.api.completions import running_completion
from draftree.serve.errors import JsonResponse
from draftree.serve.job import Job
from draftree.serve.render import Head, usage_json
from draftree.serve.request import ERRORS, GENERATED
from draftree.serve.schema import SHARED, Body, CompletionBody, Effect, Items, SamplingFields, ignored, validated
from draftree.serve.streams import EventStream, event, respond
from draftree.text.fill_in import SourceFile

MAX_FILES = 256
STOP_TYPES = {"length": "limit", "stop": "eos"}
NAMES = {"max_tokens": "n_predict", "suffix": "input_suffix", "prompt": "input_prefix"}
router = APIRouter(tags=["completions"], responses=ERRORS)


class ExtraFile(Body):
    """Another file of the repository."""

    filename: str = ""
    text: str


class InfillBody(SamplingFields):
    """A text with a gap."""

    elsewhere: ClassVar[Mapping[str, Effect]] = {
        **{name: effect for name, effect in SHARED.items() if name != "n_predict"},
        "n_indent": ignored("the model decides about the indentation"),
        "samplers": ignored("the order of the sampling filters is fixed"),
        "t_max_predict_ms": ignored("'n_predict' limits the text"),
        "t_max_prompt_ms": ignored("'n_predict' limits the text"),
    }
    model: str | None = None
    input_prefix: str
    input_suffix: str
    input_extra: Items[ExtraFile] | None = Field(None, max_length=MAX_FILES)
    prompt: str | None = Field(None, description="text that follows 'input_prefix', before the gap")
    n_predict: int | None = Field(None, ge=-1)
    stream: bool | None = False
    draft: str | None = None


@router.post("/infill", summary="Fill the gap in a text, in llama.cpp's form", responses=GENERATED)
async def infill(body: InfillBody, request: Request) -> Response:
    """Fill a gap, at once or as a stream of server-sent events."""
    if body.stream:
        return EventStream(_events(body, request), done=b"")
    return await respond(request, _object(body, request))


def _running(body: InfillBody, request: Request) -> AbstractAsyncContextManager[tuple[Job, Head]]:
    fields = {name: getattr(body, name) for name in ("model", "stream", "draft", *SamplingFields.model_fields)}
    fields |= {"prompt": body.input_prefix + (body.prompt or ""), "suffix": body.input_suffix}
    fields["max_tokens"] = -1 if body.n_predict is None else body.n_predict
    files = [SourceFile(file.filename, file.text) for file in body.input_extra or ()]
    return running_completion(validated(CompletionBody, fields), request, names=NAMES, files=files)


async def _object(body: InfillBody, request: Request) -> Response:
    async with _running(body, request) as (job, _):
        (done,) = await job.finish()
        last = next(sequence for submission in job.submissions for sequence in submission.sequences)
        return JsonResponse({**_end(job, str(last.finish_reason), last.stop_reason), "content": done.text})


async def _events(body: InfillBody, request: Request) -> AsyncGenerator[bytes, None]:
    async with _running(body, request) as (job, _):
        yield b""
        async for choice in job.updates():
            end, sequence = {"stop": False}, choice.update.sequence
            if choice.update.is_last:
                end = _end(job, str(sequence.finish_reason), sequence.stop_reason)
            yield event({"index": 0, "content": choice.text, **end})


def _end(job: Job, reason: str, stop_reason: str | int | None) -> dict[str, Any]:
    usage = usage_json(job)
    is_word = isinstance(stop_reason, str)
    return {
        "index": 0,
        "stop": True,
        "model": job.served.name,
        "stop_type": "word" if is_word else STOP_TYPES[reason],
        "stopping_word": stop_reason if is_word else "",
        "tokens_predicted": usage["completion_tokens"],
        "tokens_evaluated": usage["prompt_tokens"],
        "tokens_cached": usage["prompt_tokens_details"]["cached_tokens"],
    }
