"""Incremental re-encoding of one tokenizer's growing text by another tokenizer.

The last tokens of an encoding are provisional: "straw" is one until "berry" follows. New text is encoded together with
a window of the tokens before it, and the new encoding takes over where both end the same token at the same byte. So the
tokens always stand for the exact text, split as the tokenizer would split it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from draftree.text.retokenize.lexicon import SPACE, Lexicon, is_inside_character

CONTEXT_TOKENS = 12
"""Tokens that are encoded again with new text; more if the two encodings do not meet."""


class Rereading:
    """One text in the tokens of `own`.

    Args:
        source: tokenizer of the incoming tokens.
        own: tokenizer of the result.
        specials: replacements of the source's special tokens, from `read_specials`.
    """

    def __init__(self, source: Lexicon, own: Lexicon, specials: Mapping[int, bytes | tuple[int, ...]]) -> None:
        self._source = source
        self._own = own
        self._specials = specials
        self._run = bytearray()
        """The text since the last special token."""
        self._run_start = len(own.start)
        self._strips = source.strips_first_space
        self.tokens = list(own.start)

    def push(self, ids: Iterable[int]) -> int:
        """Append tokens of the source. Returns how many of the previous tokens are unchanged."""
        stands = len(self.tokens)
        text = bytearray()
        for token_id in ids:
            said = self._source.token_bytes(token_id)
            meant = self._specials.get(token_id, ()) if said is None else said
            if isinstance(meant, bytes):
                text += self._stripped(meant)
            elif meant:
                stands = min(stands, self._add(bytes(text)))
                text.clear()
                self.tokens += meant
                self._run_start = len(self.tokens)
                self._run.clear()
        return min(stands, self._add(bytes(text)))

    def _stripped(self, data: bytes) -> bytes:
        if self._strips and data:
            self._strips = False
            return data.removeprefix(SPACE)
        return data

    def _add(self, data: bytes) -> int:
        if not data:
            return len(self.tokens)
        self._run += data
        width = CONTEXT_TOKENS
        while (first := self._window_start(width)) > self._run_start:
            met = self._meet(first, len(data))
            if met is not None:
                return self._replace(*met)
            width *= 4
        return self._replace(self._run_start, self._own.read(bytes(self._run), begins=True))

    def _window_start(self, width: int) -> int:
        first = max(self._run_start, len(self.tokens) - width)
        while first > self._run_start and is_inside_character(self._own.token_bytes(self.tokens[first]) or b""):
            first -= 1
        return first

    def _meet(self, first: int, num_new: int) -> tuple[int, list[int]] | None:
        """Find where the old tokens and a new encoding end the same token; returns that place and the new rest."""
        old = self.tokens[first:]
        size = len(self._own.text_of(old)) + num_new
        window = bytes(self._run[-size:])
        new = self._own.read(window, begins=False)
        if self._own.text_of(new) != window:
            return None  # the tokenizer does not preserve its input
        cut: dict[int, int] = {}
        place = 0
        for number, token_id in enumerate(new):
            place += len(self._own.token_bytes(token_id) or b"")
            cut[place] = number
        place = 0
        for number, token_id in enumerate(old):
            place += len(self._own.token_bytes(token_id) or b"")
            there = cut.get(place)
            if there is not None and new[there] == token_id:
                return first + number + 1, new[there + 1 :]
        return None

    def _replace(self, first: int, new: list[int]) -> int:
        """Replace the tokens from `first` on by `new`; returns how many tokens did not change."""
        old = self.tokens[first:]
        same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        self.tokens[first + same :] = new[same:]
        return first + same
