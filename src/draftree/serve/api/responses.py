"""POST /v1/responses."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, final

from fastapi import APIRouter, Request, Response
from pydantic import AfterValidator, Field

from draftree.core.errors import suggestion
from draftree.serve.api.chat import AnswerUpdate, BlockWriter, Chat, encoded_chat, running_chat
from draftree.serve.errors import ApiError, JsonResponse, api_error, invalid
from draftree.serve.logprobs import chat_logprobs
from draftree.serve.reasoning import AnswerStart
from draftree.serve.render import Report, metrics_json, usage_json
from draftree.serve.request import ERRORS, GENERATED, server_of
from draftree.serve.schema import (
    RESPONSES,
    SHARED,
    Body,
    ChatBody,
    Effect,
    ImagePart,
    Items,
    SamplingBody,
    ServiceTier,
    ignored,
    note,
    refused,
    validated,
)
from draftree.serve.streams import EventStream, event, respond
from draftree.serve.tools.parser import Delta, Kind

LOGPROBS = "message.output_text.logprobs"
ECHOED = ("metadata", "prompt_cache_key", "safety_identifier", "user")
"""Fields without effect that the response object repeats."""

ABSENT_ITEMS = (
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
)
"""Values of `include` about what no response has."""


def _included(name: str) -> str:
    if name not in (LOGPROBS, *ABSENT_ITEMS):
        raise ValueError(f"{name[:80]!r} is unknown: {suggestion(name, [LOGPROBS, *ABSENT_ITEMS])}")
    if name != LOGPROBS:
        note("include", f"is ignored for '{name}': responses do not have it")
    return name


class TextFormat(Body):
    """Format of the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, min_length=1, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """Options of the text."""

    elsewhere: ClassVar[Mapping[str, Effect]] = {"verbosity": refused("the models have no such setting", "medium")}
    format: TextFormat | None = None


class ReasoningOptions(Body):
    """Options of the reasoning before the text."""

    elsewhere: ClassVar[Mapping[str, Effect]] = {
        "summary": ignored("reasoning is returned whole"),
        "generate_summary": ignored("reasoning is returned whole"),
    }
    effort: str | None = Field(None, max_length=32)


class ResponsesBody(SamplingBody):
    """A conversation to continue, in items."""

    elsewhere: ClassVar[Mapping[str, Effect]] = {
        **{name: effect for name, effect in SHARED.items() if name not in (*ECHOED, "store")},
        **RESPONSES,
    }
    input: str | Items[dict[str, Any]]
    previous_response_id: str | None = Field(None, description="of a recent response, whose conversation is continued")
    store: bool | None = Field(True, description="whether the conversation is kept for a further response")
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    tools: Items[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Items[Annotated[str, AfterValidator(_included)]] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    metadata: dict[str, str] | None = None
    service_tier: ServiceTier | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    user: str | None = None

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())


ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}
"""Roles of the API, and the roles that templates know."""
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text")
IMAGE_PART = "input_image"
IGNORED = ("id", "status")  # fields that the server's own output items have, and that mean nothing in a conversation


def items_of(
    items_given: str | Sequence[Mapping[str, Any]], stored: Callable[[str], Mapping[str, Any] | None]
) -> list[Mapping[str, Any]]:
    """Return the input items of a request; references to stored items are replaced by these."""
    if isinstance(items_given, str):
        return [{"role": "user", "content": items_given}]
    if not items_given:
        raise invalid("'input' is empty: give a text, or at least one item", "input")
    items: list[Mapping[str, Any]] = []
    names = set[str]()
    for number, item in enumerate(items_given):
        if item.get("type") == "item_reference":
            place = f"input[{number}]"
            _require_keys(item, ("type",), place)
            name = _text(item, "id", place)
            stored_item = stored(name)
            if stored_item is None:
                message = f"'{place}.id': the item '{name[:100]}' is not stored, or no longer: send the item itself"
                raise invalid(message, f"{place}.id", code="item_not_found")
            if name in names:  # many references to a long item would make any conversation of a short request
                raise invalid(f"'{place}.id': the item '{name[:100]}' is named twice", f"{place}.id")
            names.add(name)
            item = stored_item
        items.append(item)
    return items


def messages_of(
    instructions: str | None, items: Sequence[Mapping[str, Any]], *, num_previous: int
) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for number, item in enumerate(items, -num_previous):
        _add(messages, item, f"input[{number}]")
    return messages


def _add(messages: list[dict[str, Any]], item: Mapping[str, Any], place: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        message = _message(item, place)
        last = messages[-1] if messages else {}
        if message["role"] == "assistant" and "reasoning_content" in last and not last["content"]:
            last["content"] = message["content"]
        else:
            messages.append(message)
    elif kind == "reasoning":
        _require_keys(item, ("type", "summary", "content", "encrypted_content"), place)
        if item.get("content"):
            # a message or call after it belongs to the same answer
            reasoning = _content(item["content"], f"{place}.content")
            messages.append({"role": "assistant", "content": "", "reasoning_content": reasoning})
        else:
            note(place, "is ignored: it has no reasoning text")
    elif kind == "function_call":
        last = messages[-1] if messages else {}
        # calls of one answer are one message, together with its text
        if last.get("role") != "assistant":
            last = {"role": "assistant", "content": None}
            messages.append(last)
        last.setdefault("tool_calls", []).append(_call(item, place))
    elif kind == "function_call_output":
        _require_keys(item, ("type", "call_id", "output"), place)
        content = _content_with_images(item.get("output"), f"{place}.output")
        messages.append({"role": "tool", "tool_call_id": _text(item, "call_id", place), "content": content})
    else:
        known = "message, reasoning, function_call, function_call_output and item_reference"
        raise invalid(f"'{place}.type' is {str(kind)[:40]!r}: {known} are supported", f"{place}.type")


def _message(item: Mapping[str, Any], place: str) -> dict[str, Any]:
    _require_keys(item, ("type", "role", "content"), place)
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(f"'{place}.role' must be one of {', '.join(ROLES)}", f"{place}.role")
    read = _content if role == "assistant" else _content_with_images
    return {"role": ROLES[role], "content": read(item.get("content"), f"{place}.content")}


def _call(item: Mapping[str, Any], place: str) -> dict[str, Any]:
    _require_keys(item, ("type", "call_id", "name", "arguments"), place)
    function = {"name": _text(item, "name", place), "arguments": _text(item, "arguments", place)}
    return {"id": _text(item, "call_id", place), "type": "function", "function": function}


def _content_with_images(content: object, place: str) -> str | list[Any]:
    """Return the text of a content; with an image among its parts, the parts of OpenAI's chat form."""
    parts = content if isinstance(content, list) else []
    if not any(isinstance(part, Mapping) and part.get("type") == IMAGE_PART for part in parts):
        return _content(content, place, (TEXT_PARTS[0], IMAGE_PART))
    return [_chat_part(part, f"{place}[{number}]") for number, part in enumerate(parts)]


def _chat_part(part: object, place: str) -> Any:
    if not isinstance(part, Mapping) or part.get("type") != IMAGE_PART:
        return {"type": "text", "text": _part(part, place, (TEXT_PARTS[0], IMAGE_PART))}
    _require_keys(part, ("type", "image_url", "detail"), place)
    if not isinstance(part.get("image_url"), str):
        raise invalid(f"'{place}' must have 'image_url', a data URL", place)
    return ImagePart.of(part["image_url"], f"{place}.image_url")


def _content(content: object, place: str, kinds: Sequence[str] = TEXT_PARTS[:2]) -> str:
    """Return the text of a content: a text, or text parts, which are joined by line ends."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"'{place}' must be text or a list of parts: {', '.join(kinds)} are supported", place)
    return "\n".join(_part(part, f"{place}[{number}]", kinds) for number, part in enumerate(content))


def _part(part: object, place: str, kinds: Sequence[str]) -> str:
    if not isinstance(part, Mapping) or part.get("type") not in TEXT_PARTS:
        raise invalid(f"'{place}' must be one of the supported parts: {', '.join(kinds)}", place)
    known = ("type", "text", "annotations", "logprobs")
    _require_keys(part, known, place)
    return _text(part, "text", place)


def _text(item: Mapping[str, Any], key: str, place: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise invalid(f"'{place}.{key}' must be text", f"{place}.{key}")
    return value


def _require_keys(item: Mapping[str, Any], known: Sequence[str], place: str) -> None:
    for key, value in item.items():
        if key not in (*known, *IGNORED) and value is not None:
            raise invalid(f"'{place}.{key}' is not supported: leave it out", f"{place}.{key}")


def chat_tools(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return the tools in the form of /v1/chat/completions, which has the fields of a function in an object."""
    if tools is None:
        return None
    functions = []
    for number, tool in enumerate(tools):
        if tool.get("type") != "function":
            message = f"'tools[{number}].type' must be \"function\": the server has no tools of its own"
            raise invalid(message, f"tools[{number}].type")
        functions.append({"type": "function", "function": {key: tool[key] for key in tool if key != "type"}})
    return functions


Event = dict[str, Any]
REPORT = "response.draftree"  # event with the pieces and rounds of an update; only if the request asks for them


@final
class ResponseWriter(BlockWriter):
    """Output items of one response, and the events that describe its changes. Mutated by `push` and `fail`."""

    def __init__(self, body: ResponsesBody, chat: Chat, *, suffix: str) -> None:
        super().__init__()
        self._body = body
        self._chat = chat
        self._job = chat.job
        self._suffix = suffix
        self._start = AnswerStart(chat.job.reasoning, chat.job.served.texts)
        self._report = Report(chat.job, body)
        self._output: list[dict[str, Any]] = []
        self._logprobs: list[Any] = []  # log-probabilities of the next text
        self._num_events = 0
        self._outcome: dict[str, Any] = {}

    def start(self) -> list[Event]:
        return [self._event(kind, response=self.response()) for kind in ("response.created", "response.in_progress")]

    def push(self, part: AnswerUpdate) -> list[Event]:
        update = part.update
        deltas = part.deltas
        report = self._report.part(part)
        events = [self._event(REPORT, draftree=report)] if report else []
        if self._report.is_wanted and not self._body.stream:
            self._report.add(part)
        if self._body.wants_logprobs:
            num_before = self._start.push(entry.token_id for entry in update.logprobs)
            self._logprobs = chat_logprobs(update.logprobs[num_before:], self._job.served.texts)
            if self._logprobs and not deltas:
                deltas = [Delta("text")]
        events += [each for delta in deltas for each in self.read(delta)]
        return [*events, *self._finish(is_cut=part.finish_reason == "length")] if update.is_last else events

    def _finish(self, *, is_cut: bool) -> list[Event]:
        status = "incomplete" if is_cut else "completed"
        events = [*(() if self._output else self.begin(Delta("text"))), *self.end(status)]
        if is_cut:
            self._outcome = {"incomplete_details": {"reason": "max_output_tokens"}}
        else:
            created = self._chat.head.created
            self._outcome = {"completed_at": max(int(time.time()), created)}  # the clock may have been set back
        self._outcome |= {"status": status, "usage": self._usage(), **metrics_json(self._job)}
        self._outcome |= self._report.fields(self._job.completions())
        return [*events, self._event(f"response.{status}", response=self.response())]

    def fail(self, error: ApiError) -> list[Event]:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        events = self.end("incomplete")
        self._outcome = {"status": "failed", "error": {"code": code, "message": error.message}}
        return [*events, self._event("response.failed", response=self.response())]

    def response(self) -> dict[str, Any]:
        body = self._body
        head = self._chat.head
        sampling = head.model.llm.llm.requests.resolved(self._job.options).sampling
        form = body.text.format if body.text is not None else None
        return {
            "id": head.id,
            "object": "response",
            "created_at": head.created,
            "status": "in_progress",
            "completed_at": None,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "model": head.model.name,
            "output": [dict(item) for item in self._output],
            "parallel_tool_calls": self._chat.plan.is_parallel,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": body.tool_choice or "auto",
            "tools": [{"description": None, "parameters": None, "strict": False} | tool for tool in body.tools or []],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
            "metadata": body.metadata or {},
            **self._outcome,
        }

    def _event(self, kind: str, **fields: Any) -> Event:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

    def _item_event(self, kind: str, **fields: Any) -> Event:
        """Return an event of the last item; one with content has a single part."""
        item = self._output[-1]
        place = {"content_index": 0} if "content" in item else {}
        return self._event(kind, item_id=item["id"], output_index=len(self._output) - 1, **place, **fields)

    def _begin(self, delta: Delta) -> list[Event]:
        item: dict[str, Any]
        part: dict[str, Any] | None = None
        if delta.kind == "call":
            prefix = "fc"
            item = {"type": "function_call", "call_id": delta.id, "name": delta.name, "arguments": ""}
        elif delta.kind == "reasoning":
            prefix = "rs"
            item = {"type": "reasoning", "summary": [], "content": []}
            part = {"type": "reasoning_text", "text": ""}
        else:
            prefix = "msg"
            item = {"type": "message", "role": "assistant", "content": []}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item = {"id": f"{prefix}_{uuid.uuid4().hex}{self._suffix}", **item, "status": "in_progress"}
        self._output.append(item)
        events = [self._event("response.output_item.added", output_index=len(self._output) - 1, item=dict(item))]
        if part is not None:
            item["content"] = [part]
            events.append(self._item_event("response.content_part.added", part=_copy(part)))
        return events

    def _grow(self, delta: Delta) -> list[Event]:
        item = self._output[-1]
        if delta.kind == "call":
            item["arguments"] += delta.text
            kind = "response.function_call_arguments.delta"
            return [self._item_event(kind, delta=delta.text)] if delta.text else []
        (part,) = item["content"]
        part["text"] += delta.text
        if delta.kind == "reasoning":
            return [self._item_event("response.reasoning_text.delta", delta=delta.text)]
        logprobs, self._logprobs = self._logprobs, []
        part["logprobs"] += logprobs
        return [self._item_event("response.output_text.delta", delta=delta.text, logprobs=logprobs)]

    def _end(self, kind: Kind, status: str) -> list[Event]:
        item = self._output[-1]
        item["status"] = status
        if kind == "call":
            fields = {key: item[key] for key in ("name", "arguments")}
            events = [self._item_event("response.function_call_arguments.done", **fields)]
        else:
            part = _copy(item["content"][0])
            fields = {key: part[key] for key in ("text", "logprobs") if key in part}
            events = [
                self._item_event(f"response.{part['type']}.done", **fields),
                self._item_event("response.content_part.done", part=part),
            ]
        index = len(self._output) - 1
        return [*events, self._event("response.output_item.done", output_index=index, item=dict(item))]

    def _usage(self) -> dict[str, Any]:
        usage = usage_json(self._job)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0, **usage.get("completion_tokens_details", {})},
            "total_tokens": usage["total_tokens"],
        }


def _copy(part: dict[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, list) else value for key, value in part.items()}


NAMES = {
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "response_format": "text.format",
    "json_schema": "text.format",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
}
router = APIRouter(prefix="/v1", tags=["responses"], responses=ERRORS)


@router.post("/responses", summary="Answer a conversation of items", responses=GENERATED)
async def responses(body: ResponsesBody, request: Request) -> Response:
    """Answer a conversation, at once or as a stream of typed events."""
    if body.stream:
        return EventStream(_events(body, request), done=b"")
    return await respond(request, _object(body, request))


@router.post("/responses/input_tokens", summary="Count the tokens of a conversation of items")
async def input_tokens(body: ResponsesBody, request: Request) -> Response:
    """Return the number of prompt tokens of a request."""
    with _flat_tools():
        chat_body = _chat_body(body, *_conversation(body, request))
        ids = await encoded_chat(chat_body, request, names=NAMES)
    return JsonResponse({"object": "response.input_tokens", "input_tokens": len(ids)})


async def _object(body: ResponsesBody, request: Request) -> Response:
    async with _writing(body, request) as (writer, items, chat):
        async for part in chat.updates():
            writer.push(part)
        _keep(body, request, items, writer)
        return JsonResponse(writer.response())


async def _events(body: ResponsesBody, request: Request) -> AsyncGenerator[bytes, None]:
    async with _writing(body, request) as (writer, items, chat):
        yield _encoded(writer.start())
        try:
            async for part in chat.updates():
                events = writer.push(part)
                if part.update.is_last:
                    _keep(body, request, items, writer)
                if events:
                    yield _encoded(events)
        except Exception as error:
            yield _encoded(writer.fail(api_error(error)))


def _encoded(events: list[Event]) -> bytes:
    return b"".join(event(each, each["type"]) for each in events)


@asynccontextmanager
async def _writing(
    body: ResponsesBody, request: Request
) -> AsyncIterator[tuple[ResponseWriter, Sequence[Mapping[str, Any]], Chat]]:
    """Start the answer of a request; yields its writer, the items of the conversation, and the answer."""
    suffix = server_of(request).responses.suffix
    with _flat_tools():
        items, num_previous = _conversation(body, request)
        chat_body = _chat_body(body, items, num_previous)
        chat_body.request_id = f"{body.request_id or uuid.uuid4().hex}{suffix}"
        async with running_chat(chat_body, request, prefix="resp", names=NAMES) as chat:
            yield ResponseWriter(body, chat, suffix=suffix), items, chat


def _conversation(body: ResponsesBody, request: Request) -> tuple[list[Mapping[str, Any]], int]:
    """Return the items of a request after those of the conversation that it continues, and the number of these."""
    server = server_of(request)
    key = server.key_of(request).name
    name = body.previous_response_id
    previous = () if name is None else server.responses.get(key, name)
    if previous is None:
        reason = "is not stored, or no longer: send the whole conversation as 'input'"
        message = f"the response '{str(name)[:100]}' {reason}"
        raise invalid(message, "previous_response_id", code="previous_response_not_found")
    return [*previous, *items_of(body.input, partial(server.responses.item, key))], len(previous)


def _keep(body: ResponsesBody, request: Request, items: Sequence[Mapping[str, Any]], writer: ResponseWriter) -> None:
    if body.store is not False:
        server = server_of(request)
        response = writer.response()
        server.responses.put(server.key_of(request).name, response["id"], [*items, *response["output"]])


@contextmanager
def _flat_tools() -> Iterator[None]:
    """Name the fields of tools as this API does: the fields of a function are those of the tool."""
    try:
        yield
    except ApiError as error:
        error.message = error.message.replace("].function", "]")
        error.param = error.param and error.param.replace("].function", "]")
        raise


def _chat_body(body: ResponsesBody, items: Sequence[Mapping[str, Any]], num_previous: int) -> ChatBody:
    if body.top_logprobs and not body.wants_logprobs:
        raise invalid(f"'top_logprobs' needs 'include' with \"{LOGPROBS}\"", "top_logprobs")
    if body.wants_logprobs and body.tools and body.tool_choice != "none":
        raise invalid("log-probabilities are not reported together with 'tools': leave one of them out", "include")
    choice = body.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "function" and set(choice) == {"type", "name"}:
        choice = {"type": "function", "function": {"name": choice["name"]}}
    shared = body.model_fields_set.intersection(SamplingBody.model_fields)
    fields = {name: getattr(body, name) for name in shared}
    fields |= {
        "messages": messages_of(body.instructions, items, num_previous=num_previous),
        "max_tokens": body.max_output_tokens,
        "logprobs": body.wants_logprobs,
        "top_logprobs": body.top_logprobs,
        "tools": chat_tools(body.tools),
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        "response_format": _format(body.text.format) if body.text is not None and body.text.format else None,
    }
    return validated(ChatBody, fields)


def _format(wanted: TextFormat) -> dict[str, Any]:
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    if wanted.schema_ is None or wanted.name is None:
        raise invalid("text.format of type json_schema needs the fields 'name' and 'schema'", "text.format")
    schema = {"name": wanted.name, "schema": wanted.schema_, "strict": wanted.strict}
    return {"type": "json_schema", "json_schema": schema}
