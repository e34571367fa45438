"""asyncio front end for concurrent requests: one engine on one thread, and coroutines that await their texts.

Example:
    >>> async with AsyncLLM("smollm2-135m-instruct", draft="ngram") as llm:  # doctest: +SKIP
    ...     async for piece in llm.stream("Once upon a time"):
    ...         print(piece, end="")
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, Self

from draftree.arguments import (
    Messages,
    Prompt,
    one_params,
    require_count,
    require_one_conversation,
    require_single,
    require_text,
)
from draftree.completion import Completion
from draftree.core.errors import InvalidRequestError
from draftree.core.types import RoundRecord
from draftree.engine.prefix_cache import PrefixStats
from draftree.engine.sequence import Update, WritingSequence
from draftree.engine.serving.driver import Driver
from draftree.engine.serving.listening import Request
from draftree.llm import LLM
from draftree.sampling.params import SamplingParams
from draftree.submission import Submission
from draftree.text.tokenizer import Tokenizer

COMPILING_THREADS = 4
"""Number of requests whose grammars compile concurrently, waiting ones included."""
MAX_WAITING = 256
"""Default limit of sequences that wait for the engine."""


class AsyncLLM:
    """An `LLM` for asyncio with continuous batching: requests join and leave while others run.

    The model runs on its own thread. A slow or vanished reader delays no other request: its unread output is buffered,
    and no text is longer than its `max_tokens`.

    Args:
        model: as for `LLM`.
        draft: as for `LLM`.
        max_waiting: maximum number of waiting sequences. Beyond it requests wait to be queued, or with `wait=False`
            raise QueueFullError.
        **options: all other arguments of `LLM`.

    Raises:
        DraftreeError: as `LLM`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Any,
        draft: str | Sequence[str] | None = None,
        *,
        max_waiting: int = MAX_WAITING,
        **options: Any,
    ) -> None:
        require_count("max_waiting", max_waiting, least=0)
        self._llm = LLM(model, draft, **options)
        self._llm.engine.max_waiting = max_waiting
        # tokenizers are not safe for concurrent use
        self._encoding = threading.Lock()
        self._compiling = ThreadPoolExecutor(COMPILING_THREADS, thread_name_prefix="draftree-compiling")
        self._driver = Driver(self._llm.engine)

    @property
    def llm(self) -> LLM:
        """The wrapped `LLM`: its model, tokenizer and facts. Only this object may generate with it."""
        return self._llm

    @property
    def prefix_stats(self) -> PrefixStats:
        """Prompt tokens that were not prefilled, because a cached prefix matched."""
        return self._llm.prefix_stats

    @property
    def is_alive(self) -> bool:
        """Whether the engine works: it has not failed, and is not closed."""
        return self._driver.is_alive

    @property
    def num_running(self) -> int:
        """Number of running sequences."""
        return len(self._llm.engine.running)

    @property
    def num_waiting(self) -> int:
        """Number of waiting sequences."""
        return len(self._llm.engine.waiting)

    def on_round(self, callback: Callable[[RoundRecord], None]) -> Callable[[], None]:
        """Add a listener, which is called on the engine's thread with the record of every round and delays the next.

        Returns:
            A function that removes it.
        """
        return self._llm.engine.on_round(callback)

    async def submit(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        *,
        draft: str | None = None,
        priority: int = 0,
        wait: bool = True,
        request_id: str | None = None,
        trace: bool = False,
    ) -> Submission:
        """Encode and queue a request, and return its updates. Cancelling the task aborts it.

        Args:
            prompt: a text, token ids, or the messages of a conversation.
            params: sampling parameters.
            draft: one of `LLM.drafts`, or "none" for plain decoding; None for the default.
            priority: lower numbers are served first.
            wait: whether to wait while the queue is full.
            request_id: name of the request in records and errors; None for a new one.
            trace: whether updates hold a record of every round of their sequence.

        Raises:
            InvalidRequestError: an invalid prompt or parameter.
            QueueFullError: the queue is full, and `wait` is False.
            EngineClosedError: the engine was closed, or failed.
        """
        requests, given = self._llm.requests, one_params(params)

        def make() -> list[WritingSequence]:
            with self._encoding:
                ids = requests.encode(prompt)
                return requests.sequences(
                    ids, given, draft=draft, priority=priority, request_id=request_id, trace=trace
                )

        loop = asyncio.get_running_loop()
        if not requests.has_grammar(given):
            # on separate threads and without the lock: a grammar may take long to compile
            await loop.run_in_executor(self._compiling, requests.compile_grammar, given, self._encoding)
        # long prompts take long to encode: the event loop stays free
        request = Request(await asyncio.to_thread(make), loop)
        try:
            self._driver.ask(request, wait=wait)
            await request.accepted()
        except BaseException:
            self._driver.leave(request)
            raise
        return Submission(request, self._driver.leave)

    async def generate(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        *,
        draft: str | None = None,
        priority: int = 0,
        wait: bool = True,
    ) -> list[Completion]:
        """Generate the n completions of one prompt. Cancelling the task aborts them.

        Args:
            prompt: as for `submit`.
            params: sampling parameters.
            draft: as for `submit`.
            priority: as for `submit`.
            wait: as for `submit`.

        Raises:
            DraftreeError: as `submit`.
            GenerationError: the request failed during generation; its `completions` holds the finished texts.
        """
        async with await self.submit(prompt, params, draft=draft, priority=priority, wait=wait) as submission:
            async for _ in submission:
                pass
        return submission.completions()

    async def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        draft: str | None = None,
        priority: int = 0,
        wait: bool = True,
    ) -> list[Completion]:
        """Answer one conversation with the model's chat template. Cancelling the task aborts the request.

        Args:
            messages: dictionaries with "role" and "content".
            params: as for `generate`.
            draft: as for `submit`.
            priority: as for `submit`.
            wait: as for `submit`.

        Raises:
            InvalidRequestError: malformed messages, or a model without a chat template.
            DraftreeError: as `generate`.
        """
        require_one_conversation(messages)
        return await self.generate(messages, params, draft=draft, priority=priority, wait=wait)

    async def stream(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        *,
        draft: str | None = None,
        priority: int = 0,
        wait: bool = True,
    ) -> AsyncGenerator[str, None]:
        """Generate one text and yield its pieces as they are verified. Closing the generator aborts the request.

        Args:
            prompt: as for `submit`.
            params: sampling parameters, n=1, with `detokenize`.
            draft: as for `submit`.
            priority: as for `submit`.
            wait: as for `submit`.

        Raises:
            DraftreeError: as `generate`.
        """
        require_text(one_params(params))
        updates = self.stream_updates(prompt, params, draft=draft, priority=priority, wait=wait)
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
    ) -> AsyncGenerator[Update, None]:
        """Stream as `stream`, with token ids, and with accepted and picked text distinguished.

        The last update's sequence is finished; `completion_of` converts it to a completion.
        """
        given = one_params(params)
        require_single(given)
        async with await self.submit(prompt, given, draft=draft, priority=priority, wait=wait) as submission:
            async for update in submission:
                if update.sequence.error is not None and update.is_last:
                    raise update.sequence.error
                yield update

    async def encode(self, prompt: Prompt | Messages) -> list[int]:
        """Return the token ids of a prompt; messages are formatted by the model's chat template.

        Raises:
            InvalidRequestError: an invalid prompt.
        """
        return await asyncio.to_thread(self._locked, self._llm.requests.encode, prompt)

    async def encode_chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Return the token ids of a conversation, formatted by the model's chat template.

        Args:
            messages: the conversation.
            tools: functions that the model may call, in OpenAI's form.
            template_kwargs: further variables of the template.
            add_generation_prompt: append the header of the assistant's answer.
            continue_final_message: leave the last message, one of the assistant, open to be continued.

        Raises:
            InvalidRequestError: a conversation, tools or variables that the template cannot take.
        """
        given: dict[str, Any] = {"tools": tools, "template_kwargs": template_kwargs}
        requests = self._llm.requests
        if continue_final_message:
            encode = partial(requests.encode_open_chat, messages, **given)
        else:
            encode = partial(requests.encode_chat, messages, **given, add_generation_prompt=add_generation_prompt)
        found: list[int] = await asyncio.to_thread(self._locked, encode)
        return found

    async def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, which may be empty.

        Args:
            text: the text.
            add_special_tokens: add the tokens that the model expects around a prompt, such as BOS.

        Raises:
            InvalidRequestError: no tokenizer, or a text that is not valid Unicode.
        """
        tokenizer = self._llm.tokenizer
        if tokenizer is None:
            raise InvalidRequestError("a text cannot be encoded: this model has no tokenizer", param="text")
        return await asyncio.to_thread(self._locked, tokenizer.encode, text, add_special_tokens)

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids; bytes that form no character become U+FFFD.

        Raises:
            InvalidRequestError: the model has no tokenizer, or an id is outside the vocabulary.
        """
        return await asyncio.to_thread(self._locked, self._llm.requests.decode, ids, skip_special_tokens)

    async def with_tokenizer(self, action: Callable[[Tokenizer | None], Any]) -> Any:
        """Run an action that uses the tokenizer, on a thread and while nothing else uses it."""
        return await asyncio.to_thread(self._locked, action, self._llm.tokenizer)

    def _locked(self, action: Callable[..., Any], *args: Any) -> Any:
        with self._encoding:
            return action(*args)

    async def forget(self) -> None:
        """Drop the state of earlier requests (prefix cache, drafter statistics). Affects speed only, never a text."""
        await asyncio.wrap_future(self._driver.call(self._llm.forget))

    async def ping(self) -> None:
        """Return when the engine's thread is between two steps: it is alive, and its steps end.

        Raises:
            EngineClosedError: the engine was closed, or failed.
        """
        await asyncio.wrap_future(self._driver.call(lambda: None))

    async def drain(self) -> None:
        """Accept no more requests, and return when all accepted requests are finished."""
        await asyncio.wrap_future(self._driver.drain())

    async def close(self) -> None:
        """Accept no more requests, end unfinished ones with `EngineClosedError`, and stop the thread."""
        await asyncio.to_thread(self._driver.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
