"""Request bodies of /tokenize and /detokenize, in vLLM's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from draftree.serve.schema.chat import Message
from draftree.serve.schema.common import Body, Items, TokenId
from draftree.serve.schema.elsewhere import Effect, ignored, refused


class TokenizeBody(Body):
    """A text or a conversation to encode."""

    elsewhere: ClassVar[Mapping[str, Effect]] = {
        "chat_template": refused("templates of clients are not run"),
        "mm_processor_kwargs": ignored("only text is supported", {}),
    }
    model: str | None = Field(None, description="name or alias of a served model; may be left out if there is one")
    prompt: str | None = None
    messages: Items[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = Field(
        None, description="of a prompt: true by default; of messages: false, since the template writes them"
    )
    add_generation_prompt: bool | None = Field(None, description="of messages: true by default")
    continue_final_message: bool | None = Field(None, description="leave the last message open")
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Items[dict[str, Any]] | None = None
    return_token_strs: bool | None = False

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either 'prompt' or 'messages'")
        return self


class DetokenizeBody(Body):
    """Token ids to decode."""

    model: str | None = Field(None, description="name or alias of a served model; may be left out if there is one")
    tokens: Items[TokenId]
