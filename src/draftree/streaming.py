"""Streams of `LLM`: one text in pieces as they are verified."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import Unpack

from draftree.arguments import Messages, Prompt, one_params, require_single, require_text
from draftree.completion import Completion, completion_of
from draftree.engine.engine import Engine
from draftree.engine.sequence import Update
from draftree.prompts import DecoderOptions, PromptEncoder
from draftree.requests import Requests
from draftree.sampling.params import SamplingParams


class Streams:
    """The methods of `LLM` that stream one text."""

    _prompts: PromptEncoder
    _requests: Requests
    _engine: Engine

    def stream(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        *,
        draft: str | None = None,
        **decoder: Unpack[DecoderOptions],
    ) -> Generator[str, None, Completion]:
        """Generate one text and yield its pieces as they are verified; close the generator to stop early.

        Streams that are read alternately are decoded as one batch.

        Args:
            prompt: a text, token ids, or the messages of a conversation.
            params: sampling parameters, n=1, with `detokenize`.
            draft: as for `generate`.
            **decoder: `decoder_prompt`, `source_lang` and `target_lang` as for `generate`.

        Returns:
            The completion, as the value of the finished generator.
        """
        require_text(one_params(params))
        with closing(self.stream_updates(prompt, params, draft=draft, **decoder)) as updates:
            while True:
                try:
                    update = next(updates)
                except StopIteration as end:
                    done: Completion = end.value
                    return done
                for piece in update.pieces:
                    yield piece.text

    def stream_updates(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        *,
        draft: str | None = None,
        **decoder: Unpack[DecoderOptions],
    ) -> Generator[Update, None, Completion]:
        """Stream as `stream`, with token ids, and with accepted text and target tokens distinguished."""
        given = one_params(params)
        require_single(given)
        start = self._prompts.encode_start(decoder)
        ids = self._prompts.encode(prompt, source_lang=decoder.get("source_lang"))
        (sequence,) = self._requests.sequences(ids, given, draft=draft, decoder_prompt=start)
        yield from self._engine.stream(sequence)
        if sequence.error is not None:
            raise sequence.error
        return completion_of(sequence, prompt_index=0)
