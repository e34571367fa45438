"""Responses of /v1/responses: output items, and the typed events of a stream."""

from __future__ import annotations

import time
import uuid
from typing import Any, final

from draftree.serve.errors import ApiError
from draftree.serve.job import ChoiceUpdate, Job
from draftree.serve.reasoning import AnswerStart
from draftree.serve.render.head import Head, Report
from draftree.serve.render.report import metrics_json, usage_json
from draftree.serve.render.tokens import chat_logprobs
from draftree.serve.schema.responses import ResponsesBody
from draftree.serve.tools.deltas import CallDelta, ReasoningDelta, TextDelta
from draftree.serve.tools.plan import ToolPlan

__all__ = ["ResponseWriter"]

Event = dict[str, Any]
REPORT = "response.draftree"
"""Event with the pieces and rounds of an update; only if the request asks for them."""
TEXT_PART = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
REASONING_PART = {"type": "reasoning_text", "text": ""}


@final
class ResponseWriter:
    """Output items of one response, and the events that describe their changes. Mutated by `read` and `finish`.

    Args:
        body: the request.
        head: identity of the response.
        job: its text.
        plan: its tools.
    """

    def __init__(self, body: ResponsesBody, head: Head, job: Job, *, plan: ToolPlan) -> None:
        self._body, self._head, self._job, self._plan = body, head, job, plan
        self._parser = plan.parser(job.options.reasoning)
        self._start = AnswerStart(job.options.reasoning, job.served.texts)
        self._report = Report(job, body)
        self._output: list[dict[str, Any]] = []
        self._is_open = False
        self._num_events = 0
        self._end: dict[str, Any] = {}

    def start(self) -> list[Event]:
        """Return the first events."""
        return [self._event(kind, response=self.response()) for kind in ("response.created", "response.in_progress")]

    def read(self, found: ChoiceUpdate) -> list[Event]:
        """Return the events of an update."""
        update = found.update
        events = self._report_events(found)
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
        """Return the last events of a text that ended for this reason."""
        is_cut = finish_reason == "length"
        events = [] if self._output else self._open_message()
        events += self._close("incomplete" if is_cut else "completed")
        self._end = {"status": "incomplete" if is_cut else "completed"}
        if is_cut:
            self._end["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self._end["completed_at"] = max(int(time.time()), self._head.created)  # the clock may have been set back
        self._end |= {"usage": self._usage(), **self._statistics()}
        return [*events, self._event(f"response.{self._end['status']}", response=self.response())]

    def fail(self, error: ApiError) -> list[Event]:
        """Return the last events of a text that failed."""
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        events = self._close("incomplete")
        self._end = {"status": "failed", "error": {"code": code, "message": error.message}}
        return [*events, self._event("response.failed", response=self.response())]

    def response(self) -> dict[str, Any]:
        """Return the response object as it is now."""
        body = self._body
        model = self._head.model.llm.llm
        sampling = model.requests.resolved(self._job.params).sampling
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
            "tools": [self._tool(tool) for tool in body.tools or []],
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

    @staticmethod
    def _tool(tool: dict[str, Any]) -> dict[str, Any]:
        return {"description": None, "parameters": None, "strict": False} | tool

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
            events = self._open_text(f"rs_{uuid.uuid4().hex}", {"type": "reasoning", "summary": []}, REASONING_PART)
        self._output[-1]["content"][0]["text"] += text
        where = {**self._place, "content_index": 0}
        return [*events, self._event("response.reasoning_text.delta", **where, delta=text)]

    def _open_message(self) -> list[Event]:
        return self._open_text(f"msg_{uuid.uuid4().hex}", {"type": "message", "role": "assistant"}, TEXT_PART)

    def _open_text(self, name: str, item: dict[str, Any], empty: dict[str, Any]) -> list[Event]:
        """Open an item with one part, and return the events."""
        events = self._open(name, {**item, "content": []})
        part = _copy(empty)
        self._output[-1]["content"] = [part]
        where = {**self._place, "content_index": 0}
        return [*events, self._event("response.content_part.added", **where, part=_copy(part))]

    def _call(self, delta: CallDelta) -> list[Event]:
        events: list[Event] = []
        if delta.name is not None:
            item = {"type": "function_call", "call_id": delta.id, "name": delta.name, "arguments": ""}
            events = self._open(f"fc_{uuid.uuid4().hex}", item)
        if delta.arguments:
            self._output[-1]["arguments"] += delta.arguments
            kind = "response.function_call_arguments.delta"
            events.append(self._event(kind, **self._place, delta=delta.arguments))
        return events

    def _open(self, name: str, item: dict[str, Any]) -> list[Event]:
        events = self._close("completed")
        self._output.append({"id": name, **item, "status": "in_progress"})
        self._is_open = True
        added = self._event(
            "response.output_item.added", output_index=len(self._output) - 1, item=dict(self._output[-1])
        )
        return [*events, added]

    def _close(self, status: str) -> list[Event]:
        """Return the last events of the open item; none if all items are complete."""
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

    def _report_events(self, found: ChoiceUpdate) -> list[Event]:
        report = self._report.part(found)
        if self._report.is_wanted and not self._body.stream:
            self._report.add(found)
        return [self._event(REPORT, draftree=report)] if report else []

    def _statistics(self) -> dict[str, Any]:
        metrics = metrics_json(self._job)
        report = self._report.fields(self._job.completions())
        return {**({} if metrics is None else {"metrics": metrics}), **report}

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
