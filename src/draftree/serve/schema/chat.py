"""Request body of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from draftree.serve.schema.common import MAX_LOGPROBS, BeamBody, Body, Items, ServiceTier
from draftree.serve.schema.elsewhere import CHAT, SHARED, Effect, ignored, refused


class TextPart(Body):
    """A text part of a message. Parts of other types are refused."""

    elsewhere: ClassVar[Mapping[str, Effect]] = {
        "annotations": ignored("a text part is its text", []),
        "cache_control": ignored("prefixes are cached without it"),
        "prompt_cache_breakpoint": ignored("prefixes are cached without it"),
    }
    type: Literal["text"]
    text: str


class Message(Body):
    """One message of a conversation; its role and its further fields are those of the chat template."""

    elsewhere: ClassVar[Mapping[str, Effect]] = {
        "audio": refused("only text is supported"),
        "refusal": refused("send it as 'content'"),
        "function_call": refused("use 'tool_calls'"),
        "annotations": ignored("only the text of a message is read", []),
        "cache_control": ignored("prefixes are cached without it"),
    }
    model_config = ConfigDict(extra="allow")

    role: str = Field(min_length=1, max_length=64)
    content: str | Items[TextPart] | None = None
    name: str | None = None
    tool_calls: Items[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    @classmethod
    def _take_unknown(cls, name: str, value: Any, kept: dict[str, Any]) -> None:
        """Keep the field: the chat template may read it."""
        kept[name] = value


class ChatBody(BeamBody):
    """A conversation to continue."""

    elsewhere: ClassVar[Mapping[str, Effect]] = {**SHARED, **CHAT}
    messages: Items[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=-1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = Field(
        None, max_length=32, description="for chat templates that read it, or a switch"
    )
    enable_thinking: bool | None = Field(None, description="for chat templates with a switch for reasoning")
    include_reasoning: bool | None = Field(None, description="whether the response has the reasoning; true by default")
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    service_tier: ServiceTier | None = None
