"""The part of `AsyncLLM` for speech, whose sources are then submitted like other prompts."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from draftree.async_prompts import AsyncPromptEncoder
from draftree.engine.serving.driver import Driver
from draftree.long_speech import LongSpeech, first_window
from draftree.models.source import FeatureSource
from draftree.spoken import Detection, Speech

if TYPE_CHECKING:
    from draftree.llm import LLM


class AsyncSpeech:
    """The methods of `AsyncLLM` for speech."""

    _llm: LLM
    _driver: Driver
    _prompts: AsyncPromptEncoder

    async def detect_speech(
        self, audio: Any, speech: Speech, *, always: bool = False
    ) -> tuple[FeatureSource, Detection | None]:
        """Return the source of samples or features, for `submit`, and what the model detects in it.

        Args:
            audio: as for `LLM.transcribe`, one item.
            speech: how it is transcribed.
            always: ask the model although the language is known.

        Raises:
            DraftreeError: as `LLM.transcribe`.
        """
        work = self._llm.transcriber
        source = await asyncio.to_thread(work.source, audio)
        if not always and not work.needs_language(speech):
            return source, None
        return source, await asyncio.wrap_future(self._driver.call(lambda: work.detect(source)))

    async def long_speech(self, audio: Any, speech: Speech) -> LongSpeech:
        """Return the windows of samples or features of any length; their sources are for `submit`.

        Args:
            audio: as for `LLM.transcribe_long`, one item.
            speech: how it is transcribed.

        Raises:
            DraftreeError: as `LLM.transcribe_long`.
        """
        work = self._llm.transcriber
        features = await asyncio.to_thread(work.features, audio)
        source = first_window(work, features)
        detected = await asyncio.wrap_future(self._driver.call(lambda: work.detect(source)))
        return await self._prompts.with_tokenizer(lambda _: LongSpeech(work, features, speech, detected=detected))
