"""One answer of a chat: generated round by round, and stopped by Ctrl-C without loss of what is written."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from draftree.cli.chatting.conversation import INTERRUPTED
from draftree.completion import Completion, CompletionStats, completion_of, stats_of
from draftree.engine.sequence import Update
from draftree.llm import LLM
from draftree.sampling.params import SamplingParams

__all__ = ["Answer", "write_answer"]


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, complete or interrupted.

    Attributes:
        text: the text, up to the interruption if there was one.
        finish_reason: "stop", "length" or "interrupted".
        stats: counts and seconds.
        seconds: wall-clock time, prompt included.
        completion: the result as the library returns it; None for an interrupted answer.
    """

    text: str
    finish_reason: str
    stats: CompletionStats
    seconds: float
    completion: Completion | None


class StopRequest:
    """Whether Ctrl-C was pressed. The first press is noted, the second raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.is_set = False

    def __call__(self, number: int, frame: Any) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True


@contextmanager
def stopped_by_ctrl_c() -> Iterator[StopRequest]:
    """Note Ctrl-C instead of raising; for the main thread."""
    request = StopRequest()
    before = signal.signal(signal.SIGINT, request)
    try:
        yield request
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def never_stopped() -> Iterator[StopRequest]:
    """Leave Ctrl-C as it is."""
    yield StopRequest()


def write_answer(
    llm: LLM,
    ids: Sequence[int],
    *,
    params: SamplingParams,
    draft: str,
    show: Callable[[Update], None] | None,
    stoppable: bool,
) -> Answer:
    """Generate one answer.

    Args:
        llm: the model with its drafters.
        ids: tokens of the conversation.
        params: sampling parameters.
        draft: one of its drafters, or "none".
        show: called with every piece of text.
        stoppable: whether Ctrl-C ends the answer after the current pass; a second Ctrl-C ends the pass as well.

    Raises:
        InvalidRequestError: the request is invalid; nothing has been generated then.
        GenerationError: generation failed.
    """
    (sequence,) = llm.requests.sequences(ids, params, draft=draft)
    start = time.perf_counter()
    with stopped_by_ctrl_c() if stoppable else never_stopped() as stop:
        try:
            llm.engine.add(sequence)
            while not sequence.is_finished and not stop.is_set:
                llm.engine.step()
                update = sequence.take_update()
                if update is not None and show is not None:
                    show(update)
        except KeyboardInterrupt:
            if not stoppable:
                raise
        finally:
            llm.engine.abort([sequence])
    seconds = time.perf_counter() - start
    if not stop.is_set and sequence.error is not None:
        raise sequence.error
    text = "".join(sequence.texts)
    if stop.is_set and str(sequence.finish_reason) not in ("stop", "length"):
        return Answer(text, INTERRUPTED, stats_of(sequence), seconds, None)
    done = completion_of(sequence, prompt_index=0)
    return Answer(done.text, done.finish_reason, done.stats, seconds, done)
