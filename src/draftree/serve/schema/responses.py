"""Request body of /v1/responses."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from draftree.serve.schema.common import NO_BEAMS, NOT_SUPPORTED, Body, Refused, SamplingBody

LOGPROBS = "message.output_text.logprobs"


class TextFormat(Body):
    """Format of the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, min_length=1, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """Options of the text."""

    refused: ClassVar[Refused] = {"verbosity": (("medium",), "the models have no such setting")}
    format: TextFormat | None = None


class ResponsesBody(SamplingBody):
    """A conversation to continue, in items."""

    refused: ClassVar[Refused] = {
        **NOT_SUPPORTED,
        **NO_BEAMS,
        "n": ((1,), "send one request for each text"),
        "max_tokens": ((), "use 'max_output_tokens'"),
        "response_format": ((), "use 'text'"),
        "messages": ((), "use 'input'"),
        "logprobs": ((False,), f"use 'include' with \"{LOGPROBS}\""),
        "prompt_logprobs": ((), "use /v1/completions"),
        "return_token_ids": ((False,), "use /v1/chat/completions"),
        "store": ((False,), "the server stores no responses"),
        "previous_response_id": ((), "the server stores no responses: send the whole conversation as 'input'"),
        "conversation": ((), "the server stores no conversations: send the whole conversation as 'input'"),
        "prompt": ((), "the server stores no prompts: use 'instructions' and 'input'"),
        "background": ((False,), "keep the connection open, or use 'stream'"),
        "reasoning": (({},), "the models have no such setting"),
        "truncation": (("disabled",), "shorten 'input'"),
        "max_tool_calls": ((), "the server runs no tools"),
        "context_management": (([],), "shorten 'input'"),
        "prompt_cache_retention": ((), "cached prefixes are kept while there is room"),
        "prompt_cache_options": ((), "cached prefixes are kept while there is room"),
        "moderation": ((), "the server moderates nothing"),
    }
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the text comes with log-probabilities."""
        return bool(self.include)
