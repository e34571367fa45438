"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, final

from fastapi import APIRouter, Request, Response

from draftree.core.errors import InvalidRequestError
from draftree.engine.sequence import Update
from draftree.options import RequestOptions
from draftree.outputs import Completion
from draftree.sampling.params import SamplingParams
from draftree.serve.api.beams import completion_request, searched
from draftree.serve.errors import NO_NAMES, JsonResponse, invalid, named_error
from draftree.serve.job import ChoiceUpdate, Job
from draftree.serve.logprobs import OffsetLogprobs, prompt_logprobs_json
from draftree.serve.pool import ServedModel
from draftree.serve.render import Head, Report, closing_fields, last_chunk, usage_so_far
from draftree.serve.request import (
    ERRORS,
    GENERATED,
    Encode,
    completion_options,
    model_of,
    note_unenforced,
    running_job,
    server_of,
)
from draftree.serve.schema import CompletionBody
from draftree.serve.settings import MAX_PROMPTS
from draftree.serve.streams import ChunkEncoder, EventStream, respond
from draftree.text.detokenize import Detokenizer
from draftree.text.fill_in import FillIn, SourceFile

KIND = "text_completion"


@final
class CompletionWriter:
    def __init__(self, job: Job, body: CompletionBody, head: Head, echoed: Sequence[str]) -> None:
        self._job, self._body, self._echoed = job, body, echoed
        self._fields = head.fields(KIND)
        self._report = Report(job, body)
        self._offsets: dict[int, OffsetLogprobs] = {}
        self._begun: set[int] = set()
        self._num_sent = 0

    def whole(self, completions: list[Completion]) -> dict[str, Any]:
        choices = [self._choice(index, done) for index, done in enumerate(completions)]
        return {**self._fields, "choices": choices, **closing_fields(self._job)}

    async def events(self) -> AsyncGenerator[bytes, None]:
        encoder = ChunkEncoder(self._fields)
        async for found in self._job.updates():
            self._num_sent += len(found.update.token_ids)
            chunk = self._chunk(found)
            if chunk is not None:
                yield encoder.event(chunk)
        last = last_chunk(self._job, self._body)
        if last is not None:
            yield encoder.event(last)

    def _choice(self, index: int, done: Completion) -> dict[str, Any]:
        body = self._body
        drops = self._job.drops_text
        text, ids, entries = ("", (), ()) if drops else (done.text, done.token_ids, done.logprobs or ())
        choice: dict[str, Any] = {
            "index": index,
            "text": self._echo(index) + text,
            "logprobs": None,
            "finish_reason": "length" if drops else done.finish_reason,
            "stop_reason": None if drops else done.stop_reason,
        }
        prompt = done.prompt_logprobs or ()
        if body.logprobs is not None:
            choice["logprobs"] = self._begin_offsets(index, prompt).push(entries, ids, is_last=True)
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs_json(prompt, self._job.served.texts)
        if body.return_token_ids:
            choice |= {"prompt_token_ids": list(self._prompt_ids(index)), "token_ids": list(ids)}
        return choice

    def _chunk(self, found: ChoiceUpdate) -> dict[str, Any] | None:
        body, index, update = self._body, found.index, found.update
        drops = self._job.drops_text
        is_first = index not in self._begun
        self._begun.add(index)
        report = self._report.part(found)
        text = "" if drops else found.text
        if is_first:
            text = self._echo(index) + text
        if not (text or update.is_last or report or body.logprobs is not None or body.return_token_ids):
            return None
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
        }
        if update.is_last:
            choice["finish_reason"] = "length" if drops else str(update.sequence.finish_reason)
            choice["stop_reason"] = None if drops else update.sequence.stop_reason
        if body.logprobs is not None:
            choice["logprobs"] = self._logprobs(index, update, is_first=is_first)
        if body.return_token_ids:
            choice["token_ids"] = [] if drops else list(update.token_ids)
            if is_first:
                choice["prompt_token_ids"] = list(self._prompt_ids(index))
        chunk = {"choices": [choice], **usage_so_far(self._job, body, self._num_sent)}
        return {**chunk, "draftree": report} if report else chunk

    def _logprobs(self, index: int, update: Update, *, is_first: bool) -> dict[str, Any]:
        if is_first:
            # those of the prompt are complete before the first token is written
            self._offsets[index] = self._begin_offsets(index, update.sequence.prompt_logprobs)
        ids, entries = ((), ()) if self._job.drops_text else (update.token_ids, update.logprobs)
        return self._offsets[index].push(entries, ids, is_last=update.is_last)

    def _begin_offsets(self, index: int, prompt: Sequence[Any]) -> OffsetLogprobs:
        """Return the writer of log-probabilities of a text, whose first result begins with an echoed prompt."""
        texts = self._job.served.texts
        params = self._job.options
        detokenizer = None
        if texts.tokenizer is not None:
            before = self._job.submissions[index // params.n].decoder_prompt_ids
            detokenizer = Detokenizer(
                texts.tokenizer, skip_special_tokens=params.skip_special_tokens, prompt_ids=before
            )
        found = OffsetLogprobs(texts, detokenizer)
        if self._body.echo:
            found.begin(prompt, self._prompt_ids(index), self._echo(index))
        return found

    def _prompt_ids(self, index: int) -> tuple[int, ...]:
        return self._job.submissions[index // self._job.options.n].prompt_ids

    def _echo(self, index: int) -> str:
        return self._echoed[index // self._job.options.n] if self._echoed else ""


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
    async with _writing(body, request) as (job, writer):
        report = Report(job, body)
        done = await job.finish(report.add)
        return JsonResponse(writer.whole(done) | report.fields(done))


async def _events(body: CompletionBody, request: Request) -> AsyncGenerator[bytes, None]:
    async with _writing(body, request) as (_, writer):
        yield b""
        async for data in writer.events():
            yield data


@asynccontextmanager
async def running_completion(
    body: CompletionBody,
    request: Request,
    *,
    names: Mapping[str, str] = NO_NAMES,
    files: Sequence[SourceFile] | None = None,
    clips_tokens: bool = False,
) -> AsyncIterator[tuple[Job, Head]]:
    """Start the continuations of prompts, and abort what is unfinished at the end; arguments as for `running_chat`.

    With other `files` of a repository, a prompt has a gap even if its suffix is empty.
    """
    model = model_of(request, body.model)
    prompts = _prompts(body)
    head = Head.of("cmpl", body, model)
    options, renamed = completion_options(body, model, head.id)
    renamed = {**names, **{param: names.get(field, field) for param, field in renamed.items()}}
    await note_unenforced(options, renamed, is_strict=body.has_strict_schema)
    encode: Encode | None = None
    if body.suffix or files is not None:
        options, encode = _filling(body, model, options, files=files or (), names=names)
    async with running_job(
        request,
        model,
        prompts=prompts,
        options=options,
        names=renamed,
        encode=encode,
        clips_tokens=clips_tokens,
        drops_text=bool(body.echo) and body.max_tokens == 0,
    ) as job:
        yield job, head


def _filling(
    body: CompletionBody,
    model: ServedModel,
    options: RequestOptions,
    *,
    files: Sequence[SourceFile],
    names: Mapping[str, str],
) -> tuple[RequestOptions, Encode]:
    if not all(isinstance(prompt, str) for prompt in body.prompts()):
        raise invalid("'suffix' belongs to prompts that are texts: send texts, or leave it out", "suffix")
    if options.truncate_prompt_tokens is not None:
        message = "'truncate_prompt_tokens' would cut the tokens before a prompt with 'suffix': leave one of them out"
        raise invalid(message, "truncate_prompt_tokens")
    try:
        stops = [] if model.tokenizer is None else FillIn(model.tokenizer).stop_ids
    except InvalidRequestError as error:
        raise named_error(error, names) from error

    async def encode(prompt: str, *, most: int | None = None) -> list[int]:
        return await model.llm.prompts.encode_gap(prompt, body.suffix or "", files=files, most=most)

    return replace(options, stop_token_ids=[*(options.stop_token_ids or ()), *stops]), encode


@asynccontextmanager
async def _writing(body: CompletionBody, request: Request) -> AsyncIterator[tuple[Job, CompletionWriter]]:
    async with running_completion(body, request) as (job, head):
        echoed = list[str]()
        if body.echo:
            for prompt, submission in zip(_prompts(body), job.submissions, strict=True):
                echoed.append(await _text_of(job.served, job.options, prompt, submission.prompt_ids))
        yield job, CompletionWriter(job, body, head, echoed)


async def _beams(body: CompletionBody, request: Request) -> Response:
    model = model_of(request, body.model)
    if body.suffix:
        raise invalid("'suffix' is not supported with beam search: leave it out", "suffix")
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
