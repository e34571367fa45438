"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's form of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, final

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from draftree.serve.api.chat import AnswerUpdate, BlockWriter, Chat, encoded_chat, running_chat
from draftree.serve.errors import ApiError, JsonResponse, invalid, shaped_route
from draftree.serve.render import usage_json
from draftree.serve.request import GENERATED, documented_errors
from draftree.serve.schema import Body, ChatBody, Effect, ImagePart, Items, ignored, note, refused, validated
from draftree.serve.streams import EventStream, event, respond
from draftree.serve.tools.parser import Delta, Kind, call_arguments

_CACHED = ignored("prefixes are cached without it")
_TEXT_ONLY = "only text is supported"


class Block(Body):
    """A part of a message."""

    elsewhere: ClassVar[Mapping[str, Effect]] = {
        "cache_control": _CACHED,
        "citations": ignored("a text has no citations", []),
        "caller": ignored("calls are the model's"),
        "toolset_name": ignored("tools have no sets"),
    }


class TextBlock(Block):
    """A text."""

    type: Literal["text"]
    text: str


class ImageSource(Body):
    """Where an image is."""

    type: Literal["base64", "url"]
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class ImageBlock(Block):
    """An image, for models that read images."""

    type: Literal["image"]
    source: ImageSource


class ThinkingBlock(Block):
    """Reasoning of an earlier answer; it is not signed."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedBlock(Block):
    """Reasoning that only Anthropic's servers can read."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Block):
    """A call of a tool."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Block):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Items[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]] | None = None
    is_error: bool | None = None


AnyBlock = Annotated[
    TextBlock | ImageBlock | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]


class Message(Body):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Items[AnyBlock]


class Tool(Body):
    """A function that the model may call."""

    elsewhere: ClassVar[Mapping[str, Effect]] = {
        "allowed_callers": ignored("calls are the model's"),
        "cache_control": _CACHED,
        "defer_loading": ignored("all tools are in the prompt", False),
        "eager_input_streaming": ignored("arguments are streamed as they come"),
        "input_examples": ignored("chat templates have no place for it", []),
    }
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ToolChoice(Body):
    """Whether and which tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether the model reasons before its answer."""

    elsewhere: ClassVar[Mapping[str, Effect]] = {
        "budget_tokens": ignored("'max_tokens' limits reasoning and answer together")
    }
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    """A schema of the answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """Effort and format of the answer."""

    elsewhere: ClassVar[Mapping[str, Effect]] = {"task_budget": ignored("'max_tokens' limits the answer")}
    effort: str | None = Field(None, max_length=32)
    format: OutputFormat | None = None


class PromptBody(Body):
    """A conversation to count."""

    elsewhere: ClassVar[Mapping[str, Effect]] = {
        "cache_control": _CACHED,
        "container": refused("the server runs no tools"),
        "context_management": ignored("a conversation that does not fit is refused"),
        "diagnostics": ignored("'usage' and /metrics have the statistics"),
        "inference_geo": refused("requests are processed where the server runs"),
        "mcp_servers": refused("the server runs no tools", []),
        "metadata": ignored("nothing is stored", {}),
        "output_format": refused("use 'output_config.format'"),
        "service_tier": ignored("the order of requests depends on API keys alone", "auto", "standard_only"),
        "speed": ignored("every request runs as fast as it can", "standard"),
        "user_profile_id": ignored("requests are not attributed to end users"),
        "workspace_id": ignored("requests are not attributed to workspaces"),
    }
    model: str | None = None
    messages: Items[Message] = Field(min_length=1)
    system: str | Items[TextBlock] | None = None
    thinking: Thinking | None = None
    tools: Items[Tool] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None


class MessagesBody(PromptBody):
    """A conversation to continue."""

    max_tokens: int = Field(ge=1)
    stop_sequences: Items[str] | None = None
    stream: bool | None = False
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64, description="as in /v1/chat/completions")
    draft: str | None = Field(None, description="as in /v1/chat/completions")


TYPES = {"server_error": "api_error", "service_unavailable_error": "overloaded_error"}
"""Anthropic's names of error types, where they differ."""
NAMES = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "json_schema": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "enable_thinking": "thinking",
}
STOP_REASONS = {"length": "max_tokens", "stop": "end_turn", "tool_calls": "tool_use"}
EMPTY_THINKING = {"type": "thinking", "thinking": "", "signature": ""}


class ErrorDetail(BaseModel):
    """What is wrong."""

    type: str
    message: str


class ErrorBody(BaseModel):
    """An error."""

    error: ErrorDetail


def _error_body(error: ApiError) -> dict[str, Any]:
    message = error.message.replace(f"'{error.param}'", f"'{NAMES.get(error.param or '', error.param)}'")
    kind = "not_found_error" if error.status == 404 else TYPES.get(error.type, error.type)
    return {"type": "error", "error": {"type": kind, "message": message}}


router = APIRouter(
    prefix="/v1/messages",
    tags=["anthropic"],
    responses=documented_errors(ErrorBody),
    route_class=shaped_route(_error_body),
)


@router.post("", summary="Answer a conversation, in Anthropic's form", responses=GENERATED)
async def messages(body: MessagesBody, request: Request) -> Response:
    """Answer a conversation, at once or as a stream of typed events."""
    chat = _chat_body(body)
    if body.stream:
        on_error = lambda error: event(error.body(), "error")  # noqa: E731
        return EventStream(_events(chat, request), done=b"", on_error=on_error, shape=_error_body)
    return await respond(request, _object(chat, request))


@router.post("/count_tokens", summary="Count the tokens of a conversation, in Anthropic's form")
async def count_tokens(body: PromptBody, request: Request) -> Response:
    """Return the number of prompt tokens of a conversation."""
    return JsonResponse({"input_tokens": len(await encoded_chat(_chat_body(body), request))})


running_message = partial(running_chat, prefix="msg", names=NAMES, clips_tokens=True)


async def _object(body: ChatBody, request: Request) -> Response:
    async with running_message(body, request) as chat:
        writer = MessageWriter(chat)
        async for part in chat.updates():
            writer.push(part)
        return JsonResponse(writer.message)


async def _events(body: ChatBody, request: Request) -> AsyncGenerator[bytes, None]:
    async with running_message(body, request) as chat:
        writer = MessageWriter(chat)
        yield event({"type": "message_start", "message": writer.message}, "message_start")
        async for part in chat.updates():
            if data := b"".join(event(each, each["type"]) for each in writer.push(part)):
                yield data


def _chat_body(body: PromptBody) -> ChatBody:
    fields: dict[str, Any] = {"model": body.model, "messages": [*_messages(body)]}
    if body.tools:
        fields["tools"] = [_function(tool) for tool in body.tools]
    if body.tool_choice is not None:
        fields |= _choice(body.tool_choice)
    if body.thinking is not None:
        fields["enable_thinking"] = {"enabled": True, "disabled": False}.get(body.thinking.type)
        fields["include_reasoning"] = body.thinking.display != "omitted"
    if body.output_config is not None:
        fields["reasoning_effort"] = body.output_config.effort
        if body.output_config.format is not None:
            schema = {"name": "answer", "schema": body.output_config.format.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(body, MessagesBody):
        same = ("max_tokens", "stream", "temperature", "top_p", "top_k", "seed", "draft")
        fields |= {name: getattr(body, name) for name in same} | {"stop": body.stop_sequences or None}
    last = body.messages[-1]
    if last.role == "assistant":
        # the answer continues the last message
        fields["continue_final_message"] = True
    return validated(ChatBody, fields)


def _messages(body: PromptBody) -> Iterable[dict[str, Any]]:
    if body.system:
        yield {"role": "system", "content": _text(body.system)}
    for place, message in enumerate(body.messages):
        if isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
        elif message.role == "assistant":
            yield _assistant(message.content, f"messages[{place}].content")
        else:
            yield from _user(message, f"messages[{place}].content")


def _user(message: Message, place: str) -> Iterable[dict[str, Any]]:
    """Yield results of tools as messages of their own, and the texts between them."""
    blocks: dict[str, TextBlock | ImageBlock] = {}
    for number, block in enumerate(message.content):
        match block:
            case TextBlock() | ImageBlock():
                blocks[f"{place}[{number}]"] = block
            case ToolResultBlock():
                if blocks:
                    yield {"role": message.role, "content": _content(blocks)}
                    blocks = {}
                if block.is_error:
                    note(f"{place}[{number}].is_error", "is ignored: 'content' says it")
                result: Any = block.content or ""
                if not isinstance(result, str):
                    result = _content({f"{place}[{number}].content[{part}]": each for part, each in enumerate(result)})
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": result}
            case _:
                raise _misplaced(block, f"{place}[{number}]")
    if blocks or not message.content:
        yield {"role": message.role, "content": _content(blocks)}


def _content(blocks: Mapping[str, TextBlock | ImageBlock]) -> str | list[Any]:
    """Return texts, by their places, as one; or texts and images as the parts of OpenAI's form."""
    texts = [block for block in blocks.values() if isinstance(block, TextBlock)]
    if len(texts) == len(blocks):
        return _text(texts)
    return [
        {"type": "text", "text": block.text}
        if isinstance(block, TextBlock)
        else _image(block.source, f"{place}.source")
        for place, block in blocks.items()
    ]


def _image(source: ImageSource, place: str) -> ImagePart:
    name = "data" if source.type == "base64" else "url"
    value = source.data if source.type == "base64" else source.url
    if value is None:
        raise invalid(f"'{place}' has an image without '{name}': add it", place)
    url = f"data:{source.media_type or 'image/png'};base64,{value}" if source.type == "base64" else value
    return ImagePart.of(url, f"{place}.{name}")


def _assistant(blocks: list[AnyBlock], place: str) -> dict[str, Any]:
    texts: list[TextBlock] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        match block:
            case TextBlock():
                texts.append(block)
            case ThinkingBlock():
                reasoning.append(block.thinking)
            case ToolUseBlock():
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
            case RedactedBlock():
                note(f"{place}[{number}]", "is ignored: this server cannot read it")
            case _:
                raise _misplaced(block, f"{place}[{number}]")
    message: dict[str, Any] = {"role": "assistant", "content": _text(texts)}
    if calls:
        message |= {"content": message["content"] or None, "tool_calls": calls}
    return {**message, "reasoning_content": "\n".join(reasoning)} if reasoning else message


def _misplaced(block: Any, place: str) -> ApiError:
    return invalid(f"'{place}' has the type '{block.type}', which belongs to another role: move it", place)


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _function(tool: Tool) -> dict[str, Any]:
    fields = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    function = {name: value for name, value in fields.items() if value is not None}
    return {"type": "function", "function": function | ({"strict": True} if tool.strict else {})}


def _choice(choice: ToolChoice) -> dict[str, Any]:
    if choice.type == "tool" and choice.name is None:
        raise invalid("'tool_choice.name' is missing: name a tool", "tool_choice.name")
    named = {"type": "function", "function": {"name": choice.name}}
    tool_choice = {"auto": "auto", "any": "required", "none": "none", "tool": named}[choice.type]
    return {"tool_choice": tool_choice, "parallel_tool_calls": not choice.disable_parallel_tool_use}


@final
class MessageWriter(BlockWriter):
    """The message of one answer, and the events that describe its changes. Mutated by `push`."""

    def __init__(self, chat: Chat) -> None:
        super().__init__()
        self._chat = chat
        self._blocks: list[dict[str, Any]] = []
        self._arguments = ""
        self.message: dict[str, Any] = {
            "id": chat.head.id,
            "type": "message",
            "role": "assistant",
            "model": chat.head.model.name,
            "content": self._blocks,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def push(self, part: AnswerUpdate) -> list[dict[str, Any]]:
        events = [each for delta in part.deltas for each in self.read(delta)]
        if part.finish_reason is not None:
            stop = part.update.sequence.stop_reason
            reason = STOP_REASONS[part.finish_reason]
            if isinstance(stop, str) and reason != "tool_use":
                reason = "stop_sequence"
            end = {"stop_reason": reason, "stop_sequence": stop if isinstance(stop, str) else None}
            events += self.end()
            self.message |= {**end, "usage": self._usage()}
            events.append({"type": "message_delta", "delta": end, "usage": self.message["usage"]})
            events.append({"type": "message_stop"})
        return events

    def _begin(self, delta: Delta) -> list[dict[str, Any]]:
        block: dict[str, Any]
        if delta.kind == "call":
            block = {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
        else:
            block = {"type": "text", "text": ""} if delta.kind == "text" else EMPTY_THINKING.copy()
        self._blocks.append(block)
        return [{"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}]

    def _grow(self, delta: Delta) -> list[dict[str, Any]]:
        if delta.kind == "call":
            self._arguments += delta.text
            return [self._changed({"type": "input_json_delta", "partial_json": delta.text})] if delta.text else []
        key = self._blocks[-1]["type"]
        self._blocks[-1][key] += delta.text
        return [self._changed({"type": f"{key}_delta", key: delta.text})]

    def _changed(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _end(self, kind: Kind, status: str) -> list[dict[str, Any]]:
        if kind == "call":
            self._blocks[-1]["input"] = call_arguments(self._arguments)
            self._arguments = ""
        signature = [self._changed({"type": "signature_delta", "signature": ""})] if kind == "reasoning" else []
        return [*signature, {"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _usage(self) -> dict[str, int]:
        usage = usage_json(self._chat.job)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": usage["completion_tokens"],
        }
