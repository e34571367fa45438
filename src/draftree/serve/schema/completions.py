"""Request body of /v1/completions."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from draftree.serve.schema.common import MAX_LOGPROBS, NOT_SUPPORTED, BeamBody, Refused, TokenId


class CompletionBody(BeamBody):
    """Prompts to continue."""

    refused: ClassVar[Refused] = {
        **NOT_SUPPORTED,
        "suffix": (("",), "give the whole text as 'prompt'"),
        "prompt_embeds": ((), "give texts or token ids as 'prompt'"),
        "messages": ((), "use /v1/chat/completions"),
    }
    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    echo: bool | None = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, one for each text or row of ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)
