"""Beam searches of coroutines, on the thread of an engine and between its rounds."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import final

from draftree.beam.forest import CHUNK
from draftree.beam.params import BeamSearchParams
from draftree.beam.result import BeamResult
from draftree.beam.search import BeamSearch
from draftree.beam.searcher import decoder_of
from draftree.beam.sequence import SequenceSearch
from draftree.core.errors import EngineClosedError, GenerationError, InvalidRequestError
from draftree.engine.driver import Background
from draftree.engine.engine import Engine
from draftree.engine.sequence import DecoderInput
from draftree.models.base import LanguageModel
from draftree.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BeamCounts:
    running: int  # searches that have slots
    waiting: int  # searches that wait for a place or for memory
    finished: int  # searches that ended with a result
    steps: int  # passes of them
    rows: int  # tokens computed in these passes


@final
class BeamWork(Background):
    """Beam searches as one batch beside the sequences of an engine; of several searches one pass serves all.

    `engine`: its model is searched; its sequences go on between the steps. `tokenizer`: None if the model has none.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None, end_ids: Sequence[int]) -> None:
        self._engine = engine
        self._search = BeamSearch(
            engine.parts.target, end_ids=end_ids, decode_after=decoder_of(tokenizer), has_room=self._has_room
        )
        self._promises: dict[SequenceSearch, Future[BeamResult]] = {}
        self._num_finished = 0

    @property
    def is_idle(self) -> bool:
        return self._search.is_idle

    @property
    def model(self) -> LanguageModel:
        return self._engine.parts.target

    @property
    def counts(self) -> BeamCounts:
        """Counts so far; from any thread."""
        search = self._search
        stats = self._search.stats
        return BeamCounts(search.num_running, search.num_waiting, self._num_finished, stats.num_passes, stats.num_rows)

    def add(self, prompt: DecoderInput, params: BeamSearchParams, promise: Future[BeamResult]) -> None:
        """Queue a search.

        `promise`: gets its result or its error; running, so that its reader cannot cancel it.
        """
        text = self._search.add(prompt, params)
        length = self._search.slot_length(text)
        if not self._engine.num_slots(length):
            self._search.cancel(text)
            raise InvalidRequestError(
                f"a search of {params.beam_width} beams with up to {text.limit} tokens after a prompt of "
                f"{len(text.prompt)} needs a slot of {length} tokens, for which there is no memory: lower "
                "max_new_tokens or beam_width, or shorten the prompt",
                param="max_new_tokens",
            )
        self._promises[text] = promise

    def cancel(self, promise: Future[BeamResult]) -> None:
        """Drop the search of a promise that nothing waits for; one that has ended is unchanged."""
        for text, other in list(self._promises.items()):
            if other is promise:
                self._search.cancel(text)
                del self._promises[text]

    def step(self, *, is_alone: bool) -> None:
        """Run one pass over all searches; beside sequences with short chunks of prompts."""
        self._search.chunk_size = CHUNK if is_alone else self._engine.prefill_chunk_size
        try:
            ended = self._search.step()
        except Exception as error:
            logger.exception("a step of the beam searches raised")
            self._fail(error)
            return
        for text in ended:
            promise = self._promises.pop(text)
            try:
                if text.error is not None:
                    raise text.error
                result = text.result()
                self._num_finished += 1
                promise.set_result(result)
            except GenerationError as error:
                promise.set_exception(error)

    def end(self, error: EngineClosedError) -> None:
        self._fail(error)

    def _has_room(self, count: int, length: int) -> bool:
        """Whether `count` slots of this many tokens fit into memory beside the running sequences."""
        running = self._engine.running
        longest = max((length, *(len(sequence.history) for sequence in running)))
        return self._engine.num_slots(longest) >= len(running) + count

    def _fail(self, error: Exception) -> None:
        self._search.close()
        for promise in self._promises.values():
            promise.set_exception(error)
        self._promises.clear()
