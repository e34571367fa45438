"""POST /v1/responses."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, final

from fastapi import APIRouter, Request, Response
from pydantic import AfterValidator, Field

from draftree.core.errors import InvalidRequestError, suggestion
from draftree.options import RequestOptions
from draftree.serve.errors import ApiError, JsonResponse, api_error, invalid, named_error
from draftree.serve.job import ChoiceUpdate, Job
from draftree.serve.logprobs import chat_logprobs
from draftree.serve.pool import ServedModel
from draftree.serve.reasoning import AnswerStart, reasoning_variables
from draftree.serve.render import Head, Report, metrics_json, usage_json
from draftree.serve.request import (
    ERRORS,
    GENERATED,
    Checked,
    Encode,
    build_options,
    chat_model_of,
    note_unenforced,
    running_job,
    server_of,
)
from draftree.serve.schema import (
    RESPONSES,
    SHARED,
    Body,
    Effect,
    Items,
    SamplingBody,
    ServiceTier,
    ignored,
    note,
    refused,
)
from draftree.serve.streams import EventStream, event, respond
from draftree.serve.tools.parser import CallDelta, ReasoningDelta, TextDelta
from draftree.serve.tools.plan import ToolPlan

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
IGNORED = ("id", "status")
"""Fields that the server's own output items have, and that mean nothing in a conversation."""


def items_of(
    given: str | Sequence[Mapping[str, Any]], stored: Callable[[str], Mapping[str, Any] | None]
) -> list[Mapping[str, Any]]:
    """Return the input items of a request; references to stored items are replaced by these."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not given:
        raise invalid("'input' is empty: give a text, or at least one item", "input")
    items: list[Mapping[str, Any]] = []
    names = set[str]()
    for number, item in enumerate(given):
        if item.get("type") == "item_reference":
            place = f"input[{number}]"
            _require_keys(item, ("type",), place)
            name = _text(item, "id", place)
            found = stored(name)
            if found is None:
                message = f"'{place}.id': the item '{name[:100]}' is not stored, or no longer: send the item itself"
                raise invalid(message, f"{place}.id", code="item_not_found")
            if name in names:  # many references to a long item would make any conversation of a short request
                raise invalid(f"'{place}.id': the item '{name[:100]}' is named twice", f"{place}.id")
            names.add(name)
            item = found
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
        content = _content(item.get("output"), f"{place}.output")
        messages.append({"role": "tool", "tool_call_id": _text(item, "call_id", place), "content": content})
    else:
        known = "message, reasoning, function_call, function_call_output and item_reference"
        raise invalid(f"'{place}.type' is {str(kind)[:40]!r}: {known} are supported", f"{place}.type")


def _message(item: Mapping[str, Any], place: str) -> dict[str, Any]:
    _require_keys(item, ("type", "role", "content"), place)
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(f"'{place}.role' must be one of {', '.join(ROLES)}", f"{place}.role")
    return {"role": ROLES[role], "content": _content(item.get("content"), f"{place}.content")}


def _call(item: Mapping[str, Any], place: str) -> dict[str, Any]:
    _require_keys(item, ("type", "call_id", "name", "arguments"), place)
    function = {"name": _text(item, "name", place), "arguments": _text(item, "arguments", place)}
    return {"id": _text(item, "call_id", place), "type": "function", "function": function}


def _content(content: object, place: str) -> str:
    """Return the text of a content: a text, or text parts, which are joined by line ends."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"'{place}' must be text or a list of text parts", place)
    return "\n".join(_part(part, f"{place}[{number}]") for number, part in enumerate(content))


def _part(part: object, place: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") not in TEXT_PARTS:
        raise invalid(f"'{place}' must be a text part: {', '.join(TEXT_PARTS[:2])} are supported", place)
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
    found = []
    for number, tool in enumerate(tools):
        if tool.get("type") != "function":
            message = f"'tools[{number}].type' must be \"function\": the server has no tools of its own"
            raise invalid(message, f"tools[{number}].type")
        found.append({"type": "function", "function": {key: tool[key] for key in tool if key != "type"}})
    return found


Event = dict[str, Any]
REPORT = "response.draftree"
"""Event with the pieces and rounds of an update; only if the request asks for them."""
TEXT_PART = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
REASONING_PART = {"type": "reasoning_text", "text": ""}


@final
class ResponseWriter:
    """Output items of one response, and the events that describe their changes. Mutated by `read` and `finish`."""

    def __init__(self, body: ResponsesBody, head: Head, job: Job, *, plan: ToolPlan, id_end: str) -> None:
        self._body, self._head, self._job, self._plan = body, head, job, plan
        self._id_end = id_end
        self._parser = plan.parser(job.reasoning)
        self._start = AnswerStart(job.reasoning, job.served.texts)
        self._report = Report(job, body)
        self._output: list[dict[str, Any]] = []
        self._is_open = False
        self._num_events = 0
        self._end: dict[str, Any] = {}

    def start(self) -> list[Event]:
        return [self._event(kind, response=self.response()) for kind in ("response.created", "response.in_progress")]

    def read(self, found: ChoiceUpdate) -> list[Event]:
        update = found.update
        report = self._report.part(found)
        events = [self._event(REPORT, draftree=report)] if report else []
        if self._report.is_wanted and not self._body.stream:
            self._report.add(found)
        logprobs: list[Any] = []
        if self._body.wants_logprobs:
            num_before = self._start.push(entry.token_id for entry in update.logprobs)
            logprobs = chat_logprobs(update.logprobs[num_before:], self._job.served.texts)
        deltas = self._parser.push("".join(piece.text for piece in update.pieces))
        if update.is_last:
            deltas += self._parser.finish()
        if logprobs and not deltas:
            deltas = [TextDelta("")]
        for delta in deltas:
            if isinstance(delta, TextDelta):
                events += self._text(delta.text, logprobs)
                logprobs = []
            elif isinstance(delta, ReasoningDelta):
                events += self._reasoning(delta.text)
            else:
                events += self._call(delta)
        return events

    def finish(self, finish_reason: str) -> list[Event]:
        is_cut = finish_reason == "length"
        events = [] if self._output else self._open_message()
        events += self._close("incomplete" if is_cut else "completed")
        self._end = {"status": "incomplete" if is_cut else "completed"}
        if is_cut:
            self._end["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self._end["completed_at"] = max(int(time.time()), self._head.created)  # the clock may have been set back
        self._end |= {"usage": self._usage(), **metrics_json(self._job)}
        self._end |= self._report.fields(self._job.completions())
        return [*events, self._event(f"response.{self._end['status']}", response=self.response())]

    def fail(self, error: ApiError) -> list[Event]:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        events = self._close("incomplete")
        self._end = {"status": "failed", "error": {"code": code, "message": error.message}}
        return [*events, self._event("response.failed", response=self.response())]

    def response(self) -> dict[str, Any]:
        body = self._body
        model = self._head.model.llm.llm
        sampling = model.requests.resolved(self._job.options).sampling
        return {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "status": "in_progress",
            "completed_at": None,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "model": self._head.model.name,
            "output": [dict(item) for item in self._output],
            "parallel_tool_calls": self._plan.is_parallel,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": body.store is not False,
            "temperature": sampling.temperature,
            "text": {"format": self._format()},
            "tool_choice": body.tool_choice or "auto",
            "tools": [{"description": None, "parameters": None, "strict": False} | tool for tool in body.tools or []],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
            "metadata": body.metadata or {},
            **self._end,
        }

    def _format(self) -> dict[str, Any]:
        given = self._body.text.format if self._body.text is not None else None
        return {"type": "text"} if given is None else given.model_dump(by_alias=True, exclude_none=True)

    def _event(self, kind: str, **fields: Any) -> Event:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}

    def _text(self, text: str, logprobs: list[Any]) -> list[Event]:
        events = [] if self._is_open and self._output[-1]["type"] == "message" else self._open_message()
        part = self._output[-1]["content"][0]
        part["text"] += text
        part["logprobs"] += logprobs
        where = {**self._place, "content_index": 0}
        return [*events, self._event("response.output_text.delta", **where, delta=text, logprobs=logprobs)]

    def _reasoning(self, text: str) -> list[Event]:
        events: list[Event] = []
        if not (self._is_open and self._output[-1]["type"] == "reasoning"):
            events = self._open_text("rs", {"type": "reasoning", "summary": []}, REASONING_PART)
        self._output[-1]["content"][0]["text"] += text
        where = {**self._place, "content_index": 0}
        return [*events, self._event("response.reasoning_text.delta", **where, delta=text)]

    def _open_message(self) -> list[Event]:
        return self._open_text("msg", {"type": "message", "role": "assistant"}, TEXT_PART)

    def _open_text(self, prefix: str, item: dict[str, Any], empty: dict[str, Any]) -> list[Event]:
        events = self._open(prefix, {**item, "content": []})
        part = _copy(empty)
        self._output[-1]["content"] = [part]
        where = {**self._place, "content_index": 0}
        return [*events, self._event("response.content_part.added", **where, part=_copy(part))]

    def _call(self, delta: CallDelta) -> list[Event]:
        events: list[Event] = []
        if delta.name is not None:
            item = {"type": "function_call", "call_id": delta.id, "name": delta.name, "arguments": ""}
            events = self._open("fc", item)
        if delta.arguments:
            self._output[-1]["arguments"] += delta.arguments
            kind = "response.function_call_arguments.delta"
            events.append(self._event(kind, **self._place, delta=delta.arguments))
        return events

    def _open(self, prefix: str, item: dict[str, Any]) -> list[Event]:
        events = self._close("completed")
        name = f"{prefix}_{uuid.uuid4().hex}{self._id_end}"
        self._output.append({"id": name, **item, "status": "in_progress"})
        self._is_open = True
        added = self._event(
            "response.output_item.added", output_index=len(self._output) - 1, item=dict(self._output[-1])
        )
        return [*events, added]

    def _close(self, status: str) -> list[Event]:
        if not self._is_open:
            return []
        self._is_open = False
        item = self._output[-1]
        item["status"] = status
        if "content" in item:
            part, where = _copy(item["content"][0]), {**self._place, "content_index": 0}
            fields = {key: part[key] for key in ("text", "logprobs") if key in part}
            events = [
                self._event(f"response.{part['type']}.done", **where, **fields),
                self._event("response.content_part.done", **where, part=part),
            ]
        else:
            kind = "response.function_call_arguments.done"
            events = [self._event(kind, **self._place, name=item["name"], arguments=item["arguments"])]
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
    "json_schema": "text.format",
    "messages": "input",
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
    model = chat_model_of(request, body.model)
    plan = await _plan(body, model, _options(body, model, None)[0])
    messages = plan.messages(_Conversation.of(body, request).messages(), model.chat_template)
    try:
        ids = await _encoder(body, model, plan)(messages)
    except InvalidRequestError as error:
        raise named_error(error, NAMES) from error
    return JsonResponse({"object": "response.input_tokens", "input_tokens": len(ids)})


async def _object(body: ResponsesBody, request: Request) -> Response:
    async with _writing(body, request) as response:
        job = response.job
        writer = response.writer
        async for found in job.updates():
            writer.read(found)
            if found.update.is_last:
                writer.finish(_reason(found))
        response.keep(body, request)
        return JsonResponse(writer.response())


async def _events(body: ResponsesBody, request: Request) -> AsyncGenerator[bytes, None]:
    async with _writing(body, request) as response:
        job = response.job
        writer = response.writer
        yield _encoded(writer.start())
        try:
            async for found in job.updates():
                events = writer.read(found)
                if found.update.is_last:
                    events += writer.finish(_reason(found))
                    response.keep(body, request)
                if events:
                    yield _encoded(events)
        except Exception as error:
            yield _encoded(writer.fail(api_error(error)))


def _reason(found: ChoiceUpdate) -> str:
    return str(found.update.sequence.finish_reason)


def _encoded(events: list[dict[str, Any]]) -> bytes:
    return b"".join(event(each, each["type"]) for each in events)


@dataclass(frozen=True, slots=True)
class _Conversation:
    """The items of a request, after those of the conversation that it continues."""

    instructions: str | None
    previous: Sequence[Mapping[str, Any]]
    given: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, body: ResponsesBody, request: Request) -> _Conversation:
        server = server_of(request)
        key, name = server.key_of(request).name, body.previous_response_id
        previous = () if name is None else server.responses.get(key, name)
        if previous is None:
            message = (
                f"the response '{str(name)[:100]}' is not stored, or no longer: send the whole conversation as 'input'"
            )
            raise invalid(message, "previous_response_id", code="previous_response_not_found")
        return cls(body.instructions, previous, items_of(body.input, partial(server.responses.item, key)))

    @property
    def items(self) -> list[Mapping[str, Any]]:
        return [*self.previous, *self.given]

    def messages(self) -> list[dict[str, Any]]:
        return messages_of(self.instructions, self.items, num_previous=len(self.previous))


@dataclass(frozen=True, slots=True)
class _Response:
    job: Job
    writer: ResponseWriter
    conversation: _Conversation

    def keep(self, body: ResponsesBody, request: Request) -> None:
        if body.store is not False:
            server = server_of(request)
            response = self.writer.response()
            items = [*self.conversation.items, *response["output"]]
            server.responses.put(server.key_of(request).name, response["id"], items)


@asynccontextmanager
async def _writing(body: ResponsesBody, request: Request) -> AsyncIterator[_Response]:
    model = chat_model_of(request, body.model)
    conversation = _Conversation.of(body, request)
    head = Head.of("resp", body, model)
    head = replace(head, id=head.id + server_of(request).responses.suffix)
    options, names = _options(body, model, head.id)
    wanted = body.text.format if body.text is not None else None
    await note_unenforced(options, names, is_strict=wanted is not None and wanted.strict is True)
    plan = await _plan(body, model, options)
    encode = _encoder(body, model, plan)
    messages = plan.messages(conversation.messages(), model.chat_template)
    async with running_job(
        request,
        model,
        prompts=[messages],
        options=plan.sampling(options),
        names=names if plan.grammar is None else {**names, "grammar": "tools"},
        encode=encode,
        is_chat=True,
    ) as job:
        yield _Response(
            job, ResponseWriter(body, head, job, plan=plan, id_end=server_of(request).responses.suffix), conversation
        )


def _encoder(body: ResponsesBody, model: ServedModel, plan: ToolPlan) -> Encode:
    effort = None if body.reasoning is None else body.reasoning.effort
    variables = reasoning_variables(
        model, effort=effort, is_enabled=None, effort_name="reasoning.effort", switch_name=""
    )
    return partial(model.llm.prompts.encode_chat, tools=plan.tools, template_kwargs=variables)


async def _plan(body: ResponsesBody, model: ServedModel, options: RequestOptions) -> ToolPlan:
    choice = body.tool_choice
    if isinstance(choice, Mapping) and choice.get("type") == "function" and set(choice) == {"type", "name"}:
        choice = {"type": "function", "function": {"name": choice["name"]}}
    try:
        plan = await ToolPlan.load(
            model.tokenizer,
            chat_tools(body.tools),
            tool_choice=choice,
            is_parallel=body.parallel_tool_calls is not False,
            answer=options.json_schema,
        )
    except ApiError as error:
        # in this API the fields of a function are those of the tool
        message, param = error.message.replace("].function", "]"), (error.param or "").replace("].function", "]")
        raise invalid(message, param or None) from error
    if body.wants_logprobs and plan.is_active:
        raise invalid("log-probabilities are not reported together with 'tools': leave one of them out", "include")
    return plan


def _options(body: ResponsesBody, model: ServedModel, request_id: str | None) -> Checked:
    if body.top_logprobs and not body.wants_logprobs:
        raise invalid(f"'top_logprobs' needs 'include' with \"{LOGPROBS}\"", "top_logprobs")
    given: dict[str, Any] = {
        "max_tokens": body.max_output_tokens,
        "logprobs": (body.top_logprobs or 0) if body.wants_logprobs else None,
        "request_id": request_id,
        **_constraint(body),
    }
    return build_options(body, model, given, NAMES)


def _constraint(body: ResponsesBody) -> dict[str, Any]:
    wanted = body.text.format if body.text is not None else None
    if wanted is None or wanted.type == "text":
        return {}
    if wanted.type == "json_object":
        return {"json_schema": {"type": "object"}}
    if wanted.schema_ is None or wanted.name is None:
        raise invalid("text.format of type json_schema needs the fields 'name' and 'schema'", "text.format")
    return {"json_schema": wanted.schema_}
