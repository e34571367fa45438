"""asyncio front end for concurrent requests: one engine on one thread, and coroutines that await their texts.

Example:
    >>> async with AsyncLLM("smollm2-135m-instruct", draft="ngram") as llm:  # doctest: +SKIP
    ...     async for piece in llm.stream("Once upon a time"):
    ...         print(piece, end="")
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, NoReturn, Self, Unpack

from draftree.arguments import (
    Messages,
    Prompt,
    one_params,
    require_one_conversation,
)
from draftree.async_beams import AsyncBeamSearching, BeamWork
from draftree.async_given import AsyncGiven
from draftree.async_prompts import AsyncPromptEncoder, is_long
from draftree.async_speech import AsyncSpeech
from draftree.async_streaming import AsyncStreams
from draftree.completion import Completion
from draftree.core.types import RoundRecord
from draftree.drafters import AUTO_DRAFT
from draftree.engine.embedding import Embedding
from draftree.engine.engine import require_count
from draftree.engine.given import GivenTrees
from draftree.engine.prefix_cache import PrefixStats
from draftree.engine.sequence import WritingSequence
from draftree.engine.serving.driver import Driver
from draftree.engine.serving.listening import Request
from draftree.llm import LLM
from draftree.models.source import FeatureSource
from draftree.parallel.entry import on_loss
from draftree.prompts import DecoderOptions
from draftree.sampling.params import SamplingParams
from draftree.submission import Submission

COMPILING_THREADS = 4
"""Number of requests whose grammars compile concurrently, waiting ones included."""
MAX_WAITING = 256
"""Default limit of sequences that wait for the engine."""


class AsyncLLM(AsyncStreams, AsyncBeamSearching, AsyncGiven, AsyncSpeech):
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
        draft: str | Sequence[str] | None = AUTO_DRAFT,
        *,
        max_waiting: int = MAX_WAITING,
        **options: Any,
    ) -> None:
        require_count("max_waiting", max_waiting, least=0)
        self._llm = LLM(model, draft, **options)
        self._llm.engine.max_waiting = max_waiting
        self._prompts = AsyncPromptEncoder(self._llm.prompts)
        self._compiling = ThreadPoolExecutor(COMPILING_THREADS, thread_name_prefix="draftree-compiling")
        self._beams = BeamWork(self._llm.engine, self._llm.tokenizer, self._llm.requests.eos_ids)
        self._driver = Driver(self._llm.engine, self._beams)
        self._stop_watching = on_loss(self._llm.model, self._driver.lose)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to pickle or copy."""
        raise TypeError("an AsyncLLM can be neither pickled nor copied: create another one with the same arguments")

    @property
    def llm(self) -> LLM:
        """The wrapped `LLM`: its model, tokenizer and facts. Only this object may generate with it."""
        return self._llm

    @property
    def prompts(self) -> AsyncPromptEncoder:
        """The encoder of prompts and conversations."""
        return self._prompts

    @property
    def prefix_stats(self) -> PrefixStats:
        """Prompt tokens that were not prefilled, because a cached prefix matched."""
        return self._llm.prefix_stats

    @property
    def is_alive(self) -> bool:
        """Whether the engine works: it has not failed, and is not closed."""
        return self._driver.is_alive

    @property
    def failure(self) -> BaseException | None:
        """Why the engine failed, such as a `RankError`; None as long as it works, and after `close`."""
        return self._driver.failure

    @property
    def num_running(self) -> int:
        """Number of running sequences."""
        return len(self._llm.engine.running)

    @property
    def num_waiting(self) -> int:
        """Number of waiting sequences."""
        return len(self._llm.engine.waiting)

    def on_round(self, callback: Callable[[RoundRecord], None]) -> Callable[[], None]:
        """Add a listener of every round's record, called on the engine's thread; returns a function that removes it."""
        return self._llm.engine.on_round(callback)

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
        given: GivenTrees | None = None,
        written: Sequence[int] = (),
        **decoder: Unpack[DecoderOptions],
    ) -> Submission:
        """Encode and queue a request, and return its updates. Cancelling the task aborts it.

        Args:
            prompt: a text, token ids, the messages of a conversation, or the features of sound.
            params: sampling parameters.
            draft: one of `LLM.drafts`, or "none" for plain decoding; None for the default.
            priority: lower numbers are served first.
            wait: whether to wait while the queue is full.
            request_id: name of the request in records and errors; None for a new one.
            trace: whether updates hold a record of every round of their sequence.
            owner: whose text it is, for drafters that learn; None to leave it out.
            given: trees that `give` supplies, in place of a drafter; for one text with draft "none".
            written: tokens of the text that were written before, elsewhere.
            **decoder: `decoder_prompt`, `source_lang` and `target_lang` as for `LLM.generate`.

        Raises:
            InvalidRequestError: an invalid prompt or parameter.
            QueueFullError: the queue is full, and `wait` is False.
            EngineClosedError: the engine was closed, or failed.
        """
        requests, checked = self._llm.requests, one_params(params)
        spoken = decoder.get("source_lang")
        most = requests.longest_prompt(checked)
        if not isinstance(prompt, FeatureSource) and is_long(prompt):
            prompt = await self._prompts.encode(prompt, source_lang=spoken, most=most)
            spoken = None  # the prompt is token ids now

        def make() -> list[WritingSequence]:
            start = self._llm.prompts.encode_start(decoder)
            ids = (
                prompt
                if isinstance(prompt, FeatureSource)
                else self._llm.prompts.encode(prompt, source_lang=spoken, most=most)
            )
            told: dict[str, Any] = {"request_id": request_id, "trace": trace, "owner": owner}
            made = requests.sequences(ids, checked, draft=draft, priority=priority, decoder_prompt=start, **told)
            for sequence in made:
                sequence.given = given
                if written:
                    sequence.write(written, 0)
            return made

        loop = asyncio.get_running_loop()
        if not requests.has_grammar(checked):
            # on separate threads: a grammar may take long to compile
            await loop.run_in_executor(self._compiling, requests.compile_grammar, checked)
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
        **decoder: Unpack[DecoderOptions],
    ) -> list[Completion]:
        """Generate the n completions of one prompt. Cancelling the task aborts them.

        Args:
            prompt: as for `submit`.
            params: sampling parameters.
            draft: as for `submit`.
            priority: as for `submit`.
            wait: as for `submit`.
            **decoder: as for `submit`.

        Raises:
            DraftreeError: as `submit`.
            GenerationError: the request failed during generation; its `completions` holds the finished texts.
        """
        async with await self.submit(
            prompt, params, draft=draft, priority=priority, wait=wait, **decoder
        ) as submission:
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
        **decoder: Unpack[DecoderOptions],
    ) -> list[Completion]:
        """Answer one conversation with the model's chat template. Cancelling the task aborts the request.

        Args:
            messages: dictionaries with "role" and "content".
            params: as for `generate`.
            draft: as for `submit`.
            priority: as for `submit`.
            wait: as for `submit`.
            **decoder: as for `LLM.chat`.

        Raises:
            InvalidRequestError: malformed messages, or a model without a chat template.
            DraftreeError: as `generate`.
        """
        require_one_conversation(messages)
        return await self.generate(messages, params, draft=draft, priority=priority, wait=wait, **decoder)

    async def embed(self, prompt: Prompt, *, pooling: str = "mean") -> list[float]:
        """Return the embedding of one text: its hidden states after the final norm, pooled and scaled to length 1.

        Language models are not trained for it: models for embeddings find similar texts much better.

        Args:
            prompt: a text, or token ids.
            pooling: "mean" of all tokens, or the "last" token.

        Raises:
            InvalidRequestError: an invalid prompt, or a model that does not return its hidden states.
            EngineClosedError: the engine was closed, or failed.
        """
        work = Embedding(self._llm.model, await self._prompts.encode(prompt), pooling=pooling)
        try:
            while (found := await asyncio.wrap_future(self._driver.call(work.step))) is None:
                pass
            return found.tolist()
        finally:
            self._driver.call(work.close)

    async def forget(self, *, learned: bool = True) -> None:
        """Drop the state of earlier requests, as `LLM.forget`."""
        await asyncio.wrap_future(self._driver.call(lambda: self._llm.forget(learned=learned)))

    async def ping(self) -> None:
        """Return when the engine's thread is between two steps; raise EngineClosedError if it was closed or failed."""
        await asyncio.wrap_future(self._driver.call(lambda: None))

    async def drain(self) -> None:
        """Accept no more requests, and return when all accepted requests are finished."""
        await asyncio.wrap_future(self._driver.drain())

    async def close(self) -> None:
        """End unfinished requests with `EngineClosedError`, stop the thread, and save what was learned."""
        await asyncio.to_thread(self._driver.close)
        self._stop_watching()
        if self._llm.learned is not None:
            await asyncio.to_thread(self._llm.learned.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
