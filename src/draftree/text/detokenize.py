"""Incremental detokenization of a sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from draftree.core.errors import InvalidRequestError
from draftree.text.tokenizer import Tokenizer


class Detokenizer:
    """Converts the tokens of one sequence into pieces of text that never change afterwards.

    The pieces joined with the result of `finish` equal `tokenizer.decode` of all ids. With a byte-fallback
    tokenizer (Llama 2) a run of byte tokens, the line break <0x0A> included, is held back until another token follows.

    Args:
        tokenizer: the tokenizer of the sequence.
        skip_special_tokens: leave out special tokens.
        spaces_between_special_tokens: False writes an added token that follows another one as it is in the
            vocabulary, without the space that some tokenizers put before it; no effect if special tokens are skipped.
        prompt_ids: ids before the sequence. If given, the text continues theirs and keeps, for example, the space
            before its first word; if empty, it starts a text, as in `tokenizer.decode`.

    Raises:
        InvalidRequestError: `spaces_between_special_tokens` is False, and the tokenizer cannot stream.
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
        self._finished = False
        before = [i for i in prompt_ids[-self.NUM_PROMPT_IDS :] if i not in self._skipped]
        if before:
            self._stream.follow(before)

    def push(self, token_ids: Iterable[int]) -> list[str]:
        """Return one piece per token: the text that it completed, "" while a character is incomplete."""
        assert not self._finished, "push after finish"
        skipped, push = self._skipped, self._stream.push if not self._joined else self._push_joined
        return ["" if token_id in skipped else push(token_id) for token_id in token_ids]

    def num_held_before(self, token_id: int) -> int:
        """Return the number of characters that are held back and precede the text of the next token."""
        return self._stream.num_held_before(token_id)

    def _push_joined(self, token_id: int) -> str:
        piece, token = self._stream.push(token_id), self._joined.get(token_id)
        if token is not None and self._follows_joined:
            piece = token
        self._follows_joined = token is not None
        return piece

    def finish(self) -> str:
        """Return the remaining text; bytes that form no character become U+FFFD."""
        assert not self._finished, "finish is called once"
        self._finished = True
        return self._stream.finish()
