"""Request body of /v1/chat/completions."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from draftree.serve.schema.common import MAX_LOGPROBS, NOT_SUPPORTED, BeamBody, Body, Refused


class TextPart(Body):
    """A text part of a message. Parts of other types are refused."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One message of a conversation."""

    refused: ClassVar[Refused] = {
        "audio": ((), "only text is supported"),
        "refusal": ((), "send it as 'content'"),
        "function_call": ((), "use 'tool_calls'"),
        "annotations": (([],), "only text is supported"),
        "reasoning": (("",), "send it as a part of 'content'"),
        "reasoning_content": (("",), "send it as a part of 'content'"),
    }
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatBody(BeamBody):
    """A conversation to continue."""

    refused: ClassVar[Refused] = {
        **NOT_SUPPORTED,
        "modalities": ((["text"],), "only text is supported"),
        "audio": ((), "only text is supported"),
        "store": ((False,), "the server stores no conversations"),
        "web_search_options": ((), "the server has no web search"),
        "functions": (([],), "use 'tools'"),
        "function_call": (("none", "auto"), "use 'tool_choice'"),
        "reasoning_effort": ((), "the models have no such setting"),
        "verbosity": ((), "the models have no such setting"),
        "moderation": ((), "the server moderates nothing"),
        "prompt_cache_retention": ((), "cached prefixes are kept while there is room"),
        "prompt_cache_options": (({},), "cached prefixes are kept while there is room"),
        "chat_template": ((), "templates of clients are not run"),
        "documents": (([],), "put the documents into a message"),
        "media_io_kwargs": (({},), "only text is supported"),
        "include_reasoning": ((True,), "the text is returned as it is"),
        "echo": ((False,), "use /v1/completions"),
    }
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
