"""Conversion of prompts and conversations to token ids, and of token ids to text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar, final

from draftree.core.errors import InvalidRequestError, blaming
from draftree.engine.sequence import DecoderPrompt
from draftree.models.base import LanguageModel
from draftree.models.images import ImageProcessor, ImagePrompt
from draftree.models.source import EncoderDecoder
from draftree.options import (
    Messages,
    Prompt,
    RequestOptions,
    TextPrompt,
    WholeStart,
    is_id,
    is_row,
    require_keys,
    require_one_prompt,
    shown_value,
)
from draftree.sampling.params import require_length
from draftree.text.chat.images import PlacedImage
from draftree.text.chat.messages import has_images
from draftree.text.fill_in import FillIn, SourceFile
from draftree.text.languages import language_token
from draftree.text.tokenizer import Tokenizer, too_long

T = TypeVar("T")
MAX_DECODER_PROMPT = 2**18  # characters or token ids


class PromptEncoder:
    """Encoder of the prompts of one model.

    Args:
        tokenizer: the target's tokenizer, None if it has none.
        vocab_size: number of token ids of the model.
        allow_control_tokens: whether control tokens in messages are encoded as such.
        decoder_start: tokens before every text of an encoder-decoder model; None for causal models.
        images: the processor of prompts with images; None if the model reads no images.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        *,
        allow_control_tokens: bool = False,
        decoder_start: Sequence[int] | None = None,
        images: ImageProcessor | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.images = images
        self._vocab_size = vocab_size
        self._decoder_start = decoder_start
        self.allow_control_tokens = allow_control_tokens

    def encode(
        self, prompt: Prompt | Messages, *, source_lang: str | None = None, most: int | None = None
    ) -> Sequence[int]:
        """Encode a text, a list of token ids, a text with images, or the messages of a conversation.

        Args:
            prompt: the prompt.
            source_lang: as in `RequestOptions`; for texts only.
            most: number of tokens beyond which a long prompt is refused without encoding it all; None for any.

        Raises:
            InvalidRequestError: an empty or malformed prompt, or one that is too long.
        """
        if isinstance(prompt, Sequence) and len(prompt) and isinstance(prompt[0], Mapping):
            return self.encode_chat(prompt, source_lang=source_lang, most=most)  # type: ignore[arg-type]
        require_one_prompt(prompt)
        return self.encode_prompt(prompt, source_lang=source_lang, most=most)  # type: ignore[arg-type]

    def twin(self) -> PromptEncoder:
        """Return an equal encoder that another thread may use at the same time."""
        return PromptEncoder(
            None if self.tokenizer is None else self.tokenizer.twin(),
            self._vocab_size,
            allow_control_tokens=self.allow_control_tokens,
            decoder_start=self._decoder_start,
            images=self.images,
        )

    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode a text, which may be empty.

        Args:
            text: the text.
            add_special_tokens: add the tokens that the model expects around a prompt, such as BOS.

        Raises:
            InvalidRequestError: no tokenizer, or a text that is not valid Unicode.
        """
        return self._require_tokenizer("a text", "text").encode(text, add_special_tokens)

    def _require_tokenizer(self, what: str, param: str | None = None, *, advice: str = "give token ids") -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequestError(f"{what} needs a tokenizer, and this model has none: {advice}", param=param)
        return self.tokenizer

    def encode_gap(
        self, before: str, after: str, *, files: Sequence[SourceFile] = (), most: int | None = None
    ) -> list[int]:
        """Encode a prompt with a gap for fill-in-the-middle.

        Args:
            before: the text before the gap.
            after: the text after it.
            files: other files, read before.
            most: as for `encode`.

        Raises:
            InvalidRequestError: a tokenizer without the tokens, or a prompt that is too long.
        """
        tokenizer = self._require_tokenizer("a prompt with a gap", "suffix")
        if most is not None:
            for text in (before, after, *(file.text for file in files)):
                tokenizer.require_fit(text, most)
        return FillIn(tokenizer).encode(before, after, files)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of token ids.

        Raises:
            InvalidRequestError: there is no tokenizer, or an id is outside the vocabulary.
        """
        tokenizer = self._require_tokenizer("decoding", "ids", advice="read the token ids")
        return tokenizer.decode(self._checked_ids(ids, "ids"), skip_special_tokens)

    def encode_chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        source_lang: str | None = None,
        most: int | None = None,
    ) -> Sequence[int]:
        """Encode a conversation with the model's chat template; the other arguments as `Tokenizer.apply_chat_template`.

        A language of the source is refused.

        Raises:
            InvalidRequestError: malformed messages, no template, or control tokens in a message that cannot be spelled.
        """
        self._require_text(source_lang, kind="a conversation")
        with blaming("messages"):
            tokenizer = self._require_tokenizer("a conversation")
            is_with_images = has_images(messages)
            images = self._require_images() if is_with_images else None
            encode: Callable[..., Any] = tokenizer.chat_with_images if is_with_images else tokenizer.apply_chat_template
            encoded = encode(
                messages,
                tools=tools,
                template_kwargs=template_kwargs,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                allow_control_tokens=self.allow_control_tokens,
                most=most,
            )
            return encoded if images is None else images.prompt(*encoded)

    def _require_images(self) -> ImageProcessor:
        if self.images is None:
            raise InvalidRequestError("the prompt has an image, but this model reads no images: remove it")
        return self.images

    def encode_prompt(
        self, prompt: Prompt, *, source_lang: str | None = None, most: int | None = None
    ) -> Sequence[int]:
        """Encode a text, or a text with images, or check a list of token ids.

        Args:
            prompt: the prompt.
            source_lang: as in `RequestOptions`.
            most: as for `encode`.

        Raises:
            InvalidRequestError: an empty prompt, ids outside the vocabulary, or too many of them.
        """
        with blaming("prompt"):
            if not self._vocab_size:
                raise InvalidRequestError("the prompt is text, and this model reads features of sound: use transcribe")
            if isinstance(prompt, ImagePrompt):
                return prompt
            if isinstance(prompt, Mapping):
                self._require_text(source_lang, kind="images")
                require_keys(prompt)
                images = [PlacedImage(image, f"prompt.images[{n}]") for n, image in enumerate(prompt["images"])]
                return self._require_images().prompt(prompt["text"], images)
            if isinstance(prompt, str):
                tokenizer = self._require_tokenizer("a text")
                if most is not None:
                    tokenizer.require_fit(prompt, most)
                if source_lang is None or not prompt:
                    ids = tokenizer.encode(prompt) if prompt else []
                else:
                    self._require_encoder("source_lang")
                    ids = tokenizer.encode_in(source_lang, prompt)
            elif is_row(prompt):
                self._require_text(source_lang, kind="token ids")
                ids = list(prompt)
                if most is not None and len(ids) > 2 * most:
                    raise too_long(f"has {len(ids)} tokens", most)
            else:
                raise InvalidRequestError(f"the prompt is {shown_value(prompt)}: give a text, or a list of token ids")
            if not ids:
                raise InvalidRequestError("the prompt is empty: give at least one character or token")
            return self._checked_ids(ids, "prompt")

    def _require_encoder(self, param: str) -> Sequence[int]:
        """Return the decoder's start tokens."""
        if self._decoder_start is None:
            raise InvalidRequestError(
                f"{param} is for encoder-decoder models, and this model is causal: give the whole text as prompt",
                param=param,
            )
        return self._decoder_start

    def _require_text(self, source_lang: str | None, *, kind: str) -> None:
        if source_lang is not None:
            self._require_encoder("source_lang")
            raise InvalidRequestError(
                f"source_lang was given with {kind}, and states the language of a text: give a text, or leave it out",
                param="source_lang",
            )

    def encode_start(self, options: RequestOptions) -> DecoderPrompt | None:
        """Return what the decoder continues by `decoder_prompt` and `target_lang`; None for the model's own start.

        A text is encoded without the tokens that a tokenizer adds around a prompt. In models whose start token is
        itself the token of a language, such as mBART, the target language takes its place.

        Raises:
            InvalidRequestError: a causal model, no tokenizer, an empty text, ids that are no token ids, or an unknown
                language.
        """
        prompt = options.decoder_prompt
        target_lang = options.target_lang
        if isinstance(prompt, WholeStart):
            self._require_encoder("decoder_prompt")
            return prompt
        ids = None if prompt is None else self._decoder_ids(prompt)
        if target_lang is None:
            return ids
        start = self._require_encoder("target_lang")
        tokenizer = self._require_tokenizer(
            "target_lang", "target_lang", advice="give the token of the language as decoder_prompt"
        )
        languages = tokenizer.languages
        token = language_token(languages, target_lang, param="target_lang", name=tokenizer.name)
        if start and start[-1] in languages.values():
            return WholeStart([*start[:-1], token, *(ids or ())])
        return [token, *(ids or ())]

    def with_start(self, options: RequestOptions) -> RequestOptions:
        """Return the options with what the decoder continues as token ids, as `SequenceFactory` needs it."""
        if options.decoder_prompt is None and options.target_lang is None:
            return options
        return replace(options, decoder_prompt=self.encode_start(options), target_lang=None)

    def _decoder_ids(self, prompt: TextPrompt) -> list[int]:
        self._require_encoder("decoder_prompt")
        require_length("decoder_prompt", prompt, MAX_DECODER_PROMPT, "characters or tokens")
        ids: list[Any] = list(prompt) if is_row(prompt) else []
        if isinstance(prompt, str):
            ids = self.encode_text(prompt, add_special_tokens=False)
        if not ids or not all(map(is_id, ids)):
            raise InvalidRequestError(
                f"decoder_prompt is {shown_value(prompt)}: give a text or token ids, at least one",
                param="decoder_prompt",
            )
        return [int(token) for token in ids]

    def _checked_ids(self, ids: Sequence[Any], param: str) -> list[int]:
        for token in ids:
            if isinstance(token, bool) or not is_id(token):
                raise InvalidRequestError(
                    f"a {param} of token ids must hold whole numbers, got {shown_value(token)}", param=param
                )
            if not 0 <= token < self._vocab_size:
                raise InvalidRequestError(
                    f"the {param} holds token {token}, but the vocabulary ends at {self._vocab_size - 1}", param=param
                )
        return [int(token) for token in ids]


def encoder_of(
    model: LanguageModel,
    tokenizer: Tokenizer | None,
    *,
    allow_control_tokens: bool,
    images: ImageProcessor | None = None,
) -> PromptEncoder:
    """Return the encoder of a model's prompts, which are sources if it is an encoder-decoder model."""
    size = model.vocab_size
    start = None
    if isinstance(model, EncoderDecoder):
        size = model.source_vocab_size
        start = model.rules.start_ids
    return PromptEncoder(tokenizer, size, allow_control_tokens=allow_control_tokens, decoder_start=start, images=images)


LONG = 50_000  # characters or token ids from which a prompt is long: it takes tens of milliseconds


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
    ) -> Sequence[int]:
        """Return the token ids of a prompt; messages are formatted by the model's chat template.

        Args:
            prompt: the prompt.
            source_lang: as in `RequestOptions`.
            most: as for `PromptEncoder.encode`.

        Raises:
            InvalidRequestError: an invalid prompt.
        """
        return await self._run(is_long(prompt), PromptEncoder.encode, prompt, source_lang=source_lang, most=most)

    async def encode_chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        most: int | None = None,
    ) -> Sequence[int]:
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
        return await self._run(
            is_long(messages, tools, template_kwargs),
            PromptEncoder.encode_chat,
            messages,
            tools=tools,
            template_kwargs=template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            most=most,
        )

    async def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, as `PromptEncoder.encode_text`."""
        return await self._run(is_long(text), PromptEncoder.encode_text, text, add_special_tokens=add_special_tokens)

    async def encode_gap(
        self, before: str, after: str, *, files: Sequence[SourceFile] = (), most: int | None = None
    ) -> list[int]:
        """Return the token ids of a prompt with a gap, as `PromptEncoder.encode_gap`."""
        is_long_gap = is_long(before, after, *(file.text for file in files))
        return await self._run(is_long_gap, PromptEncoder.encode_gap, before, after, files=files, most=most)

    async def encode_start(self, options: RequestOptions) -> DecoderPrompt | None:
        """Return what a decoder continues, as `PromptEncoder.encode_start`."""
        return await self._run(is_long(options.decoder_prompt), PromptEncoder.encode_start, options)

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids; bytes that form no character become U+FFFD.

        Raises:
            InvalidRequestError: the model has no tokenizer, or an id is outside the vocabulary.
        """
        return await self._run(len(ids) >= LONG, PromptEncoder.decode, ids, skip_special_tokens)

    async def with_tokenizer(self, action: Callable[[Tokenizer | None], Any]) -> Any:
        """Run an action that uses the tokenizer, on a thread."""
        return await self._run(False, lambda encoder: action(encoder.tokenizer))

    async def _run(self, is_long: bool, action: Callable[..., T], *args: Any, **options: Any) -> T:
        if is_long:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(
                self._long_prompts, lambda: action(self._encoder_of_long_prompts, *args, **options)
            )
        return await asyncio.to_thread(action, self._encoder, *args, **options)

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
