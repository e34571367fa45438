"""A tokenizer backed only by its tokenizer.json, read by the `tokenizers` library.

transformers does more: it rebuilds some tokenizers from their vocabularies, and applies settings. So the file is
compared once with the tokenizer of transformers: if the files are equal and some texts, ids and conversations give
equal results, the file alone is used afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftree.text.backend import decoded, encoded
from draftree.text.chat.messages import Conversation
from draftree.text.tokenizer import Tokenizer, chat_text

FILE = "tokenizer.json"
NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
TEXTS = (
    "",
    " ",
    "a",
    "The capital of France is",
    "  two spaces, a\ttab\n\nand lines \n",
    "def f(x):\n    return x ** 2  # 1234567890",
    "Naïve café, ½ “quotes” …",
    "東京は日本の首都です。",
    "👨‍👩‍👧 🇯🇵 \u200b\ufeff é e\u0301",
)
SEQUENCES, LENGTH, SPECIALS = 12, 40, 8


@dataclass(frozen=True, slots=True)
class PlainFacts:
    """Facts about a tokenizer that its tokenizer.json lacks."""

    tokens: Mapping[str, str]  # special tokens by role
    chat_template: str | None  # the model's template; None if it has none
    renders: bool  # whether conversations can be rendered without transformers


class PlainBackend:
    """The part of a transformers tokenizer that `Tokenizer` uses, on top of the `tokenizers` library."""

    is_fast = True

    def __init__(self, path: Path, facts: PlainFacts, full: Callable[[], Any]) -> None:
        from tokenizers import Tokenizer as Reader

        self.backend_tokenizer: Any = Reader.from_file(str(path))
        self.backend_tokenizer.no_truncation()
        self.backend_tokenizer.no_padding()
        self.chat_template = facts.chat_template
        self._facts = facts
        self._full = full
        for name in NAMES:
            token = facts.tokens.get(name)
            setattr(self, f"{name}_id", None if token is None else self.backend_tokenizer.token_to_id(token))

    def encode(
        self, text: str, *, add_special_tokens: bool, split_special_tokens: bool = False, verbose: bool = False
    ) -> list[int]:
        self.backend_tokenizer.encode_special_tokens = split_special_tokens
        return encoded(self.backend_tokenizer, text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return decoded(self.backend_tokenizer, ids, skip_special_tokens=skip_special_tokens)

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        return self.backend_tokenizer.get_added_tokens_decoder()

    def get_chat_template(self, *, tools: Any = None) -> str:
        return str(self.chat_template)

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        conversation = Conversation(messages, tools, variables, add_generation_prompt)
        return self.rendered(conversation) if self._facts.renders else chat_text(self._full(), conversation)

    def rendered(self, conversation: Conversation) -> str:
        from draftree.text.chat.templates import render_chat

        return render_chat(str(self.chat_template), conversation, special_tokens=self._facts.tokens)


def plain_tokenizer(folder: Path, facts: PlainFacts) -> Tokenizer:
    """Load the tokenizer of a folder without transformers and without code of the folder."""

    def full() -> Any:
        loaded = Tokenizer.load(folder)
        assert loaded is not None, "the file is there"
        return loaded.backend

    return Tokenizer(PlainBackend(folder / FILE, facts, full), name=folder.name, full=full)


def plain_facts(theirs: Any, folder: Path) -> PlainFacts | None:
    """Return the facts with which the file behaves like a tokenizer of transformers; None if it does not."""
    template = getattr(theirs, "chat_template", None)
    if not theirs.is_fast or not isinstance(template, str | None):
        return None
    tokens = {name: str(token) for name, token in theirs.special_tokens_map.items()}
    facts = PlainFacts(tokens, template, renders=False)
    ours = PlainBackend(folder / FILE, facts, lambda: theirs)
    if not _are_alike(ours, theirs):
        return None
    renders = template is not None and _render_alike(ours, theirs)
    return replace(facts, renders=renders)


def _are_alike(ours: PlainBackend, theirs: Any) -> bool:
    plain = Tokenizer(ours)
    full = Tokenizer(theirs)
    tokens = [token.content for token in ours.added_tokens_decoder.values()]
    for text in [*TEXTS, *(f"a{token} {token}{token}b" for token in tokens[:SPECIALS])]:
        if any(plain.encode(text, added) != full.encode(text, added) for added in (True, False)):
            return False
        if plain.encode_literally(text) != full.encode_literally(text):
            return False
    # after the texts, whose encoding makes transformers turn truncation and padding off
    if ours.backend_tokenizer.to_str() != theirs.backend_tokenizer.to_str():
        return False
    choose = random.Random(5)
    size = len(plain.vocabulary())
    for _ in range(SEQUENCES):
        ids = [choose.randrange(size) for _ in range(LENGTH)]
        if any(plain.decode(ids, skipped) != full.decode(ids, skipped) for skipped in (True, False)):
            return False
    names = ("eos_token_id", "bos_token_id", "ignored_ids", "special_ids", "has_chat_template")
    return plain.vocabulary() == full.vocabulary() and all(
        getattr(plain, name) == getattr(full, name) for name in names
    )


def _render_alike(ours: PlainBackend, theirs: Any) -> bool:
    from draftree.text.chat.templates import TemplateStoppedError

    def text_or_none(render: Callable[..., str], *args: Any, **options: Any) -> str | None:
        try:
            return render(*args, **options)
        except TemplateStoppedError:
            raise
        except Exception:  # a template is a program of the model's author and may raise anything
            return None

    first, answer = {"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": " 4 \n"}
    system = {"role": "system", "content": "Be <brief> & 'kind'."}
    conversations = ([first], [system, first], [first, answer, first], [system, first, answer])
    try:
        return all(
            text_or_none(ours.rendered, Conversation(messages, add_generation_prompt=opens))
            == text_or_none(theirs.apply_chat_template, messages, tokenize=False, add_generation_prompt=opens)
            for messages in conversations
            for opens in (True, False)
        )
    except TemplateStoppedError:
        return False  # transformers would not stop
