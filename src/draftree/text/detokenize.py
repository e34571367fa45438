"""The text of a sequence while it is being written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from draftree.core.errors import InvalidRequestError
from draftree.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns the tokens of one sequence into pieces of text that never change afterwards.

    The pieces and what `finish` gives, put together, are exactly `tokenizer.decode` of all ids. With a byte-fallback
    tokenizer (Llama 2) a run of byte tokens, the line break <0x0A> included, is held back until another token follows.

    Args:
        tokenizer: whose tokens they are.
        skip_special_tokens: leave out special tokens.
        spaces_between_special_tokens: False takes an added token that follows another one as it is written in the
            vocabulary, without the space that some tokenizers put before it; nothing changes where special tokens are
            left out.
        prompt_ids: ids before the sequence. Given, the text goes on from theirs and keeps, for example, the space
            before its first word; not given, it begins a text, as in `tokenizer.decode`.

    Raises:
        InvalidRequestError: spaces are not wanted, and the tokenizer gives no text before it is complete.
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
                f"spaces_between_special_tokens=False cannot be honoured for {tokenizer.name}: the text of a token of "
                "its depends on the tokens around it; leave it out, or use skip_special_tokens=True"
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
        """One piece for each token: the text that it completed, "" while a character is incomplete."""
        assert not self._finished, "push after finish"
        skipped, push = self._skipped, self._stream.push if not self._joined else self._push_joined
        return ["" if token_id in skipped else push(token_id) for token_id in token_ids]

    def _push_joined(self, token_id: int) -> str:
        piece, token = self._stream.push(token_id), self._joined.get(token_id)
        if token is not None and self._follows_joined:
            piece = token
        self._follows_joined = token is not None
        return piece

    def finish(self) -> str:
        """What is left when no token follows; bytes that form no character become U+FFFD."""
        assert not self._finished, "finish is called once"
        self._finished = True
        return self._stream.finish()
