"""Chat completions: the whole object, and chunks of a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any, final

from draftree.completion import Completion
from draftree.engine.sequence import TokenLogprob
from draftree.serve.job import ChoiceUpdate, Job
from draftree.serve.reasoning import AnswerParser, AnswerStart
from draftree.serve.render.head import Head, Report, closing_fields, last_chunk, usage_so_far
from draftree.serve.render.tokens import chat_logprobs, prompt_logprobs_json
from draftree.serve.schema.chat import ChatBody
from draftree.serve.sse import ChunkEncoder
from draftree.serve.tools.deltas import CallDelta, Delta, ReasoningDelta, TextDelta
from draftree.serve.tools.plan import ToolPlan


@final
class ChatWriter:
    """The JSON of one answer.

    Args:
        job: the texts.
        body: of the request.
        head: identity of the response.
        plan: the tools.
    """

    def __init__(self, job: Job, body: ChatBody, head: Head, plan: ToolPlan) -> None:
        self._job, self._body, self._head, self._plan = job, body, head, plan
        self._report = Report(job, body)
        self._num_sent = 0
        self._parsers: dict[int, AnswerParser] = {}
        self._starts: dict[int, AnswerStart] = {}
        self._held: dict[int, Sequence[TokenLogprob]] = {}
        """Log-probabilities of tokens whose text is not certain yet."""

    def whole(self, completions: list[Completion]) -> dict[str, Any]:
        """Return the response object of finished texts."""
        body, texts = self._body, self._job.served.texts
        found = self._fields("chat.completion")
        found["choices"] = [self._choice(index, done) for index, done in enumerate(completions)]
        found |= closing_fields(self._job)
        if body.prompt_logprobs is not None:
            found["prompt_logprobs"] = prompt_logprobs_json(completions[0].prompt_logprobs or (), texts)
        if body.return_token_ids:
            found["prompt_token_ids"] = list(self._job.submissions[0].prompt_ids)
        return found

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the encoded chunks of a stream, one for each update of a text."""
        encoder = ChunkEncoder(self._fields("chat.completion.chunk"))
        async for found in self._job.updates():
            data = b""
            if found.index not in self._parsers:
                reasoning = self._job.options.reasoning
                self._parsers[found.index] = self._plan.parser(reasoning)
                self._starts[found.index] = AnswerStart(reasoning, self._job.served.texts)
                data = encoder.event(self._first_chunk(found.index))
            self._num_sent += len(found.update.token_ids)
            data += b"".join(encoder.event(chunk) for chunk in self._chunks(found))
            if data:
                yield data
        last = last_chunk(self._job, self._body)
        if last is not None:
            yield encoder.event(last)

    def _fields(self, kind: str) -> dict[str, Any]:
        fields = self._head.fields(kind)
        return fields if self._body.service_tier is None else {**fields, "service_tier": "default"}

    def _choice(self, index: int, done: Completion) -> dict[str, Any]:
        logprobs = None
        if self._body.logprobs:
            logprobs = {"content": chat_logprobs(done.logprobs or (), self._job.served.texts), "refusal": None}
        parser = self._plan.parser(self._job.options.reasoning)
        deltas = self._shown([*parser.push(done.text), *parser.finish()])
        choice = {
            "index": index,
            "message": _message(deltas),
            "logprobs": logprobs,
            "finish_reason": _reason(done.finish_reason, parser),
            "stop_reason": done.stop_reason,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = list(done.token_ids)
        return choice

    def _shown(self, deltas: list[Delta]) -> list[Delta]:
        if self._body.include_reasoning is not False:
            return deltas
        return [delta for delta in deltas if not isinstance(delta, ReasoningDelta)]

    def _first_chunk(self, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = {"choices": [choice], **usage_so_far(self._job, self._body, self._num_sent)}
        if self._body.return_token_ids:
            chunk["prompt_token_ids"] = list(self._job.submissions[0].prompt_ids)
        return chunk

    def _chunks(self, found: ChoiceUpdate) -> list[dict[str, Any]]:
        """Return the chunks of an update, of one delta each: many clients read only the first call of a chunk."""
        body, update = self._body, found.update
        report = self._report.part(found)
        parser = self._parsers[found.index]
        deltas = parser.push("".join(piece.text for piece in update.pieces))
        if update.is_last:
            deltas += parser.finish()
        deltas = self._shown(deltas)
        groups: list[list[Delta]] = [[delta] for delta in deltas]
        logprobs: dict[int, Sequence[TokenLogprob]] = {}
        if body.logprobs:
            # clients take the tokens of a chunk for its content: those of reasoning come before, others with their text
            num_before = self._starts[found.index].push(entry.token_id for entry in update.logprobs)
            answer = [*self._held.pop(found.index, ()), *update.logprobs[num_before:]]
            place = sum(isinstance(delta, ReasoningDelta) for delta in deltas)
            if num_before and not place:
                groups.insert(0, [])
                place = 1
            if place == len(groups) and update.is_last:
                groups.append([])
            if place == len(groups):
                self._held[found.index] = answer
            else:
                logprobs[place] = answer
            if num_before:
                logprobs[0] = update.logprobs[:num_before]
        if not (groups or update.is_last or report or body.return_token_ids):
            return []
        choices: list[dict[str, Any]] = [
            {"index": found.index, "delta": _delta(group), "logprobs": None, "finish_reason": None}
            for group in groups or [[]]
        ]
        for place, entries in logprobs.items():
            if entries:
                content = chat_logprobs(entries, self._job.served.texts)
                choices[place]["logprobs"] = {"content": content, "refusal": None}
        first, last = choices[0], choices[-1]
        if body.return_token_ids:
            first["token_ids"] = list(update.token_ids)
        if update.is_last:
            last["finish_reason"] = _reason(str(update.sequence.finish_reason), parser)
            last["stop_reason"] = update.sequence.stop_reason
        usage = usage_so_far(self._job, body, self._num_sent)
        chunks = [{"choices": [choice], **usage} for choice in choices]
        if report:
            chunks[0]["draftree"] = report
        return chunks


def _reason(reason: str, parser: AnswerParser) -> str:
    return "tool_calls" if parser.num_calls and reason == "stop" else reason


def _message(deltas: Iterable[Delta]) -> dict[str, Any]:
    """Return the message of a whole answer."""
    text = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if isinstance(delta, CallDelta):
            if delta.name is not None:
                function = {"name": delta.name, "arguments": ""}
                calls.append({"id": delta.id, "type": "function", "function": function})
            calls[delta.index]["function"]["arguments"] += delta.arguments
    reasoning = _reasoning(deltas)
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None, **reasoning}
    if calls or (reasoning and not text):
        message["content"] = text or None
    return {**message, "tool_calls": calls} if calls else message


def _delta(deltas: Iterable[Delta]) -> dict[str, Any]:
    """Return the delta of a chunk."""
    text = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
    calls = [_call(delta) for delta in deltas if isinstance(delta, CallDelta)]
    return {**_reasoning(deltas), **({"content": text} if text else {}), **({"tool_calls": calls} if calls else {})}


def _reasoning(deltas: Iterable[Delta]) -> dict[str, str]:
    """Return the reasoning under both names that clients read; empty if there is none."""
    text = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
    return {"reasoning": text, "reasoning_content": text} if text else {}


def _call(delta: CallDelta) -> dict[str, Any]:
    if delta.name is None:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    function = {"name": delta.name, "arguments": delta.arguments}
    return {"index": delta.index, "id": delta.id, "type": "function", "function": function}
