"""Plain completions: the whole object, and chunks of a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from draftree.completion import Completion
from draftree.engine.sequence import Update
from draftree.serve.job import ChoiceUpdate, Job
from draftree.serve.render.head import Head, Report, closing_fields, last_chunk, usage_so_far
from draftree.serve.render.tokens import OffsetLogprobs, prompt_logprobs_json
from draftree.serve.schema.completions import CompletionBody
from draftree.serve.sse import event
from draftree.text.detokenize import Detokenizer

KIND = "text_completion"


def completion_object(job: Job, body: CompletionBody, head: Head, completions: list[Completion]) -> dict[str, Any]:
    """Return the response object of finished texts."""
    found = head.fields(KIND)
    found["choices"] = [_choice(index, body, job, done) for index, done in enumerate(completions)]
    return found | closing_fields(job)


def _choice(index: int, body: CompletionBody, job: Job, done: Completion) -> dict[str, Any]:
    drops = job.options.drops_text
    text, ids = ("", ()) if drops else (done.text, done.token_ids)
    choice: dict[str, Any] = {
        "index": index,
        "text": prompt_text(job, body, index) + text if body.echo else text,
        "logprobs": None,
        "finish_reason": "length" if drops else done.finish_reason,
        "stop_reason": None if drops else done.stop_reason,
    }
    prompt_ids = job.submissions[index // job.params.n].prompt_ids
    if body.logprobs is not None:
        choice["logprobs"] = _logprobs(job, body, done, prompt_ids, ids)
    if body.prompt_logprobs is not None:
        choice["prompt_logprobs"] = prompt_logprobs_json(done.prompt_logprobs or (), job.served.texts)
    if body.return_token_ids:
        choice |= {"prompt_token_ids": list(prompt_ids), "token_ids": list(ids)}
    return choice


def _logprobs(
    job: Job, body: CompletionBody, done: Completion, prompt_ids: tuple[int, ...], ids: tuple[int, ...]
) -> dict[str, Any]:
    entries = (done.logprobs or ())[: len(ids)]
    if not body.echo:
        return _offsets(job, prompt_ids).push(entries, ids)
    whole = _offsets(job, ())
    return whole.push((*(done.prompt_logprobs or ()), *entries), (*prompt_ids, *ids))


def _offsets(job: Job, before: tuple[int, ...]) -> OffsetLogprobs:
    texts, params = job.served.texts, job.params
    if texts.tokenizer is None:
        return OffsetLogprobs(texts, None)
    detokenizer = Detokenizer(texts.tokenizer, skip_special_tokens=params.skip_special_tokens, prompt_ids=before)
    return OffsetLogprobs(texts, detokenizer)


def prompt_text(job: Job, body: CompletionBody, index: int) -> str:
    """Return the text of a choice's prompt: as given, or decoded if it was token ids or truncated."""
    place = index // job.params.n
    prompt = body.prompts()[place]
    if isinstance(prompt, str) and job.params.truncate_prompt_tokens is None:
        return prompt
    tokenizer = job.served.texts.tokenizer
    if tokenizer is None:
        return ""
    return tokenizer.decode(job.submissions[place].prompt_ids, skip_special_tokens=job.params.skip_special_tokens)


async def completion_events(job: Job, body: CompletionBody, head: Head) -> AsyncGenerator[bytes, None]:
    """Yield the encoded chunks of a stream, one for each update of a text."""
    stream = _Stream(job, body, head)
    async for found in job.updates():
        data = stream.chunk(found)
        if data:
            yield data
    last = last_chunk(job, body, stream.fields)
    if last is not None:
        yield event(last)


class _Stream:
    """Chunks of all choices."""

    def __init__(self, job: Job, body: CompletionBody, head: Head) -> None:
        self.fields = head.fields(KIND)
        self._job, self._body = job, body
        self._offsets: dict[int, OffsetLogprobs] = {}
        self._begun: set[int] = set()

    def chunk(self, found: ChoiceUpdate) -> bytes:
        """Return the chunk of an update; empty if it has nothing to show."""
        job, body = self._job, self._body
        index, update = found.index, found.update
        report = Report(job, body).part(found)
        is_first = index not in self._begun
        self._begun.add(index)
        drops = job.options.drops_text
        text = "" if drops else "".join(piece.text for piece in update.pieces)
        echo = prompt_text(job, body, index) if is_first and body.echo else ""
        if not (echo or text or update.is_last or report or body.logprobs is not None or body.return_token_ids):
            return b""
        choice: dict[str, Any] = {
            "index": index,
            "text": echo + text,
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
                choice["prompt_token_ids"] = list(job.submissions[index // job.params.n].prompt_ids)
        return event(
            {**self.fields, "choices": [choice], **usage_so_far(job, body), **({"draftree": report} if report else {})}
        )

    def _logprobs(self, index: int, update: Update, *, is_first: bool) -> dict[str, Any]:
        """Return the `logprobs` object of an update; the first one begins with an echoed prompt."""
        job, echo = self._job, bool(self._body.echo)
        prompt = job.submissions[index // job.params.n].prompt_ids
        if is_first:
            self._offsets[index] = _offsets(job, () if echo else prompt)
        ids, entries = ((), ()) if job.options.drops_text else (update.token_ids, update.logprobs)
        if is_first and echo:
            # complete before the first token is written
            return self._offsets[index].push((*update.sequence.prompt_logprobs, *entries), (*prompt, *ids))
        return self._offsets[index].push(entries, ids)
