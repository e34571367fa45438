"""Conversion of prompts to token ids on other threads, so that the event loop stays free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, final

from draftree.arguments import Messages, Prompt
from draftree.engine.openings import DecoderPrompt
from draftree.prompts import DecoderOptions, PromptEncoder
from draftree.text.fill_in import SourceFile
from draftree.text.tokenizer import Tokenizer

LONG = 50_000
"""Characters or token ids from which a prompt is long: it takes tens of milliseconds."""


@final
class AsyncPromptEncoder:
    """A `PromptEncoder` for asyncio.

    Long prompts are encoded one after the other, on a thread with a tokenizer of its own: others do not wait for them.

    Args:
        encoder: the encoder.
    """

    def __init__(self, encoder: PromptEncoder) -> None:
        self._encoder = encoder
        self._long_prompts = ThreadPoolExecutor(1, thread_name_prefix="draftree-long-prompts")

    async def encode(
        self, prompt: Prompt | Messages, *, source_lang: str | None = None, most: int | None = None
    ) -> list[int]:
        """Return the token ids of a prompt; messages are formatted by the model's chat template.

        Args:
            prompt: the prompt.
            source_lang: as in `DecoderOptions`.
            most: as for `PromptEncoder.encode`.

        Raises:
            InvalidRequestError: an invalid prompt.
        """
        return await self._run(
            is_long(prompt), lambda encoder: encoder.encode(prompt, source_lang=source_lang, most=most)
        )

    async def encode_chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        most: int | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation, formatted by the model's chat template.

        Args:
            messages: the conversation.
            tools: functions that the model may call, in OpenAI's form.
            template_kwargs: further variables of the template.
            add_generation_prompt: append the header of the assistant's answer.
            continue_final_message: leave the last message, one of the assistant, open to be continued.
            most: as for `PromptEncoder.encode`.

        Raises:
            InvalidRequestError: a conversation, tools or variables that the template cannot take.
        """
        given: dict[str, Any] = {"tools": tools, "template_kwargs": template_kwargs, "most": most}

        def encode(encoder: PromptEncoder) -> list[int]:
            if continue_final_message:
                return encoder.encode_open_chat(messages, **given)
            return encoder.encode_chat(messages, **given, add_generation_prompt=add_generation_prompt)

        return await self._run(is_long(messages, tools, template_kwargs), encode)

    async def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, as `PromptEncoder.encode_text`."""
        return await self._run(
            is_long(text), lambda encoder: encoder.encode_text(text, add_special_tokens=add_special_tokens)
        )

    async def encode_gap(
        self, before: str, after: str, *, files: Sequence[SourceFile] = (), most: int | None = None
    ) -> list[int]:
        """Return the token ids of a prompt with a gap, as `PromptEncoder.encode_gap`."""
        return await self._run(
            is_long(before, after, *(file.text for file in files)),
            lambda encoder: encoder.encode_gap(before, after, files=files, most=most),
        )

    async def encode_start(self, decoder: DecoderOptions) -> DecoderPrompt | None:
        """Return what a decoder continues, as `PromptEncoder.encode_start`."""
        found: DecoderPrompt | None = await self._run(
            is_long(decoder.get("decoder_prompt")), lambda encoder: encoder.encode_start(decoder)
        )
        return found

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids; bytes that form no character become U+FFFD.

        Raises:
            InvalidRequestError: the model has no tokenizer, or an id is outside the vocabulary.
        """
        return await self._run(len(ids) >= LONG, lambda encoder: encoder.decode(ids, skip_special_tokens))

    async def with_tokenizer(self, action: Callable[[Tokenizer | None], Any]) -> Any:
        """Run an action that uses the tokenizer, on a thread."""
        return await self._run(False, lambda encoder: action(encoder.tokenizer))

    async def _run(self, is_long: bool, action: Callable[[PromptEncoder], Any]) -> Any:
        if is_long:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._long_prompts, lambda: action(self._encoder_of_long_prompts))
        return await asyncio.to_thread(action, self._encoder)

    @cached_property
    def _encoder_of_long_prompts(self) -> PromptEncoder:
        return self._encoder.twin()


def is_long(*values: Any) -> bool:
    """Return whether the texts in values have `LONG` characters or more; keys and numbers count as one each."""
    size = 0
    todo = list(values)
    while todo and size < LONG:
        value = todo.pop()
        size += len(value) if isinstance(value, str) else 1
        if isinstance(value, Mapping):
            size += len(value)
            todo += value.values()
        elif isinstance(value, list | tuple):
            todo += value
    return size >= LONG
