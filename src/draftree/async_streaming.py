"""Streams of `AsyncLLM`: one text in pieces as they are verified."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Unpack

from draftree.arguments import Messages, Prompt, one_params, require_single, require_text
from draftree.engine.sequence import Update
from draftree.models.source import FeatureSource
from draftree.prompts import DecoderOptions
from draftree.sampling.params import SamplingParams
from draftree.submission import Submission


class AsyncStreams:
    """The methods of `AsyncLLM` that stream one text."""

    async def submit(
        self,
        prompt: Prompt | Messages | FeatureSource,
        params: SamplingParams | None = None,
        *,
        draft: str | None = None,
        priority: int = 0,
        wait: bool = True,
        request_id: str | None = None,
        trace: bool = False,
        owner: str | None = "",
        **decoder: Unpack[DecoderOptions],
    ) -> Submission:
        """Queue a request."""
        raise NotImplementedError

    async def stream(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        *,
        draft: str | None = None,
        priority: int = 0,
        wait: bool = True,
        **decoder: Unpack[DecoderOptions],
    ) -> AsyncGenerator[str, None]:
        """Generate one text and yield its pieces as they are verified. Closing the generator aborts the request.

        Args:
            prompt: as for `submit`.
            params: sampling parameters, n=1, with `detokenize`.
            draft: as for `submit`.
            priority: as for `submit`.
            wait: as for `submit`.
            **decoder: as for `submit`.

        Raises:
            DraftreeError: as `generate`.
        """
        require_text(one_params(params))
        updates = self.stream_updates(prompt, params, draft=draft, priority=priority, wait=wait, **decoder)
        try:
            async for update in updates:
                text = "".join(piece.text for piece in update.pieces)
                if text:
                    yield text
        finally:
            await updates.aclose()

    async def stream_updates(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        *,
        draft: str | None = None,
        priority: int = 0,
        wait: bool = True,
        **decoder: Unpack[DecoderOptions],
    ) -> AsyncGenerator[Update, None]:
        """Stream as `stream`, with token ids, and with accepted text and target tokens distinguished.

        The last update's sequence is finished; `completion_of` converts it to a completion.
        """
        given = one_params(params)
        require_single(given)
        async with await self.submit(prompt, given, draft=draft, priority=priority, wait=wait, **decoder) as submission:
            async for update in submission:
                if update.sequence.error is not None and update.is_last:
                    raise update.sequence.error
                yield update
