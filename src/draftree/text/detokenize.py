"""The text of a sequence while it is being written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from draftree.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns the tokens of one sequence into pieces of text that never change afterwards.

    The pieces and what `finish` gives, put together, are exactly `tokenizer.decode` of all ids. With a byte-fallback
    tokenizer (Llama 2) a run of byte tokens, the line break <0x0A> included, is held back until another token follows.

    Args:
        tokenizer: whose tokens they are.
        skip_special_tokens: leave out special tokens.
        prompt_ids: ids before the sequence. Given, the text goes on from theirs and keeps, for example, the space
            before its first word; not given, it begins a text, as in `tokenizer.decode`.
    """

    NUM_PROMPT_IDS = 16

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool, prompt_ids: Sequence[int] = ()) -> None:
        scheme = tokenizer.text_scheme(skip_special_tokens=skip_special_tokens)
        self._skipped = scheme.skipped
        self._stream = scheme.open()
        self._finished = False
        before = [i for i in prompt_ids[-self.NUM_PROMPT_IDS :] if i not in self._skipped]
        if before:
            self._stream.follow(before)

    def push(self, token_ids: Iterable[int]) -> list[str]:
        """One piece for each token: the text that it completed, "" while a character is incomplete."""
        assert not self._finished, "push after finish"
        skipped, push = self._skipped, self._stream.push
        return ["" if token_id in skipped else push(token_id) for token_id in token_ids]

    def finish(self) -> str:
        """What is left when no token follows; bytes that form no character become U+FFFD."""
        assert not self._finished, "finish is called once"
        self._finished = True
        return self._stream.finish()
