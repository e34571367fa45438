"""POST /v1/responses."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from draftree.core.errors import InvalidRequestError
from draftree.sampling.params import SamplingParams
from draftree.serve.api.common import ERRORS, model_of, running_job, server_of
from draftree.serve.errors import ApiError, api_error, invalid
from draftree.serve.items import chat_tool_choice, chat_tools, items_of, messages_of
from draftree.serve.job import ChoiceUpdate, Job, JobOptions
from draftree.serve.json_text import JsonResponse
from draftree.serve.params import build_params, draft_of, named_error, note_unenforced
from draftree.serve.pool import ServedModel
from draftree.serve.reasoning import reasoning_variables
from draftree.serve.render.head import Head
from draftree.serve.render.responses import ResponseWriter
from draftree.serve.schema.responses import LOGPROBS, ResponsesBody
from draftree.serve.sse import EventStream, event, respond
from draftree.serve.token_limits import Encode
from draftree.serve.tools.plan import ToolPlan

NAMES = {
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "json_schema": "text.format",
    "messages": "input",
}
"""The body's field of each library parameter that has another name there."""
router = APIRouter(prefix="/v1", tags=["responses"], responses=ERRORS)


@router.post("/responses", summary="Answer a conversation of items")
async def responses(body: ResponsesBody, request: Request) -> Response:
    """Answer a conversation, at once or as a stream of typed events."""
    if body.stream:
        return EventStream(_events(body, request), done=b"")
    return await respond(request, _object(body, request))


@router.post("/responses/input_tokens", summary="Count the tokens of a conversation of items")
async def input_tokens(body: ResponsesBody, request: Request) -> Response:
    """Return the number of prompt tokens of a request."""
    model = _model(body, request)
    plan = await _plan(body, model, _params(body)[0])
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
        """Look up what a request refers to.

        Raises:
            ApiError: there are no items, or something is not stored.
        """
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
        """All items."""
        return [*self.previous, *self.given]

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages that the items stand for."""
        return messages_of(self.instructions, self.items, num_previous=len(self.previous))


@dataclass(frozen=True, slots=True)
class _Response:
    """A running response, and the conversation that it ends."""

    job: Job
    writer: ResponseWriter
    conversation: _Conversation

    def keep(self, body: ResponsesBody, request: Request) -> None:
        """Store the conversation of the finished response, unless the request says otherwise."""
        if body.store is not False:
            server = server_of(request)
            response = self.writer.response()
            items = [*self.conversation.items, *response["output"]]
            server.responses.put(server.key_of(request).name, response["id"], items)


@asynccontextmanager
async def _writing(body: ResponsesBody, request: Request) -> AsyncIterator[_Response]:
    model = _model(body, request)
    conversation = _Conversation.of(body, request)
    params, names = _params(body)
    wanted = body.text.format if body.text is not None else None
    await note_unenforced(params, names, is_strict=wanted is not None and wanted.strict is True)
    plan = await _plan(body, model, params)
    head = Head.of("resp", body, model)
    options = JobOptions(
        draft_of(body, model),
        body.priority or 0,
        request_id=head.id,
        trace=body.reports.rounds,
        names=names if plan.grammar is None else {**names, "grammar": "tools"},
        decoder=body.decoder,
    )
    encode = _encoder(body, model, plan)
    messages = plan.messages(conversation.messages(), model.chat_template)
    params = plan.sampling(params)
    async with running_job(
        request, model, prompts=[messages], params=params, options=options, encode=encode, is_chat=True
    ) as job:
        yield _Response(job, ResponseWriter(body, head, job, plan=plan), conversation)


def _model(body: ResponsesBody, request: Request) -> ServedModel:
    model = model_of(request, body.model)
    if not model.supports_chat:
        raise invalid(f"the model '{model.name}' has no chat template: use /v1/completions", "model")
    return model


def _encoder(body: ResponsesBody, model: ServedModel, plan: ToolPlan) -> Encode:
    effort = None if body.reasoning is None else body.reasoning.effort
    variables = reasoning_variables(
        model, effort=effort, is_enabled=None, effort_name="reasoning.effort", switch_name=""
    )
    return partial(model.llm.prompts.encode_chat, tools=plan.tools, template_kwargs=variables)


async def _plan(body: ResponsesBody, model: ServedModel, params: SamplingParams) -> ToolPlan:
    try:
        plan = await ToolPlan.load(
            model.tokenizer,
            chat_tools(body.tools),
            tool_choice=chat_tool_choice(body.tool_choice),
            is_parallel=body.parallel_tool_calls is not False,
            answer=params.json_schema,
        )
    except ApiError as error:
        # in this API the fields of a function are those of the tool
        message, param = error.message.replace("].function", "]"), (error.param or "").replace("].function", "]")
        raise invalid(message, param or None) from error
    if body.wants_logprobs and plan.is_active:
        raise invalid("log-probabilities are not reported together with 'tools': leave one of them out", "include")
    return plan


def _params(body: ResponsesBody) -> tuple[SamplingParams, dict[str, str]]:
    if body.top_logprobs and not body.wants_logprobs:
        raise invalid(f"'top_logprobs' needs 'include' with \"{LOGPROBS}\"", "top_logprobs")
    given: dict[str, Any] = {
        "max_tokens": body.max_output_tokens,
        "logprobs": (body.top_logprobs or 0) if body.wants_logprobs else None,
        **_constraint(body),
    }
    names = {
        "max_tokens": "max_output_tokens",
        "logprobs": "top_logprobs",
        "json_schema": "text.format",
        "messages": "input",
    }
    return build_params(body, given, names)


def _constraint(body: ResponsesBody) -> dict[str, Any]:
    wanted = body.text.format if body.text is not None else None
    if wanted is None or wanted.type == "text":
        return {}
    if wanted.type == "json_object":
        return {"json_schema": {"type": "object"}}
    if wanted.schema_ is None or wanted.name is None:
        raise invalid("text.format of type json_schema needs the fields 'name' and 'schema'", "text.format")
    return {"json_schema": wanted.schema_}
