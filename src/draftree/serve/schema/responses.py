"""Request body of /v1/responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field

from draftree.core.errors import suggestion
from draftree.serve.notes import note
from draftree.serve.schema.common import Body, Items, SamplingBody, ServiceTier
from draftree.serve.schema.elsewhere import RESPONSES, SHARED, Effect, ignored, refused

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
        """Whether the text comes with log-probabilities."""
        return LOGPROBS in (self.include or ())
