"""The front for many who ask at once: one engine on one thread, and coroutines that wait for their texts.

Example:
    >>> async with AsyncLLM("smollm2-135m-instruct", draft="ngram") as llm:  # doctest: +SKIP
    ...     async for piece in llm.stream("Once upon a time"):
    ...         print(piece, end="")
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

from draftree.arguments import Messages, Prompt, one_params, require_count, require_single
from draftree.completion import Completion, completion_of, raise_failures
from draftree.core.errors import InvalidRequestError
from draftree.engine.engine import Update
from draftree.engine.prefix_cache import PrefixStats
from draftree.engine.sequence import FinishReason, WritingSequence
from draftree.engine.serving.driver import Driver
from draftree.engine.serving.listening import Request
from draftree.llm import LLM
from draftree.sampling.params import SamplingParams
from draftree.text.tokenizer import check_messages

COMPILING_THREADS = 4
"""Requests whose grammars are compiled, or waited for, at the same time."""
MAX_WAITING = 256
"""Texts that may wait for the engine, unless told otherwise."""


class AsyncLLM:
    """An `LLM` for asyncio: requests join and leave while others are being written.

    The model works on a thread of its own. A slow or vanished reader delays no other request: what it has not taken is
    gathered for it, and no text is longer than its `max_tokens`.

    Args:
        model: as for `LLM`.
        draft: as for `LLM`.
        max_waiting: texts that may wait at most. Beyond, requests wait to be queued, or are refused with `wait=False`.
        **options: all other arguments of `LLM`.

    Raises:
        DraftreeError: as `LLM`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Any,
        draft: str | None = None,
        *,
        max_waiting: int = MAX_WAITING,
        **options: Any,
    ) -> None:
        require_count("max_waiting", max_waiting, least=0)
        self._llm = LLM(model, draft, **options)
        self._llm.engine.max_waiting = max_waiting
        # tokenizers are not made for two threads that encode at once
        self._encoding = threading.Lock()
        self._compiling = ThreadPoolExecutor(COMPILING_THREADS, thread_name_prefix="draftree-compiling")
        self._driver = Driver(self._llm.engine)

    @property
    def llm(self) -> LLM:
        """What it is made of: its model, tokenizer and facts. To be written with by this object only."""
        return self._llm

    @property
    def prefix_stats(self) -> PrefixStats:
        """How much of prompts was not read again, since a text before began as they do."""
        return self._llm.prefix_stats

    @property
    def num_running(self) -> int:
        """Texts that are being written."""
        return len(self._llm.engine.running)

    @property
    def num_waiting(self) -> int:
        """Texts that wait for a place."""
        return len(self._llm.engine.waiting)

    async def generate(
        self, prompt: Prompt | Messages, params: SamplingParams | None = None, *, priority: int = 0, wait: bool = True
    ) -> list[Completion]:
        """Write the n texts of one prompt. Cancelling the task aborts them.

        Args:
            prompt: a text, token ids, or the messages of a conversation.
            params: sampling parameters.
            priority: lower numbers are served first.
            wait: whether to wait while the queue is full.

        Raises:
            InvalidRequestError: a prompt or parameter that cannot be honoured.
            QueueFullError: the queue is full, and `wait` is False.
            EngineClosedError: it was closed, or broke down.
            GenerationError: the request failed while it was written; its `completions` holds what it gave.
        """
        request = await self._request(prompt, one_params(params), priority)
        try:
            self._driver.ask(request, wait=wait)
            for listener in request.listeners:
                while not (await listener.next()).is_last:
                    pass
        finally:
            self._driver.leave(request)
        written = [s for s in request.sequences if s.finish_reason is not FinishReason.ERROR]
        done = [completion_of(sequence, prompt_index=0) for sequence in written]
        raise_failures(request.sequences, done)
        return done

    async def chat(
        self, messages: Messages, params: SamplingParams | None = None, *, priority: int = 0, wait: bool = True
    ) -> list[Completion]:
        """Answer one conversation by the model's chat template: its n texts. Cancelling the task aborts them.

        Args:
            messages: dictionaries with "role" and "content".
            params: as for `generate`.
            priority: as for `generate`.
            wait: as for `generate`.

        Raises:
            InvalidRequestError: malformed messages, or a model without a chat template.
            DraftreeError: as `generate`.
        """
        require_one_conversation(messages)
        return await self.generate(messages, params, priority=priority, wait=wait)

    async def stream(
        self, prompt: Prompt | Messages, params: SamplingParams | None = None, *, priority: int = 0, wait: bool = True
    ) -> AsyncGenerator[str, None]:
        """Write one text and yield its pieces as they are verified. Closing the generator aborts it.

        Args:
            prompt: as for `generate`.
            params: sampling parameters, n=1.
            priority: as for `generate`.
            wait: as for `generate`.

        Raises:
            DraftreeError: as `generate`.
        """
        updates = self.stream_updates(prompt, params, priority=priority, wait=wait)
        try:
            async for update in updates:
                text = "".join(piece.text for piece in update.pieces)
                if text:
                    yield text
        finally:
            await updates.aclose()

    async def stream_updates(
        self, prompt: Prompt | Messages, params: SamplingParams | None = None, *, priority: int = 0, wait: bool = True
    ) -> AsyncGenerator[Update, None]:
        """As `stream`, with what was drafted and what was picked told apart.

        The last update's sequence is finished; `completion_of` makes a completion of it.
        """
        given = one_params(params)
        require_single(given)
        request = await self._request(prompt, given, priority)
        (listener,) = request.listeners
        try:
            self._driver.ask(request, wait=wait)
            while True:
                update = await listener.next()
                if update.is_last and update.sequence.error is not None:
                    raise update.sequence.error
                yield update
                if update.is_last:
                    return
        finally:
            self._driver.leave(request)

    async def _request(self, prompt: Prompt | Messages, params: SamplingParams, priority: int) -> Request:
        requests = self._llm.requests

        def make() -> list[WritingSequence]:
            with self._encoding:
                return requests.sequences(requests.encode(prompt), params, priority=priority)

        loop = asyncio.get_running_loop()
        if not requests.has_grammar(params):
            # on threads of its own and without the lock: a grammar may take long to compile
            await loop.run_in_executor(self._compiling, requests.compile_grammar, params, self._encoding)
        # long prompts take long to encode: the loop goes on
        return Request(await asyncio.to_thread(make), loop)

    async def forget(self) -> None:
        """Drop what is remembered of earlier requests. No text depends on it, only how fast it comes."""
        await asyncio.wrap_future(self._driver.call(self._llm.forget))

    async def drain(self) -> None:
        """Take no more requests, and return when all that were taken are written."""
        await asyncio.wrap_future(self._driver.drain())

    async def close(self) -> None:
        """Take no more requests, end those that are there with `EngineClosedError`, and let the thread go."""
        await asyncio.to_thread(self._driver.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def require_one_conversation(messages: object) -> None:
    """Refuse what is no list of messages; `generate` would read a text or token ids as a prompt."""
    if isinstance(messages, list | tuple) and messages and isinstance(messages[0], list | tuple):
        raise InvalidRequestError(
            f"chat takes one conversation a call, and this is a list of {len(messages)}: "
            "call it once for each, as with asyncio.gather"
        )
    check_messages(messages)
