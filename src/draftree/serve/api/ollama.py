"""/api/chat, /api/generate, /api/tags and /api/show: Ollama's form of chat, completions and models."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, ClassVar, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from draftree.serve.api.chat import AnswerUpdate, running_chat
from draftree.serve.api.completions import running_completion
from draftree.serve.errors import ApiError, JsonResponse, encode_json, invalid, shaped_route
from draftree.serve.logprobs import chat_logprobs
from draftree.serve.pool import ServedModel
from draftree.serve.reasoning import reasoning_format
from draftree.serve.render import usage_json
from draftree.serve.request import documented_errors, model_of, server_of
from draftree.serve.schema import (
    ELSEWHERE,
    MAX_LOGPROBS,
    Body,
    ChatBody,
    CompletionBody,
    Effect,
    ImagePart,
    Items,
    SamplingFields,
    ignored,
    refused,
    validated,
)
from draftree.serve.streams import LineStream, respond
from draftree.serve.tools.families import family_of
from draftree.serve.tools.parser import Delta, call_arguments, joined, merged
from draftree.text.fill_in import can_fill

_LOADED = ignored("models stay loaded, as the server was started")
LLAMA_OPTIONS = ("mirostat", "mirostat_eta", "mirostat_tau", "repeat_last_n", "repeat_penalty", "typical_p")
LOAD_OPTIONS = [
    "embedding_only",
    "f16_kv",
    "logits_all",
    "low_vram",
    "main_gpu",
    "num_batch",
    "num_ctx",
    "num_gpu",
    "num_keep",
    "num_thread",
    "numa",
    "use_mlock",
    "use_mmap",
    "vocab_only",
]
LATEST = ":latest"
NAMES = {
    "stop": "options.stop",
    "max_tokens": "options.num_predict",
    "response_format": "format",
    "json_schema": "format",
    "reasoning_effort": "think",
    "enable_thinking": "think",
}


class Options(SamplingFields):
    """Options of the model and of sampling."""

    elsewhere: ClassVar[Mapping[str, Effect]] = {
        **{name: ELSEWHERE["llama.cpp"][name] for name in LLAMA_OPTIONS},
        **dict.fromkeys(LOAD_OPTIONS, _LOADED),
        "penalize_newline": refused("use 'presence_penalty' or 'frequency_penalty'", True),
        "tfs_z": refused("use 'top_p' or 'min_p'", 1),
    }
    num_predict: int | None = Field(None, ge=-2)


class PromptBody(Body):
    """What both kinds of requests have."""

    elsewhere: ClassVar[Mapping[str, Effect]] = {
        "keep_alive": _LOADED,
        "shift": ignored("a prompt that does not fit is refused"),
        "template": refused("templates of clients are not run", ""),
        "truncate": ignored("a prompt that does not fit is refused"),
    }
    model: str
    stream: bool | None = True
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: Options | None = None
    think: bool | str | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    draft: str | None = Field(None, description="as in /v1/chat/completions")

    def fields(self, model: str) -> dict[str, Any]:
        options = Options.model_validate({}) if self.options is None else self.options
        fields = options.model_dump(exclude={"num_predict"}, exclude_none=True)
        # as many as fit, by default and for every negative number
        fields["max_tokens"] = -1 if options.num_predict is None else max(options.num_predict, -1)
        if isinstance(self.format, dict):
            fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "_", "schema": self.format}}
        elif self.format:
            fields["response_format"] = {"type": "json_object"}
        return fields | {"model": model, "stream": self.stream is not False, "draft": self.draft}

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def chat(self, model: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> ChatBody:
        is_level = isinstance(self.think, str)
        return validated(
            ChatBody,
            {
                **self.fields(model),
                "messages": messages,
                "tools": tools,
                "reasoning_effort": self.think if is_level else None,
                "enable_thinking": None if is_level else self.think,
                "logprobs": bool(self.logprobs),
                "top_logprobs": self.num_logprobs,
            },
        )


class Function(Body):
    """The function of a call."""

    elsewhere: ClassVar[Mapping[str, Effect]] = {"index": ignored("calls are in order")}
    name: str
    arguments: dict[str, Any]


class Call(Body):
    """A call of an earlier answer."""

    elsewhere: ClassVar[Mapping[str, Effect]] = {
        "id": ignored("calls and results are in order"),
        "type": ignored("tools are functions", "function"),
    }
    function: Function


class Message(Body):
    """A message of a conversation."""

    role: str
    content: str | None = None
    images: Items[str] | None = Field(None, description="files in base64, for models that read images")
    thinking: str | None = None
    tool_calls: Items[Call] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class ChatRequest(PromptBody):
    """A conversation to continue."""

    messages: Items[Message] | None = None
    tools: Items[dict[str, Any]] | None = None


class GenerateRequest(PromptBody):
    """A prompt to answer, or to continue."""

    elsewhere: ClassVar[Mapping[str, Effect]] = {
        **PromptBody.elsewhere,
        "context": refused("send the conversation to /api/chat", []),
    }
    prompt: str | None = None
    images: Items[str] | None = Field(None, description="as in /api/chat")
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = False


class ShowRequest(Body):
    """A model to describe."""

    elsewhere: ClassVar[Mapping[str, Effect]] = {"verbose": ignored("all is shown"), "name": ignored("use 'model'")}
    model: str


class ErrorBody(BaseModel):
    """An error."""

    error: Any


def _error_body(error: ApiError) -> dict[str, Any]:
    return {"error": error.message}


class _Route(shaped_route(_error_body)):  # type: ignore[misc]
    """Reads every body as JSON: many clients of this protocol, and `curl -d`, send another content type, or none."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def as_json(request: Request) -> Response:
            others = [(name, value) for name, value in request.scope["headers"] if name != b"content-type"]
            scope = {**request.scope, "headers": [*others, (b"content-type", b"application/json")]}
            return await handle(Request(scope, request.receive))

        return as_json


router = APIRouter(prefix="/api", tags=["ollama"], responses=documented_errors(ErrorBody), route_class=_Route)
LINES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "One JSON object, or lines of JSON",
        "content": {"application/json": {}, LineStream.media_type: {}},
    }
}


@router.post("/chat", summary="Answer a conversation, in Ollama's form", responses=LINES)
async def chat(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation, as lines of JSON or at once."""
    if not body.messages:
        return _loaded(body, request, {"message": {"role": "assistant", "content": ""}})
    messages = _messages(body.messages)
    chat_body = body.chat(_served_name(request, body.model), messages, list(body.tools or []) or None)
    return await _answer(request, _chatting(chat_body, request), _message, stream=body.stream is not False)


@router.post("/generate", summary="Answer or continue a prompt, in Ollama's form", responses=LINES)
async def generate(body: GenerateRequest, request: Request) -> Response:
    """Answer a prompt with the chat template, or continue it: with `raw`, `suffix` or a model without a template."""
    if not body.prompt:
        return _loaded(body, request, {"response": ""})
    name = _served_name(request, body.model)
    if body.raw or body.suffix or not model_of(request, name).supports_chat:
        if body.images:
            raise invalid("'images' need a chat template: leave 'raw' and 'suffix' out", "images")
        if body.system:
            raise invalid("'system' needs a chat template: write it into 'prompt'", "system")
        fields = {**body.fields(name), "prompt": body.prompt, "suffix": body.suffix}
        parts = _continuing(validated(CompletionBody, {**fields, "logprobs": body.num_logprobs}), request)
    else:
        system: list[dict[str, Any]] = [{"role": "system", "content": body.system}] if body.system else []
        messages = [*system, {"role": "user", "content": _content(body.prompt, body.images, "images")}]
        parts = _chatting(body.chat(name, messages), request)
    return await _answer(request, parts, _continuation, stream=body.stream is not False)


@router.get("/tags", summary="List the models, in Ollama's form")
async def tags(request: Request) -> Response:
    """Return the models that the key may use."""
    server = server_of(request)
    visible = server.pool.visible(server.key_of(request))
    rows = [
        {"name": name, "model": name, "modified_at": _time(model.created), "details": _details(model)}
        for model in visible
        for name in model.names
    ]
    return JsonResponse({"models": rows})


@router.post("/show", summary="One model, in Ollama's form")
async def show(body: ShowRequest, request: Request) -> Response:
    """Return the template, the context and the capabilities of a model."""
    model = model_of(request, _served_name(request, body.model))
    facts = {"general.architecture": "draftree", "draftree.context_length": model.max_context}
    return JsonResponse(
        {
            "modified_at": _time(model.created),
            "template": model.chat_template,
            "details": _details(model),
            "model_info": facts,
            "capabilities": _capabilities(model),
        }
    )


async def _chatting(body: ChatBody, request: Request) -> AsyncGenerator[AnswerUpdate, None]:
    async with running_chat(body, request, names=NAMES, clips_tokens=True) as running:
        async for part in running.updates():
            yield part


async def _continuing(body: CompletionBody, request: Request) -> AsyncGenerator[AnswerUpdate, None]:
    async with running_completion(body, request, names=NAMES, clips_tokens=True) as (job, _):
        async for choice in job.updates():
            yield AnswerUpdate(choice.index, choice.update, job, [Delta("text", choice.text)], None)


Content = Callable[[str, str, list[dict[str, Any]]], dict[str, Any]]


def _message(text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    more = ({"thinking": thinking} if thinking else {}) | ({"tool_calls": calls} if calls else {})
    return {"message": {"role": "assistant", "content": text, **more}}


def _continuation(text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    return {"response": text, **({"thinking": thinking} if thinking else {})}


async def _answer(
    request: Request, parts: AsyncGenerator[AnswerUpdate, None], content: Content, *, stream: bool
) -> Response:
    if stream:
        return LineStream(
            _lines(parts, content), done=b"", on_error=lambda error: _encoded(error.body()), shape=_error_body
        )
    return await respond(request, _object(parts, content))


async def _lines(parts: AsyncGenerator[AnswerUpdate, None], content: Content) -> AsyncGenerator[bytes, None]:
    pending: list[Delta] = []
    async with aclosing(parts):
        async for part in parts:
            text, thinking = joined(part.deltas, "text"), joined(part.deltas, "reasoning")
            pending += [delta for delta in part.deltas if delta.kind == "call"]
            # a call is sent whole: when the next one begins, or at the end
            begun = [place for place, delta in enumerate(pending) if delta.name is not None]
            end = len(pending) if part.update.is_last or not begun else begun[-1]
            calls, pending = _calls(pending[:end]), pending[end:]
            if text or thinking or calls or part.update.is_last:
                yield _encoded({**_facts(part), **content(text, thinking, calls)})


async def _object(parts: AsyncGenerator[AnswerUpdate, None], content: Content) -> Response:
    deltas = list[Delta]()
    logprobs = list[Any]()
    facts = dict[str, Any]()
    async with aclosing(parts):
        async for part in parts:
            deltas += part.deltas
            facts = _facts(part)
            logprobs += facts.pop("logprobs", [])
    answer = facts | content(joined(deltas, "text"), joined(deltas, "reasoning"), _calls(deltas))
    return JsonResponse(answer | ({"logprobs": logprobs} if logprobs else {}))


def _calls(deltas: Iterable[Delta]) -> list[dict[str, Any]]:
    calls = merged(delta for delta in deltas if delta.kind == "call")
    return [{"function": {"name": call.name, "arguments": call_arguments(call.text)}} for call in calls]


def _facts(part: AnswerUpdate) -> dict[str, Any]:
    """Return what a line says besides its content."""
    job = part.job
    update = part.update
    facts = {"model": job.served.name, "created_at": _time(time.time()), "done": update.is_last}
    if job.options.logprobs is not None:
        facts["logprobs"] = chat_logprobs(update.logprobs, job.served.texts)
    if not update.is_last:
        return facts
    usage, (stats, *_) = usage_json(job), job.stats()
    return {
        **facts,
        "done_reason": str(update.sequence.finish_reason),
        "total_duration": _nanoseconds(stats.seconds),
        "load_duration": 0,
        "prompt_eval_count": usage["prompt_tokens"],
        "prompt_eval_duration": _nanoseconds(stats.prefill_seconds),
        "eval_count": usage["completion_tokens"],
        "eval_duration": _nanoseconds(stats.decode_seconds),
    }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _encoded(fields: Mapping[str, Any]) -> bytes:
    return f"{encode_json(fields)}\n".encode("ascii")


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _loaded(body: PromptBody, request: Request, content: Mapping[str, Any]) -> Response:
    """Answer a request without a prompt, which asks that the model is loaded."""
    model = model_of(request, _served_name(request, body.model))
    head = {"model": model.name, "created_at": _time(time.time()), "done": True, "done_reason": "load"}
    return JsonResponse({**head, **content})


def _served_name(request: Request, name: str) -> str:
    """Return a name without the tag that clients add to it."""
    known = {name for model in server_of(request).pool for name in model.names}
    return name if name in known else name.removesuffix(LATEST)


def _messages(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Return messages in OpenAI's form, in which calls and their results have ids."""
    converted: list[dict[str, Any]] = []
    waiting: list[str] = []
    for number, message in enumerate(messages):
        content = _content(message.content or "", message.images, f"messages[{number}].images")
        fields: dict[str, Any] = {"role": message.role, "content": content}
        if message.thinking:
            fields["reasoning_content"] = message.thinking
        if message.tool_calls:
            # nine digits, as some chat templates require
            waiting = [f"{len(converted):04}{place:05}" for place in range(len(message.tool_calls))]
            fields["tool_calls"] = [
                {"id": name, "type": "function", "function": call.function.model_dump()}
                for name, call in zip(waiting, message.tool_calls, strict=True)
            ]
        if message.role == "tool":
            fields |= {"tool_call_id": waiting.pop(0)} if waiting else {}
            fields |= {"name": message.tool_name} if message.tool_name else {}
        converted.append(fields)
    return converted


def _content(text: str, images: Sequence[str] | None, place: str) -> str | list[Any]:
    """Return a text, or images and a text as the parts of OpenAI's form."""
    if not images:
        return text
    parts = [ImagePart.of(f"data:image/png;base64,{image}", f"{place}[{n}]") for n, image in enumerate(images)]
    return [*parts, {"type": "text", "text": text}]


def _details(model: ServedModel) -> dict[str, Any]:
    llm = model.llm.llm
    return {"format": "draftree", "quantization_level": llm.quantization or str(llm.model.dtype).removeprefix("torch.")}


def _capabilities(model: ServedModel) -> list[str]:
    tokenizer = model.tokenizer
    template = model.chat_template
    if tokenizer is None:
        return ["completion"]
    capabilities = {
        "completion": True,
        "tools": tokenizer.template_uses_tools and family_of(template) is not None,
        "thinking": reasoning_format(template) is not None,
        "insert": can_fill(tokenizer),
        "vision": model.llm.llm.prompts.images is not None,
    }
    return [name for name, is_there in capabilities.items() if is_there]
