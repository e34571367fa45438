"""Conversion of text and conversations to token ids and back."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from draftree.core.errors import (
    DraftreeError,
    InvalidRequestError,
    ModelLoadError,
    PromptTooLongError,
    TokenizerError,
    panics_as_errors,
)
from draftree.core.files import get_again, refusal
from draftree.text.backend import MAX_TOKENS, check_tokenizer_files
from draftree.text.chat.images import PlacedImage
from draftree.text.chat.literal import LiteralEncoder
from draftree.text.chat.messages import MESSAGE_KEYS, Conversation, Messages, conversation_of, require_unicode
from draftree.text.languages import language_token, languages_of, reading
from draftree.text.streams import TextScheme, bytes_by_token, choose_scheme

VOCABULARY_FILES = ("tokenizer.json", "*.model", "*.tiktoken", "tekken.json", "vocab.json", "vocab.txt")
SETTINGS_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


PROBE_TEXT = "draftree"  # a message that shows whether a chat template writes it
CHARS_PER_TOKEN = 16
"""Most texts have fewer; of those that have more, more is encoded before they are refused as too long."""

_locks: WeakKeyDictionary[Any, threading.RLock] = WeakKeyDictionary()  # the lock of each backend


class Tokenizer:
    """A transformers tokenizer with exact text: nothing is cleaned up, truncated or padded. Thread-safe.

    `backend`: a tokenizer object of transformers, or an object with the same interface. `full`: returns the tokenizer
    object of transformers; None if the backend is one.
    """

    def __init__(self, backend: Any, *, name: str = "this model", full: Callable[[], Any] | None = None) -> None:
        self._backend = backend
        self._full = full
        self.name = name
        self._schemes: dict[bool, TextScheme] = {}
        # settings of the backend change from call to call, and others may wrap the same backend
        self._lock = _locks.setdefault(backend, threading.RLock())

    @classmethod
    def load(cls, folder: str | Path, *, trust_remote_code: bool = False) -> Tokenizer | None:
        """Load the tokenizer of a model folder; None if the folder has no tokenizer files.

        Only tokenizers with a vocabulary file are supported. Python code of the folder is run only with
        `trust_remote_code`.
        """
        folder = Path(folder)
        if not _holds(folder, VOCABULARY_FILES):
            if not _holds(folder, SETTINGS_FILES):
                return None
            raise _broken(folder, "there are settings, but no vocabulary file such as tokenizer.json")
        from transformers import AutoTokenizer

        try:
            check_tokenizer_files(folder)
            with panics_as_errors():
                backend = AutoTokenizer.from_pretrained(
                    str(folder), local_files_only=True, trust_remote_code=trust_remote_code
                )
                tokenizer = cls(backend, name=folder.name)
                largest = max(tokenizer._tokens, default=None)
        except Exception as error:  # the libraries below raise bare Exception for a damaged file
            if "trust_remote_code" in str(error) and (why := refusal(folder)):
                raise ModelLoadError(f"The tokenizer in {why}.") from error
            raise _broken(folder, _first_line(error)) from error
        if largest is None:
            raise _broken(folder, "the vocabulary is empty")
        if largest >= MAX_TOKENS:
            raise _broken(folder, f"a token has the id {largest}, and ids are below {MAX_TOKENS}")
        return tokenizer

    @property
    def backend(self) -> Any:
        """The tokenizer object of transformers, for use in transformers."""
        return self._backend if self._full is None else self._full()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode a text; `add_special_tokens` adds what a model expects around a plain prompt (such as BOS)."""
        if not isinstance(text, str):
            raise InvalidRequestError(
                f"A prompt must be text, but this one is of type {type(text).__name__}: pass a str."
            )
        require_unicode(text, "The prompt")
        return self._encode(text, add_special_tokens=add_special_tokens)

    def _encode(self, text: str, **options: bool) -> list[int]:
        with self._lock, self._working("encode this text"):
            return [int(i) for i in self._backend.encode(text, verbose=False, **options)]

    def require_fit(self, text: str, most: int) -> None:
        """Raise if a text clearly has too many tokens. Unlike `encode`, this takes time for that many tokens only.

        Longer and longer beginnings of the text are encoded. A beginning with twice as many tokens as allowed leaves no
        doubt: what follows can only merge its last tokens.
        """
        num_chars = CHARS_PER_TOKEN * most
        while num_chars < len(text):
            if len(self.encode(text[:num_chars], add_special_tokens=False)) > 2 * most:
                raise too_long(f"has more than {2 * most} tokens", most)
            num_chars *= 2

    def twin(self) -> Tokenizer:
        """Return an equal tokenizer that another thread may use at the same time."""
        with self._lock:
            return Tokenizer(copy.deepcopy(self._backend), name=self.name, full=self._full)

    def encode_in(self, language: str, text: str) -> list[int]:
        """Encode a text with the tokens that a multilingual model expects around a prompt in this language."""
        language_token(self.languages, language, param="source_lang", name=self.name)
        with self._lock, reading(self.backend, language):
            return self.encode(text)

    @cached_property
    def languages(self) -> dict[str, int]:
        """The token of each language of a multilingual tokenizer, by its code; empty for others."""
        return languages_of(self.backend)

    def encode_literally(self, text: str) -> list[int]:
        """Encode plain text: a special token such as </s> in it is spelled."""
        return self._encode(text, add_special_tokens=False, split_special_tokens=True)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool) -> str:
        """Decode token ids exactly; bytes that form no character become U+FFFD."""
        with self._lock, self._working("decode these tokens"):
            return self._backend.decode(
                list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )

    @contextmanager
    def _working(self, task: str) -> Iterator[None]:
        """Turn any failure of the libraries, which raise bare `Exception` and panics, into a `TokenizerError`."""
        try:
            with panics_as_errors():
                yield
        except DraftreeError:
            raise
        except Exception as error:
            raise TokenizerError(
                f"the tokenizer of {self.name} cannot {task} ({_first_line(error)}): change the text, or get a version "
                "of the model whose tokenizer.json is intact"
            ) from error

    def apply_chat_template(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        allow_control_tokens: bool = False,
        most: int | None = None,
    ) -> list[int]:
        """Encode a conversation with the model's chat template.

        The template writes BOS if the model expects it, so none is added after it.

        `continue_final_message`: whether the last message, one of the assistant, is left open to be continued.
        `allow_control_tokens`: whether a control token in a message, such as <|im_end|>, is encoded as one; by default
        it is spelled as text. `most`: number of tokens beyond which a conversation is refused early, as by
        `require_fit`; None for any.
        """
        conversation, text = self._rendered(
            messages,
            tools=tools,
            template_kwargs=template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            most=most,
        )
        if conversation.images:
            raise InvalidRequestError(
                f"a message has an image, and {self.name} reads text: leave it out, or use a model that reads images"
            )
        if allow_control_tokens:
            return self.encode(text, add_special_tokens=False)
        with self._lock, self._working("encode this conversation"):
            return self._literal_encoder.ids(conversation, text)

    def chat_with_images(
        self, messages: Messages, *, allow_control_tokens: bool = False, **options: Any
    ) -> tuple[str, tuple[PlacedImage, ...]]:
        """Return the text of a conversation by the chat template, and its images, whose placeholders are in the text.

        Options are those of `apply_chat_template`.

        Raises:
            InvalidRequestError: as `apply_chat_template`; or a message has a control token, which might stand for an
                image.
        """
        conversation, text = self._rendered(messages, **options)
        if allow_control_tokens:
            return text, conversation.images
        with self._lock, self._working("encode this conversation"):
            is_plain = self._literal_encoder.ids(conversation, text) == self.encode(text, add_special_tokens=False)
        if not is_plain:
            raise InvalidRequestError(
                "a message has a control token, and the chat has images, so it cannot be spelled as text: change the "
                "message, or let allow_control_tokens=True read it as a control token"
            )
        return text, conversation.images

    def _rendered(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        most: int | None = None,
    ) -> tuple[Conversation, str]:
        if most is not None and isinstance(messages, Sequence) and len(messages) > most:
            raise too_long(f"has {len(messages)} messages, each of at least one token", most)
        conversation = conversation_of(
            messages,
            tools=tools,
            variables=template_kwargs,
            add_generation_prompt=add_generation_prompt,
            is_open=continue_final_message,
        )
        if not self.has_chat_template:
            raise InvalidRequestError(
                f"{self.name} has no chat template, so a chat cannot be encoded: "
                "give a plain prompt instead (on the command line: --no-chat)."
            )
        if conversation.tools or conversation.variables or conversation.keys - set(MESSAGE_KEYS):
            from draftree.text.chat.templates import require_read

            require_read(conversation, self.chat_template or "", self.name)
        if not self._reads_texts:
            conversation = conversation.in_parts()
        try:
            text = chat_text(self._backend, conversation)
        except InvalidRequestError:
            raise
        except Exception as error:  # a template is a program of the model's author and may raise anything
            raise InvalidRequestError(
                f"The chat template of {self.name} does not accept this conversation ({_first_line(error)}): "
                "change the messages, or give a plain prompt."
            ) from error
        if most is not None:
            self.require_fit(text, most)
        return conversation, text

    @cached_property
    def _reads_texts(self) -> bool:
        """Whether the chat template writes a content that is a text; some write lists of parts only."""

        def writes(conversation: Conversation) -> bool:
            try:
                return PROBE_TEXT in chat_text(self._backend, conversation)
            except Exception:  # a template is a program of the model's author and may raise anything
                return False

        probe = Conversation([{"role": "user", "content": PROBE_TEXT}], add_generation_prompt=False)
        return writes(probe) or not writes(probe.in_parts())

    @cached_property
    def _literal_encoder(self) -> LiteralEncoder:
        return LiteralEncoder(
            self.name,
            self._backend,
            encode=partial(self.encode, add_special_tokens=False),
            render=partial(chat_text, self._backend),
        )

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template; of several, the one for tools. None if there is none."""
        return str(self._backend.get_chat_template(tools=[{}])) if self.has_chat_template else None

    @property
    def template_variables(self) -> frozenset[str]:
        from draftree.text.chat.templates import variables_of

        return variables_of(self.chat_template or "")

    @property
    def template_uses_tools(self) -> bool:
        return "tools" in self.template_variables

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can work."""
        return bool(getattr(self._backend, "chat_template", None))

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own end-of-text token; a model may stop at others too."""
        return self._backend.eos_token_id

    @property
    def bos_token_id(self) -> int | None:
        return self._backend.bos_token_id

    @property
    def start_ids(self) -> list[int]:
        """The ids that `encode` adds before a text."""
        with_start, without = self.encode("a"), self.encode("a", add_special_tokens=False)
        place = next((i for i in range(len(with_start)) if with_start[i : i + len(without)] == without), 0)
        return with_start[:place]

    @property
    def ignored_ids(self) -> frozenset[int]:
        """Special tokens without text: padding and unknown."""
        # many name their end-of-text token as padding too
        known = {self._backend.pad_token_id, self._backend.unk_token_id} - {self.eos_token_id, None}
        return frozenset(int(i) for i in known)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids that `decode` leaves out if special tokens are skipped."""
        if self._backend.is_fast:
            return frozenset(int(i) for i, token in self._backend.added_tokens_decoder.items() if token.special)
        return frozenset(int(i) for i in self._backend.all_special_ids)

    @cached_property
    def added_tokens(self) -> dict[int, str]:
        """The written form of every added token, special or not, by id."""
        return {int(i): token.content for i, token in self._backend.added_tokens_decoder.items()}

    @cached_property
    def _tokens(self) -> dict[int, str]:
        # an id may occur twice: decoding prefers the added tokens
        return {int(i): token for token, i in self._backend.get_vocab().items()} | self.added_tokens

    def vocabulary(self) -> list[str]:
        """Return the written form of every token by id, added tokens included; "" for an id without a token."""
        tokens = self._tokens
        return [tokens.get(i, "") for i in range(max(tokens, default=-1) + 1)]

    def bytes_by_token(self) -> Callable[[str], bytes] | None:
        """Return a function from a token's written form to its bytes in a text; None if only decoding gives them."""
        return bytes_by_token(self._decoder)

    @property
    def _decoder(self) -> Any:
        return self._backend.backend_tokenizer.decoder if self._backend.is_fast else None

    def text_scheme(self, *, skip_special_tokens: bool) -> TextScheme:
        """Return the detokenization scheme; chosen and checked at the first call, then cached."""
        if skip_special_tokens not in self._schemes:
            self._schemes[skip_special_tokens] = choose_scheme(
                lambda ids: self.decode(ids, skip_special_tokens),
                self._tokens,
                skipped=self.special_ids if skip_special_tokens else frozenset(),
                decoder=self._decoder,
            )
        return self._schemes[skip_special_tokens]


def too_long(excess: str, most: int) -> PromptTooLongError:
    """Return the error of a prompt that is refused before it is encoded."""
    return PromptTooLongError(f"the prompt {excess}, and at most {most} tokens are allowed: shorten the prompt")


def chat_text(backend: Any, conversation: Conversation) -> str:
    """Render a conversation with the chat template of a tokenizer object, within the limits of the sandbox.

    A tokenizer class with its own `apply_chat_template` uses that instead. The text of an open conversation is cut as
    by transformers: after a mark at the end of the last message.
    """
    if not conversation.is_open:
        return _whole_text(backend, conversation)
    *before, last = conversation.messages
    taken = "".join(conversation.texts())
    mark = next(chr(code) for code in itertools.count(0xE000) if chr(code) not in taken)
    parts = last["content"] if isinstance(last["content"], list) else [{"text": last["content"]}]
    content: Any = f"{parts[-1]['text']}{mark} "
    if parts is last["content"]:
        content = [*parts[:-1], {**parts[-1], "text": content}]
    whole = _whole_text(backend, replace(conversation, messages=[*before, {**last, "content": content}]))
    if mark not in whole or parts[-1]["text"].strip() not in whole:
        raise InvalidRequestError(
            "the chat template writes the last message in another form, so it cannot be continued: leave "
            "continue_final_message out",
            param="continue_final_message",
        )
    text, _, rest = whole.rpartition(mark)
    return text if rest.startswith(" ") else text.rstrip()  # without the space, the template trims messages


def _whole_text(backend: Any, conversation: Conversation) -> str:
    if getattr(backend.apply_chat_template, "__module__", "") != "transformers.tokenization_utils_base":
        tools = {"tools": conversation.tools} if conversation.tools else {}
        return backend.apply_chat_template(
            conversation.messages,
            tokenize=False,
            add_generation_prompt=conversation.add_generation_prompt,
            **tools,
            **conversation.variables,
        )
    # imported here, since few programs need jinja2
    from draftree.text.chat.templates import render_chat

    template = backend.get_chat_template(tools=conversation.tools)
    return render_chat(template, conversation, special_tokens=backend.special_tokens_map)


def _holds(folder: Path, patterns: Iterable[str]) -> bool:
    return any(next(folder.glob(pattern), None) is not None for pattern in patterns)


def _broken(folder: Path, reason: str) -> ModelLoadError:
    return ModelLoadError(f"The tokenizer in {folder} cannot be read ({reason}): {get_again(folder)}.")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".")[:200] if lines else type(error).__name__
