"""Chat completions: the whole object, and chunks of a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from draftree.completion import Completion
from draftree.serve.job import ChoiceUpdate, Job
from draftree.serve.render.head import Head, Report, closing_fields, last_chunk, usage_so_far
from draftree.serve.render.tokens import chat_logprobs, prompt_logprobs_json
from draftree.serve.schema.chat import ChatBody
from draftree.serve.sse import event


def chat_object(job: Job, body: ChatBody, head: Head, completions: list[Completion]) -> dict[str, Any]:
    """Return the response object of finished texts."""
    found = head.fields("chat.completion")
    found["choices"] = [_choice(index, body, job, done) for index, done in enumerate(completions)]
    found |= closing_fields(job)
    if body.service_tier is not None:
        found["service_tier"] = "default"
    if body.prompt_logprobs is not None:
        found["prompt_logprobs"] = prompt_logprobs_json(completions[0].prompt_logprobs or (), job.served.texts)
    if body.return_token_ids:
        found["prompt_token_ids"] = list(job.submissions[0].prompt_ids)
    return found


def _choice(index: int, body: ChatBody, job: Job, done: Completion) -> dict[str, Any]:
    logprobs = None
    if body.logprobs:
        logprobs = {"content": chat_logprobs(done.logprobs or (), job.served.texts), "refusal": None}
    choice = {
        "index": index,
        "message": {"role": "assistant", "content": done.text, "refusal": None},
        "logprobs": logprobs,
        "finish_reason": done.finish_reason,
        "stop_reason": done.stop_reason,
    }
    if body.return_token_ids:
        choice["token_ids"] = list(done.token_ids)
    return choice


async def chat_events(job: Job, body: ChatBody, head: Head) -> AsyncGenerator[bytes, None]:
    """Yield the encoded chunks of a stream, one for each update of a text."""
    fields = head.fields("chat.completion.chunk")
    if body.service_tier is not None:
        fields["service_tier"] = "default"
    begun: set[int] = set()
    async for found in job.updates():
        data = b""
        if found.index not in begun:
            begun.add(found.index)
            data = event(_first_chunk(job, body, fields, found.index))
        chunk = _chunk(job, body, fields, found)
        if chunk is not None:
            data += event(chunk)
        if data:
            yield data
    last = last_chunk(job, body, fields)
    if last is not None:
        yield event(last)


def _first_chunk(job: Job, body: ChatBody, fields: dict[str, Any], index: int) -> dict[str, Any]:
    choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    chunk = {**fields, "choices": [choice], **usage_so_far(job, body)}
    if body.return_token_ids:
        chunk["prompt_token_ids"] = list(job.submissions[0].prompt_ids)
    return chunk


def _chunk(job: Job, body: ChatBody, fields: dict[str, Any], found: ChoiceUpdate) -> dict[str, Any] | None:
    index, update = found.index, found.update
    report = Report(job, body).part(found)
    text = "".join(piece.text for piece in update.pieces)
    if not (text or update.is_last or report or body.logprobs or body.return_token_ids):
        return None
    choice: dict[str, Any] = {
        "index": index,
        "delta": {"content": text} if text else {},
        "logprobs": None,
        "finish_reason": None,
    }
    if body.logprobs and update.logprobs:
        choice["logprobs"] = {"content": chat_logprobs(update.logprobs, job.served.texts), "refusal": None}
    if body.return_token_ids:
        choice["token_ids"] = list(update.token_ids)
    if update.is_last:
        choice["finish_reason"] = str(update.sequence.finish_reason)
        choice["stop_reason"] = update.sequence.stop_reason
    return {**fields, "choices": [choice], **usage_so_far(job, body), **({"draftree": report} if report else {})}
