"""A text that grows in one tokenizer's tokens, read in another's.

The last tokens of a reading are not certain: "straw" is one until "berry" follows. New text is encoded together with
a window of the tokens before it, and the new encoding takes over where both have just cut off the same token. So the
reading always says the text, byte by byte, and is cut as the tokenizer would have cut it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from draftree.text.retokenize.lexicon import SPACE, Lexicon, is_inside_character

LOOK_BEHIND = 12
"""Tokens that are encoded again with what follows them; more where the two encodings do not meet."""


class Rereading:
    """One text in the tokens of `own`.

    Args:
        source: whose tokens come in.
        own: whose tokens the reading has.
        specials: what is read for special tokens of the source, as `read_specials` says.
    """

    def __init__(self, source: Lexicon, own: Lexicon, specials: Mapping[int, bytes | tuple[int, ...]]) -> None:
        self._source = source
        self._own = own
        self._specials = specials
        self._run = bytearray()
        """What the text says since its last special token."""
        self._run_start = len(own.start)
        self._strips = source.strips_first_space
        self.tokens = list(own.start)

    def push(self, ids: Iterable[int]) -> int:
        """Read on. Returns how many of the tokens before still stand."""
        stands = len(self.tokens)
        text = bytearray()
        for token_id in ids:
            said = self._source.says(token_id)
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
        width = LOOK_BEHIND
        while (first := self._window_start(width)) > self._run_start:
            met = self._meet(first, len(data))
            if met is not None:
                return self._replace(*met)
            width *= 4
        return self._replace(self._run_start, self._own.read(bytes(self._run), begins=True))

    def _window_start(self, width: int) -> int:
        first = max(self._run_start, len(self.tokens) - width)
        while first > self._run_start and is_inside_character(self._own.says(self.tokens[first]) or b""):
            first -= 1
        return first

    def _meet(self, first: int, num_new: int) -> tuple[int, list[int]] | None:
        """Where the old tokens and a new encoding both cut off the same token; what stands behind it there."""
        old = self.tokens[first:]
        size = len(self._own.text_of(old)) + num_new
        window = bytes(self._run[-size:])
        new = self._own.read(window, begins=False)
        if self._own.text_of(new) != window:
            return None  # not a tokenizer that keeps what it reads
        cut: dict[int, int] = {}
        place = 0
        for number, token_id in enumerate(new):
            place += len(self._own.says(token_id) or b"")
            cut[place] = number
        place = 0
        for number, token_id in enumerate(old):
            place += len(self._own.says(token_id) or b"")
            there = cut.get(place)
            if there is not None and new[there] == token_id:
                return first + number + 1, new[there + 1 :]
        return None

    def _replace(self, first: int, new: list[int]) -> int:
        """Put `new` where the tokens from `first` on stood; returns how many tokens did not change."""
        old = self.tokens[first:]
        same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        self.tokens[first + same :] = new[same:]
        return first + same
