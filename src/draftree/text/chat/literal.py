"""Literal encoding of conversations: a control token typed in a message is encoded as plain text.

A chat template joins messages, tools and variables into one text, in which a typed `<|im_end|>` looks like one of the
template. So the template is rendered with a placeholder for every typed control token, which separates the two. A
second tokenizer then encodes that text: it has the model, normalizer and pre-tokenizer of the first, but other strings
for its control tokens, so the typed ones are spelled like any text, with the same text around them.

Control tokens are the special tokens, and other added tokens with which the template marks turns. Tags of sections in
an answer, such as `<think>` and `</think>`, are none unless they are special: templates split messages at them. If the
template reads control tokens in an answer, the assistant's messages are left as they are. So are special tags of
sections in an answer that is to be continued.

Messages without control tokens are encoded as transformers does. Unigram models have control tokens among their pieces
and produce them for that text; such conversations are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, final

from draftree.core.errors import InvalidRequestError
from draftree.text.backend import encoded
from draftree.text.chat.messages import Conversation

ROLES = frozenset({"assistant", "developer", "function", "model", "system", "tool", "user"})
"""Common roles of templates; other roles must not look like the name of a control token."""
ALIAS = "\U0010f000{}\U0010f001"  # the string of a control token in the second tokenizer
PRIVATE = range(0xE000, 0xF8FF)
PROBE = Conversation(
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}],
    add_generation_prompt=False,
)
"""A conversation whose rendering shows how the template marks turns."""
OPTION = "allow_control_tokens=True (on the command line: --allow-control-tokens) reads them as control tokens"


@final
class LiteralEncoder:
    """Encoder of conversations that spells control tokens in messages.

    `backend`: a tokenizer object of transformers, or an object with the same interface.
    """

    def __init__(
        self, name: str, backend: Any, *, encode: Callable[[str], list[int]], render: Callable[[Conversation], str]
    ) -> None:
        self._name = name
        self._backend = backend
        self._encode = encode
        self._render = render

    def ids(self, conversation: Conversation, text: str) -> list[int]:
        """Encode a conversation."""
        self._check_roles(conversation)
        contents = conversation.texts()
        if any(map(self._all_tokens.search, [*contents, *conversation.identifiers()])):
            return self._literal(conversation, text)
        ids = self._encode(text)
        if any(self._edges.meet(content.strip()) for content in contents):
            apart = self._rendered(conversation.changed(lambda content: f"\ue000{content}\ue000"))
            if apart is None or self._controls(self._encode(apart)) != self._controls(ids):
                raise self._refused("a message and the chat template form a control token together")
        if self._hidden(contents):
            raise self._refused("a message has another spelling of a control token")
        return ids

    def _literal(self, conversation: Conversation, text: str) -> list[int]:
        mark = next((chr(code) for code in PRIVATE if chr(code) not in text), None)
        if mark is None:
            raise self._refused("a message has a control token and every private character")
        tokens = [token.content for token in self._added.values()]
        numbers = {token: number for number, token in enumerate(tokens)}

        def marked(content: str, pattern: re.Pattern[str] = self._all_tokens) -> str:
            return pattern.sub(lambda match: f"{mark}{numbers[match[0]]}{mark}", content)

        marks = re.compile(f"{mark}([0-9]+){mark}")
        for keeps in ("", "assistant"):
            changed = conversation.changed(marked, identifiers=True, except_role=keeps)
            if conversation.is_open and not keeps:
                last = replace(conversation, messages=conversation.messages[-1:])
                (kept,) = last.changed(partial(marked, pattern=self._turn_tokens)).messages
                changed = replace(
                    changed, messages=[*changed.messages[:-1], {**changed.messages[-1], "content": kept["content"]}]
                )
            rendered = self._rendered(changed)
            if rendered is not None and marks.sub(lambda match: tokens[int(match[1])], rendered) == text:
                return self._encode_marked(rendered, marks, tokens)
        raise self._refused("the chat template changes a message that has a control token")

    def _rendered(self, changed: Conversation) -> str | None:
        try:
            return self._render(changed)
        except Exception:  # a template is a program of the model's author and may raise anything
            return None

    def _encode_marked(self, rendered: str, marks: re.Pattern[str], tokens: list[str]) -> list[int]:
        expected = self._encode(rendered)
        numbers = {token: number for number, token in enumerate(tokens)}
        aliased = self._all_tokens.sub(lambda match: ALIAS.format(numbers[match[0]]), rendered)
        if ALIAS[0] in rendered or self._second(aliased) != expected:
            raise self._refused("this tokenizer cannot spell a control token")
        ids = self._second(marks.sub(lambda match: tokens[int(match[1])], aliased))
        if self._controls(ids) != self._controls(expected):
            raise self._refused("this tokenizer cannot spell a control token")
        return ids

    def _second(self, text: str) -> list[int]:
        tokenizer, ids = self._second_tokenizer
        return [ids.get(token, token) for token in encoded(tokenizer, text, add_special_tokens=False)]

    @cached_property
    def _second_tokenizer(self) -> tuple[Any, dict[int, int]]:
        """The tokenizer with other strings for control tokens, and the original ids by its added-token ids."""
        if not self._backend.is_fast:
            raise self._refused("this tokenizer cannot spell a control token")
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as Reader

        first = self._backend.backend_tokenizer
        second = Reader(first.model)
        for part in ("normalizer", "pre_tokenizer"):
            if getattr(first, part) is not None:
                setattr(second, part, getattr(first, part))
        names: dict[int, str] = {}
        tokens: dict[bool, list[Any]] = {True: [], False: []}
        for number, (token_id, token) in enumerate(self._added.items()):
            is_control = token_id in self._control_ids
            names[token_id] = ALIAS.format(number) if is_control else token.content
            flags = {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "normalized")}
            tokens[token.special].append(AddedToken(names[token_id], **flags))
        # one call per kind: every call processes all tokens added before
        second.add_special_tokens(tokens[True])
        second.add_tokens(tokens[False])
        ids: dict[int, int] = {int(second.token_to_id(name) or 0): token_id for token_id, name in names.items()}
        return second, ids

    @cached_property
    def _added(self) -> dict[int, Any]:
        return {int(i): token for i, token in sorted(self._backend.added_tokens_decoder.items()) if token.content}

    @cached_property
    def _specials(self) -> dict[str, int]:
        return {token.content: i for i, token in self._added.items() if token.special}

    @cached_property
    def _all_tokens(self) -> re.Pattern[str]:
        return _any_of(self._control_texts)

    @cached_property
    def _turn_tokens(self) -> re.Pattern[str]:
        """A pattern of control tokens without tags of sections."""
        added = {token.content for token in self._added.values()}
        return _any_of(token for token in self._control_texts if _other_tag(token) not in added)

    @cached_property
    def _control_texts(self) -> frozenset[str]:
        """The special tokens, and other added tokens with which the template marks turns."""
        added = {token.content for token in self._added.values()}
        written = self._rendered(PROBE)
        if written is None:
            written = str(self._backend.chat_template)
        others = (token for token in added if token.strip() and token in written and _other_tag(token) not in added)
        return frozenset((*self._specials, *others))

    @cached_property
    def _control_ids(self) -> frozenset[int]:
        return frozenset(i for i, token in self._added.items() if self._all_tokens.fullmatch(token.content))

    def _controls(self, ids: Iterable[int]) -> list[int]:
        # the unknown token can stand for any text that has no tokens
        unknown = self._backend.unk_token_id
        return [token for token in ids if token in self._control_ids and token != unknown]

    @cached_property
    def _edges(self) -> _Edges:
        return _Edges(self._specials)

    def _hidden(self, contents: Iterable[str]) -> bool:
        """Return whether the tokenizer finds control tokens that are not in the text verbatim (normalization)."""
        is_exact = not any(token.normalized for token in self._added.values() if token.special)
        return not is_exact and any(self._controls(self._encode(content)) for content in contents)

    def _check_roles(self, conversation: Conversation) -> None:
        for message in conversation.messages:
            role = message["role"]
            if self._all_tokens.search(role) or (role not in ROLES and self._edges.meet(role.strip())):
                raise self._refused(f"the role {role[:40]!r} names a control token")

    def _refused(self, reason: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"This conversation cannot be encoded literally for {self._name} ({reason}): change the message; {OPTION}."
        )


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of the tokens, longest first, as tokenizers match them; it never matches if there are none."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")


def _other_tag(token: str) -> str:
    """Return the tag that closes what a tag such as `<think>` or `[THINK]` opens, or opens what it closes."""
    return token[0] + token[2:] if token[1:2] == "/" else f"{token[0]}/{token[1:]}"


@final
class _Edges:
    """Detector of texts that could be part of a token.

    `tokens`: non-empty strings.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        known = sorted(tokens)
        self._joined = "\0".join(known)
        self._longest = max(map(len, known), default=0)
        self._starts = {token[:size] for token in known for size in range(1, len(token))}
        self._ends = {token[size:] for token in known for size in range(1, len(token))}

    def meet(self, text: str) -> bool:
        """Return whether surrounding text could complete a token."""
        if not text:
            return False
        return text in self._joined or any(
            text[-size:] in self._starts or text[:size] in self._ends for size in range(1, self._longest)
        )
