"""POST /v1/chat/completions."""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, final

from fastapi import APIRouter, Request, Response
from pydantic_core import from_json

from draftree.core.errors import InvalidRequestError
from draftree.engine.sequence import TokenLogprob
from draftree.outputs import Completion
from draftree.serve.api.beams import chat_request, searched
from draftree.serve.errors import NO_NAMES, JsonResponse, invalid, named_error
from draftree.serve.images import with_sources
from draftree.serve.job import ChoiceUpdate, Job
from draftree.serve.logprobs import chat_logprobs, prompt_logprobs_json
from draftree.serve.pool import ServedModel
from draftree.serve.reasoning import AnswerParser, AnswerStart, reasoning_variables
from draftree.serve.render import Head, Report, closing_fields, last_chunk, usage_so_far
from draftree.serve.request import ERRORS, GENERATED, Encode, chat_model_of, chat_options, running_job, server_of
from draftree.serve.schema import ChatBody, Message, note
from draftree.serve.streams import ChunkEncoder, EventStream, respond
from draftree.serve.tools.families import family_of
from draftree.serve.tools.parser import Delta, Kind, joined
from draftree.serve.tools.plan import ToolPlan
from draftree.text.chat.templates import reads_key
from draftree.text.tokenizer import Tokenizer

LIKENESS = 0.75  # similarity from which an unknown field counts as a misspelt one


def template_messages(
    messages: Sequence[Message], template: str, *, image_folder: str | None = None
) -> list[dict[str, Any]]:
    """Return messages for a chat template; fields that it does not read are noted and left out.

    `image_folder` is that of the server's settings.
    """
    made = []
    for number, message in enumerate(messages):
        place = f"messages[{number}]"
        made.append(_message(message, template, place=place))
        if message.content is not None:
            made[-1]["content"] = with_sources(message.content, image_folder, place=f"{place}.content")
    return made


def _messages(body: ChatBody, model: ServedModel, request: Request) -> list[dict[str, Any]]:
    folder = server_of(request).settings.image_folder
    return template_messages(body.messages, model.chat_template, image_folder=folder)


def _adds_prompt(body: ChatBody) -> bool:
    """Return whether the header of the assistant's answer follows the messages."""
    if not body.continue_final_message:
        return body.add_generation_prompt is not False
    if body.add_generation_prompt:
        message = "'continue_final_message' excludes 'add_generation_prompt': set one of them"
        raise invalid(message, "add_generation_prompt")
    return False


def template_variables(variables: Mapping[str, Any] | None, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return variables for a chat template, without switches that are off and that it does not have."""
    known = frozenset() if tokenizer is None else tokenizer.template_variables
    kept = {}
    for name, value in (variables or {}).items():
        is_off = value is None or value is False
        if is_off and name not in known and not difflib.get_close_matches(name, known, n=1, cutoff=LIKENESS):
            note(f"chat_template_kwargs.{name[:64]}", "is ignored: the chat template does not read it")
        else:
            kept[name] = value
    return kept


def _message(message: Message, template: str, *, place: str) -> dict[str, Any]:
    reasoning = message.reasoning_content or message.reasoning
    if message.content is None and not message.tool_calls and not reasoning and message.role != "assistant":
        raise invalid(f"'{place}' needs 'content', or calls of the assistant", f"{place}.content")
    if reasoning and (message.role != "assistant" or message.reasoning not in (None, reasoning)):
        reason = "belongs to the role 'assistant', and has the value of 'reasoning_content' if both are sent"
        raise invalid(f"'{place}.reasoning' {reason}: leave it out", f"{place}.reasoning")
    made = message.model_dump(exclude_none=True, include={"content", "tool_calls"})
    family = family_of(template)
    if message.tool_calls and family is not None and family.is_xml:
        made["tool_calls"] = [_with_object(call) for call in message.tool_calls]
    if message.role == "assistant" and len(made) == 0:
        made["content"] = ""
    if reasoning:
        made["reasoning_content"] = reasoning
    # few templates know the role of OpenAI's newer models
    is_system = message.role == "developer" and not reads_key(template, "developer")
    return {"role": "system" if is_system else message.role, **made, **_other_fields(message, template, place)}


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call whose arguments, which may have been cut, are an object: XML templates write its items."""
    function = call.get("function")
    text = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(text, str) or not isinstance(function, dict):
        return call
    try:
        arguments = from_json(text or "{}", allow_partial="trailing-strings")
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        note("messages.tool_calls", "has arguments that are no object, which the chat template cannot write")
        arguments = {}
    return {**call, "function": {**function, "arguments": arguments}}


def _other_fields(message: Message, template: str, place: str) -> dict[str, Any]:
    """Return the fields that only some templates read."""
    others = {"name": message.name, "tool_call_id": message.tool_call_id, **(message.model_extra or {})}
    kept = {}
    for field, value in others.items():
        if value is None:
            continue
        if reads_key(template, field) or (message.role == "tool" and field in Message.model_fields):
            kept[field] = value
            continue
        close = difflib.get_close_matches(field, Message.model_fields, n=1, cutoff=LIKENESS)
        if close and close[0] != field:
            path = f"{place}.{field}"
            raise invalid(f"'{path}' is unknown: did you mean '{close[0]}'?", path, code="unknown_parameter")
        note(f"messages.{field[:64]}", "is ignored: the chat template of the model does not read it")
    return kept


@dataclass(frozen=True, slots=True)
class AnswerUpdate(ChoiceUpdate):
    """An update of one answer; `finish_reason` is set in the last one."""

    job: Job
    deltas: Sequence[Delta]
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class Chat:
    job: Job
    head: Head
    plan: ToolPlan
    shows_reasoning: bool

    async def updates(self) -> AsyncIterator[AnswerUpdate]:
        parsers: dict[int, AnswerParser] = {}
        async for choice in self.job.updates():
            index = choice.index
            update = choice.update
            if index not in parsers:
                parsers[index] = self.plan.parser(self.job.reasoning)
            deltas = parsers[index].push(choice.text)
            reason = None
            if update.is_last:
                deltas += parsers[index].finish()
                reason = _reason(str(update.sequence.finish_reason), parsers[index])
            yield AnswerUpdate(index, update, self.job, self.shown(deltas), reason)

    def parsed(self, done: Completion) -> tuple[list[Delta], str]:
        """Return the parts and the finish reason of a whole answer."""
        parser = self.plan.parser(self.job.reasoning)
        deltas = self.shown([*parser.push(done.text), *parser.finish()])
        return deltas, _reason(done.finish_reason, parser)

    def shown(self, deltas: list[Delta]) -> list[Delta]:
        return deltas if self.shows_reasoning else [delta for delta in deltas if delta.kind != "reasoning"]


def _reason(reason: str, parser: AnswerParser) -> str:
    return "tool_calls" if parser.num_calls and reason == "stop" else reason


class BlockWriter(ABC):
    """Writer of an answer as blocks of text, reasoning and calls: each ends before the next one begins."""

    def __init__(self) -> None:
        self._kind: Kind | None = None

    def read(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the events of a delta."""
        is_new = delta.name is not None or delta.kind != self._kind
        return [*(self.begin(delta) if is_new else ()), *self._grow(delta)]

    def begin(self, delta: Delta) -> list[dict[str, Any]]:
        """End the open block, and begin that of a delta."""
        events = self.end()
        self._kind = delta.kind
        return [*events, *self._begin(delta)]

    def end(self, status: str = "completed") -> list[dict[str, Any]]:
        kind, self._kind = self._kind, None
        return [] if kind is None else self._end(kind, status)

    @abstractmethod
    def _begin(self, delta: Delta) -> list[dict[str, Any]]:
        """Add a block, still empty."""

    @abstractmethod
    def _grow(self, delta: Delta) -> list[dict[str, Any]]:
        """Append to the last block."""

    @abstractmethod
    def _end(self, kind: Kind, status: str) -> list[dict[str, Any]]:
        """Complete the last block."""


@final
class ChatWriter:
    def __init__(self, chat: Chat, body: ChatBody) -> None:
        self._chat = chat
        self._job = chat.job
        self._body = body
        self._report = Report(chat.job, body)
        self._num_sent = 0
        self._starts: dict[int, AnswerStart] = {}
        self._held: dict[int, Sequence[TokenLogprob]] = {}  # log-probabilities of tokens whose text is not certain yet

    async def whole(self) -> dict[str, Any]:
        body, texts = self._body, self._job.served.texts
        completions = await self._job.finish(self._report.add)
        answer = self._fields("chat.completion")
        answer["choices"] = [self._choice(index, done) for index, done in enumerate(completions)]
        answer |= closing_fields(self._job)
        if body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs_json(completions[0].prompt_logprobs or (), texts)
        if body.return_token_ids:
            answer["prompt_token_ids"] = list(self._job.submissions[0].prompt_ids)
        return answer | self._report.fields(completions)

    async def events(self) -> AsyncGenerator[bytes, None]:
        encoder = ChunkEncoder(self._fields("chat.completion.chunk"))
        async for part in self._chat.updates():
            chunks: list[dict[str, Any]] = []
            if part.index not in self._starts:
                self._starts[part.index] = AnswerStart(self._job.reasoning, self._job.served.texts)
                delta = {"role": "assistant", "content": ""}
                choice = {"index": part.index, "delta": delta, "logprobs": None, "finish_reason": None}
                chunks.append({"choices": [choice], **usage_so_far(self._job, self._body, self._num_sent)})
                if self._body.return_token_ids:
                    chunks[0]["prompt_token_ids"] = list(self._job.submissions[0].prompt_ids)
            self._num_sent += len(part.update.token_ids)
            chunks += self._chunks(part)
            if chunks:
                yield b"".join(map(encoder.event, chunks))
        last = last_chunk(self._job, self._body)
        if last is not None:
            yield encoder.event(last)

    def _fields(self, kind: str) -> dict[str, Any]:
        fields = self._chat.head.fields(kind)
        return fields if self._body.service_tier is None else {**fields, "service_tier": "default"}

    def _choice(self, index: int, done: Completion) -> dict[str, Any]:
        deltas, reason = self._chat.parsed(done)
        choice = {
            "index": index,
            "message": _answer_message(deltas),
            "logprobs": self._logprobs(done.logprobs or ()) if self._body.logprobs else None,
            "finish_reason": reason,
            "stop_reason": done.stop_reason,
        }
        return {**choice, "token_ids": list(done.token_ids)} if self._body.return_token_ids else choice

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {"content": chat_logprobs(entries, self._job.served.texts), "refusal": None}

    def _chunks(self, part: AnswerUpdate) -> list[dict[str, Any]]:
        """Return the chunks of an update, of one delta each: many clients read only the first call of a chunk."""
        body = self._body
        update = part.update
        deltas = part.deltas
        report = self._report.part(part)
        groups: list[list[Delta]] = [[delta] for delta in deltas]
        logprobs: dict[int, Sequence[TokenLogprob]] = {}
        if body.logprobs:
            # clients take the tokens of a chunk for its content: those of reasoning come before, others with their text
            num_before = self._starts[part.index].push(entry.token_id for entry in update.logprobs)
            answer = [*self._held.pop(part.index, ()), *update.logprobs[num_before:]]
            place = sum(delta.kind == "reasoning" for delta in deltas)
            if num_before and not place:
                groups.insert(0, [])
                place = 1
            if place == len(groups) and update.is_last:
                groups.append([])
            if place == len(groups):
                self._held[part.index] = answer
            else:
                logprobs[place] = answer
            if num_before:
                logprobs[0] = update.logprobs[:num_before]
        if not (groups or update.is_last or report or body.return_token_ids):
            return []
        choices: list[dict[str, Any]] = [
            {"index": part.index, "delta": _delta(group), "logprobs": None, "finish_reason": None}
            for group in groups or [[]]
        ]
        for place, entries in logprobs.items():
            if entries:
                choices[place]["logprobs"] = self._logprobs(entries)
        if body.return_token_ids:
            choices[0]["token_ids"] = list(update.token_ids)
        if update.is_last:
            choices[-1] |= {"finish_reason": part.finish_reason, "stop_reason": update.sequence.stop_reason}
        usage = usage_so_far(self._job, body, self._num_sent)
        chunks = [{"choices": [choice], **usage} for choice in choices]
        if report:
            chunks[0]["draftree"] = report
        return chunks


def _answer_message(deltas: Sequence[Delta]) -> dict[str, Any]:
    text, reasoning = joined(deltas, "text"), _reasoning(deltas)
    calls: list[dict[str, Any]] = []
    for delta in (delta for delta in deltas if delta.kind == "call"):
        if delta.name is not None:
            calls.append({"id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": ""}})
        calls[delta.index]["function"]["arguments"] += delta.text
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None, **reasoning}
    if calls or (reasoning and not text):
        message["content"] = text or None
    return {**message, "tool_calls": calls} if calls else message


def _delta(deltas: Sequence[Delta]) -> dict[str, Any]:
    text = joined(deltas, "text")
    calls = [_call(delta) for delta in deltas if delta.kind == "call"]
    return {**_reasoning(deltas), **({"content": text} if text else {}), **({"tool_calls": calls} if calls else {})}


def _reasoning(deltas: Sequence[Delta]) -> dict[str, str]:
    """Return the reasoning under both names that clients read; empty if there is none."""
    text = joined(deltas, "reasoning")
    return {"reasoning": text, "reasoning_content": text} if text else {}


def _call(delta: Delta) -> dict[str, Any]:
    if delta.name is None:
        return {"index": delta.index, "function": {"arguments": delta.text}}
    function = {"name": delta.name, "arguments": delta.text}
    return {"index": delta.index, "id": delta.id, "type": "function", "function": function}


router = APIRouter(prefix="/v1", tags=["chat"], responses=ERRORS)


@router.post("/chat/completions", summary="Answer a conversation", responses=GENERATED)
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Answer a conversation, at once or as a stream of server-sent events."""
    if body.use_beam_search:
        return await respond(request, _beams(body, request))
    if body.stream:
        return EventStream(_events(body, request))
    return await respond(request, _object(body, request))


async def _object(body: ChatBody, request: Request) -> Response:
    async with running_chat(body, request) as chat:
        return JsonResponse(await ChatWriter(chat, body).whole())


async def _events(body: ChatBody, request: Request) -> AsyncGenerator[bytes, None]:
    async with running_chat(body, request) as chat:
        yield b""
        async for data in ChatWriter(chat, body).events():
            yield data


async def _beams(body: ChatBody, request: Request) -> Response:
    model = chat_model_of(request, body.model)
    head = Head.of("chatcmpl", body, model)
    results = await searched(
        request,
        model,
        prompts=[_messages(body, model, request)],
        search=chat_request(body, server_of(request).settings),
        priority=body.priority or 0,
        response_id=head.id,
        decoder=body.decoder,
        encode=_encoder(body, model),
    )
    return JsonResponse(results.chat(body, head))


def _encoder(
    body: ChatBody,
    model: ServedModel,
    tools: Sequence[Mapping[str, Any]] | None = None,
    names: Mapping[str, str] = NO_NAMES,
) -> Encode:
    variables = reasoning_variables(model, effort=body.reasoning_effort, is_enabled=body.enable_thinking, names=names)
    return partial(
        model.llm.prompts.encode_chat,
        tools=tools,
        template_kwargs={**variables, **template_variables(body.chat_template_kwargs, model.tokenizer)},
        add_generation_prompt=_adds_prompt(body),
        continue_final_message=bool(body.continue_final_message),
    )


@asynccontextmanager
async def running_chat(
    body: ChatBody,
    request: Request,
    *,
    prefix: str = "chatcmpl",
    names: Mapping[str, str] = NO_NAMES,
    clips_tokens: bool = False,
) -> AsyncIterator[Chat]:
    """Start the answers of a conversation, and abort what is unfinished at the end.

    `names` are those that the client's request has for fields of `body`; `clips_tokens` reduces a `max_tokens` that
    does not fit.
    """
    model = chat_model_of(request, body.model)
    head = Head.of(prefix, body, model)
    options, renamed = await chat_options(body, model, head.id, names)
    plan = await _plan(body, model, answer=options.json_schema)
    async with running_job(
        request,
        model,
        prompts=[plan.messages(_messages(body, model, request), model.chat_template)],
        options=plan.sampling(options),
        names=renamed if plan.grammar is None else {**renamed, "grammar": "tools"},
        encode=_encoder(body, model, plan.tools, names),
        is_chat=True,
        clips_tokens=clips_tokens,
    ) as job:
        yield Chat(job, head, plan, body.include_reasoning is not False)


async def encoded_chat(body: ChatBody, request: Request, *, names: Mapping[str, str] = NO_NAMES) -> Sequence[int]:
    model = chat_model_of(request, body.model)
    plan = await _plan(body, model)
    messages = plan.messages(_messages(body, model, request), model.chat_template)
    try:
        return await _encoder(body, model, plan.tools, names)(messages)
    except InvalidRequestError as error:
        raise named_error(error, {"template_kwargs": "chat_template_kwargs", **names}) from error


async def _plan(body: ChatBody, model: ServedModel, *, answer: object = None) -> ToolPlan:
    return await ToolPlan.load(
        model.tokenizer,
        body.tools,
        tool_choice=body.tool_choice,
        is_parallel=body.parallel_tool_calls is not False,
        answer=answer,
    )
