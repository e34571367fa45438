"""Request body of /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from draftree.serve.schema.common import MAX_LOGPROBS, BeamBody, Items, TokenId
from draftree.serve.schema.elsewhere import COMPLETIONS, SHARED, Effect


class CompletionBody(BeamBody):
    """Prompts to continue."""

    elsewhere: ClassVar[Mapping[str, Effect]] = {**SHARED, **COMPLETIONS}
    prompt: str | Items[str] | Items[TokenId] | Items[Items[TokenId]]
    suffix: str | None = Field(None, description="text after the gap, for models with fill-in-the-middle")
    echo: bool | None = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, one for each text or row of ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)
