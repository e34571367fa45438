"""Conversion of prompts to token ids on other threads, so that the event loop stays free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

from draftree.arguments import Messages, Prompt
from draftree.engine.openings import DecoderPrompt
from draftree.prompts import DecoderOptions, PromptEncoder
from draftree.text.tokenizer import Tokenizer


@final
class AsyncPromptEncoder:
    """A `PromptEncoder` for asyncio.

    Args:
        encoder: the encoder.
        lock: held while the encoder is used; tokenizers are not safe for concurrent use.
    """

    def __init__(self, encoder: PromptEncoder, lock: AbstractContextManager[Any]) -> None:
        self._encoder, self._lock = encoder, lock

    async def encode(self, prompt: Prompt | Messages, *, source_lang: str | None = None) -> list[int]:
        """Return the token ids of a prompt; messages are formatted by the model's chat template.

        `source_lang` is as in `DecoderOptions`.

        Raises:
            InvalidRequestError: an invalid prompt.
        """
        return await self._run(self._encoder.encode, prompt, source_lang=source_lang)

    async def encode_chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Return the token ids of a conversation, formatted by the model's chat template.

        Args:
            messages: the conversation.
            tools: functions that the model may call, in OpenAI's form.
            template_kwargs: further variables of the template.
            add_generation_prompt: append the header of the assistant's answer.
            continue_final_message: leave the last message, one of the assistant, open to be continued.

        Raises:
            InvalidRequestError: a conversation, tools or variables that the template cannot take.
        """
        given: dict[str, Any] = {"tools": tools, "template_kwargs": template_kwargs}
        if continue_final_message:
            return await self._run(self._encoder.encode_open_chat, messages, **given)
        return await self._run(
            self._encoder.encode_chat, messages, **given, add_generation_prompt=add_generation_prompt
        )

    async def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, as `PromptEncoder.encode_text`."""
        return await self._run(self._encoder.encode_text, text, add_special_tokens=add_special_tokens)

    async def encode_start(self, decoder: DecoderOptions) -> DecoderPrompt | None:
        """Return what a decoder continues, as `PromptEncoder.encode_start`."""
        found: DecoderPrompt | None = await self._run(self._encoder.encode_start, decoder)
        return found

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids; bytes that form no character become U+FFFD.

        Raises:
            InvalidRequestError: the model has no tokenizer, or an id is outside the vocabulary.
        """
        return await self._run(self._encoder.decode, ids, skip_special_tokens)

    async def with_tokenizer(self, action: Callable[[Tokenizer | None], Any]) -> Any:
        """Run an action that uses the tokenizer, on a thread and while nothing else uses it."""
        return await self._run(action, self._encoder.tokenizer)

    async def _run(self, action: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        def locked() -> Any:
            with self._lock:
                return action(*args, **kwargs)

        return await asyncio.to_thread(locked)
