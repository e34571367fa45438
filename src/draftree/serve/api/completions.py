"""POST /v1/completions, and POST /infill: fill-in-the-middle in the form of llama.cpp, which editors use."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any, ClassVar, final

from fastapi import APIRouter, Request, Response
from pydantic import Field

from draftree.core.errors import InvalidRequestError
from draftree.engine.sequence import TokenLogprob
from draftree.options import RequestOptions
from draftree.sampling.params import SamplingParams
from draftree.serve.api.beams import completion_request, searched
from draftree.serve.errors import NO_NAMES, JsonResponse, invalid, named_error
from draftree.serve.job import ChoiceUpdate, Job
from draftree.serve.logprobs import OffsetLogprobs, prompt_logprobs_json
from draftree.serve.pool import ServedModel
from draftree.serve.render import Head, Report, closing_fields, last_chunk, usage_json, usage_so_far
from draftree.serve.request import ERRORS, GENERATED, Encode, completion_options, model_of, running_job, server_of
from draftree.serve.schema import (
    SHARED,
    Body,
    CompletionBody,
    Effect,
    Items,
    SamplingFields,
    ignored,
    prompts_of,
    validated,
)
from draftree.serve.settings import MAX_PROMPTS
from draftree.serve.streams import ChunkEncoder, EventStream, event, respond
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

    async def whole(self) -> dict[str, Any]:
        completions = await self._job.finish(self._report.add)
        choices = []
        for index, done in enumerate(completions):
            choice = self._choice(index, done.text, done.token_ids, done.logprobs or (), is_first=True, is_last=True)
            if self._body.prompt_logprobs is not None:
                entries = done.prompt_logprobs or ()
                choice["prompt_logprobs"] = prompt_logprobs_json(entries, self._job.served.texts)
            choices.append(choice)
        report = self._report.fields(completions)
        return {**self._fields, "choices": choices, **closing_fields(self._job), **report}

    async def events(self) -> AsyncGenerator[bytes, None]:
        encoder = ChunkEncoder(self._fields)
        async for part in self._job.updates():
            self._num_sent += len(part.update.token_ids)
            chunk = self._chunk(part)
            if chunk is not None:
                yield encoder.event(chunk)
        last = last_chunk(self._job, self._body)
        if last is not None:
            yield encoder.event(last)

    def _chunk(self, part: ChoiceUpdate) -> dict[str, Any] | None:
        body = self._body
        update = part.update
        is_first = part.index not in self._begun
        self._begun.add(part.index)
        report = self._report.part(part)
        choice = self._choice(
            part.index, part.text, update.token_ids, update.logprobs, is_first=is_first, is_last=update.is_last
        )
        if not (choice["text"] or update.is_last or report or body.logprobs is not None or body.return_token_ids):
            return None
        chunk = {"choices": [choice], **usage_so_far(self._job, body, self._num_sent)}
        return {**chunk, "draftree": report} if report else chunk

    def _choice(
        self,
        index: int,
        text: str,
        ids: Sequence[int],
        entries: Sequence[TokenLogprob],
        *,
        is_first: bool,
        is_last: bool,
    ) -> dict[str, Any]:
        """Return a text, or its next part."""
        place, number = divmod(index, self._job.options.n)
        submission = self._job.submissions[place]
        sequence = submission.sequences[number]
        drops = self._job.drops_text
        if drops:
            text = ""
            ids = ()
            entries = ()
        echo = self._echoed[place] if self._echoed and is_first else ""
        choice: dict[str, Any] = {
            "index": index,
            "text": echo + text,
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
        }
        if is_last:
            choice["finish_reason"] = "length" if drops else str(sequence.finish_reason)
            choice["stop_reason"] = None if drops else sequence.stop_reason
        if self._body.logprobs is not None:
            if is_first:
                self._offsets[index] = offsets = OffsetLogprobs(
                    self._job.served.texts,
                    skip_special_tokens=self._job.options.skip_special_tokens,
                    prompt_ids=submission.decoder_prompt_ids,
                )
                if self._body.echo:
                    # those of the prompt are complete before the first token is written
                    offsets.begin(sequence.prompt_logprobs, submission.prompt_ids, echo)
            choice["logprobs"] = self._offsets[index].push(entries, tuple(ids), is_last=is_last)
        if self._body.return_token_ids:
            choice["token_ids"] = list(ids)
            if is_first:
                choice["prompt_token_ids"] = list(submission.prompt_ids)
        return choice


router = APIRouter(tags=["completions"], responses=ERRORS)


@router.post("/v1/completions", summary="Continue prompts", responses=GENERATED)
async def completions(body: CompletionBody, request: Request) -> Response:
    """Continue prompts, at once or as a stream of server-sent events."""
    if body.use_beam_search:
        return await respond(request, _beams(body, request))
    if body.stream:
        return EventStream(_events(body, request))
    return await respond(request, _object(body, request))


async def _object(body: CompletionBody, request: Request) -> Response:
    async with _writing(body, request) as writer:
        return JsonResponse(await writer.whole())


async def _events(body: CompletionBody, request: Request) -> AsyncGenerator[bytes, None]:
    async with _writing(body, request) as writer:
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
    options, renamed = await completion_options(body, model, head.id, names)
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
    if not all(isinstance(prompt, str) for prompt in prompts_of(body.prompt)):
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
async def _writing(body: CompletionBody, request: Request) -> AsyncIterator[CompletionWriter]:
    async with running_completion(body, request) as (job, head):
        echoed = list[str]()
        if body.echo:
            for prompt, submission in zip(_prompts(body), job.submissions, strict=True):
                echoed.append(await _text_of(job.served, job.options, prompt, submission.prompt_ids))
        yield CompletionWriter(job, body, head, echoed)


async def _beams(body: CompletionBody, request: Request) -> Response:
    model = model_of(request, body.model)
    if body.suffix:
        raise invalid("'suffix' is not supported with beam search: leave it out", "suffix")
    search = completion_request(body, server_of(request).settings)
    head, prompts = Head.of("cmpl", body, model), _prompts(body)
    results = await searched(
        request,
        model,
        prompts=prompts,
        search=search,
        priority=body.priority or 0,
        response_id=head.id,
        decoder=body.decoder,
    )
    echoed: list[str] = []
    if body.echo:
        for prompt, result in zip(prompts, results.results, strict=True):
            echoed.append(await _text_of(model, search.prompt, prompt, result.prompt_token_ids))
    return JsonResponse(results.completion(body, head, echoed))


def _prompts(body: CompletionBody) -> list[str | list[int]]:
    prompts = prompts_of(body.prompt)
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


MAX_FILES = 256
STOP_TYPES = {"length": "limit", "stop": "eos"}
INFILL_NAMES = {"max_tokens": "n_predict", "suffix": "input_suffix", "prompt": "input_prefix"}


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
        return EventStream(_infill_events(body, request), done=b"")
    return await respond(request, _infilled(body, request))


def _running_infill(body: InfillBody, request: Request) -> AbstractAsyncContextManager[tuple[Job, Head]]:
    fields = {name: getattr(body, name) for name in ("model", "stream", "draft", *SamplingFields.model_fields)}
    fields |= {"prompt": body.input_prefix + (body.prompt or ""), "suffix": body.input_suffix}
    fields["max_tokens"] = -1 if body.n_predict is None else body.n_predict
    files = [SourceFile(file.filename, file.text) for file in body.input_extra or ()]
    return running_completion(validated(CompletionBody, fields), request, names=INFILL_NAMES, files=files)


async def _infilled(body: InfillBody, request: Request) -> Response:
    async with _running_infill(body, request) as (job, _):
        (done,) = await job.finish()
        last = next(sequence for submission in job.submissions for sequence in submission.sequences)
        return JsonResponse({**_end(job, str(last.finish_reason), last.stop_reason), "content": done.text})


async def _infill_events(body: InfillBody, request: Request) -> AsyncGenerator[bytes, None]:
    async with _running_infill(body, request) as (job, _):
        yield b""
        async for choice in job.updates():
            end = {"stop": False}
            sequence = choice.update.sequence
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
