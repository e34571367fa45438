"""Incremental detokenization of a sequence, and stop strings, which are never part of the shown text."""

from __future__ import annotations

from collections.abc import Sequence

from draftree.core.errors import InvalidRequestError
from draftree.text.tokenizer import Tokenizer


class Detokenizer:
    """Converts the tokens of one sequence into pieces of text that never change.

    The pieces joined with the result of `finish` equal `tokenizer.decode` of all ids. With a byte-fallback
    tokenizer (Llama 2) a run of byte tokens, the line break <0x0A> included, is held back until another token follows.

    `spaces_between_special_tokens`: False writes an added token that follows another one as it is in the vocabulary,
    without the space that some tokenizers put before it; no effect if special tokens are skipped. `prompt_ids`: ids
    before the sequence. If given, the text continues theirs and keeps, for example, the space before its first word; if
    empty, it starts a text, as in `tokenizer.decode`.
    """

    NUM_PROMPT_IDS = 16

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        scheme = tokenizer.text_scheme(skip_special_tokens=skip_special_tokens)
        joins = not skip_special_tokens and not spaces_between_special_tokens
        if joins and not scheme.streams:
            raise InvalidRequestError(
                f"spaces_between_special_tokens=False cannot be honoured for {tokenizer.name}: the text of its tokens "
                "depends on the tokens around them; leave it out, or use skip_special_tokens=True",
                param="spaces_between_special_tokens",
            )
        self._joined = tokenizer.added_tokens if joins else {}
        self._follows_joined = False
        self._skipped = scheme.skipped
        self._stream = scheme.open()
        before = [i for i in prompt_ids[-self.NUM_PROMPT_IDS :] if i not in self._skipped]
        if before:
            self._stream.follow(before)

    def push(self, token_id: int) -> str:
        """Return the text that a token completes: "" while a character is incomplete."""
        if token_id in self._skipped:
            return ""
        piece = self._stream.push(token_id)
        if self._joined:
            token = self._joined.get(token_id)
            if token is not None and self._follows_joined:
                piece = token
            self._follows_joined = token is not None
        return piece

    def num_held_before(self, token_id: int) -> int:
        """Return the number of characters that are held back and precede the text of the next token."""
        return self._stream.num_held_before(token_id)

    def skips(self, token_id: int) -> bool:
        """Return whether a token has no text because it is special."""
        return token_id in self._skipped

    def finish(self) -> str:
        """Return the remaining text; bytes that form no character become U+FFFD. Nothing is pushed afterwards."""
        return self._stream.finish()


class StopChecker:
    """Searches the text of one sequence for stop strings and holds back a possible beginning of one.

    The first stop string to be completed ends the text; of two completed by the same character, the longer one.
    The held-back text is the longest suffix that begins a stop string. Each character costs constant time
    for each stop string.

    `include_in_output`: end the text after the stop string instead of before it.
    """

    def __init__(self, stop: Sequence[str], *, include_in_output: bool) -> None:
        self._include = include_in_output
        self._searches = [_Search(entry) for entry in dict.fromkeys(stop)]
        self._held = ""
        self.matched: str | None = None  # the stop string that ended the text, if one did

    def push(self, piece: str, *, may_end: bool = True) -> str:
        """Read the next piece, and return the text that may be shown now.

        `may_end`: False if no match may end in this piece; a match that begins here may end in a later piece.
        """
        assert self.matched is None, "push after a match"
        if not self._searches:
            return piece
        text = self._held + piece
        for end, character in enumerate(piece, start=len(self._held) + 1):
            completed = [search.stop for search in self._searches if search.advance(character)]
            if completed and may_end:
                self.matched = max(completed, key=len)
                self._held = ""
                return text[: end if self._include else end - len(self.matched)]
        num_held = 0 if self._include else max(search.num_matched for search in self._searches)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """Return the held-back text when the sequence ends without a stop string."""
        held, self._held = self._held, ""
        return held


class _Search:
    """One stop string and the length of its prefix that the text so far ends with.

    Source: Knuth, Morris and Pratt, "Fast Pattern Matching in Strings", 1977.
    """

    __slots__ = ("_shorter", "num_matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        # _shorter[n]: the next shorter prefix of `stop` that its first n characters end with
        self._shorter = [0] * (len(stop) + 1)
        length = 0
        for n in range(2, len(stop) + 1):
            while length and stop[length] != stop[n - 1]:
                length = self._shorter[length]
            length += stop[length] == stop[n - 1]
            self._shorter[n] = length

    def advance(self, character: str) -> bool:
        """Read a character; True if it completes the stop string, whose end may then begin another one."""
        n = self.num_matched
        while n and self.stop[n] != character:
            n = self._shorter[n]
        self.num_matched = n + (self.stop[n] == character)
        if self.num_matched < len(self.stop):
            return False
        self.num_matched = self._shorter[len(self.stop)]
        return True
