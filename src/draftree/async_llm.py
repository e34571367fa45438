"""asyncio front end for concurrent requests: one engine on one thread, and coroutines that await their texts.

Example:
    >>> async with AsyncLLM("smollm2-135m-instruct", draft="ngram") as llm:  # doctest: +SKIP
    ...     async for piece in llm.stream("Once upon a time"):
    ...         print(piece, end="")
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, Self, TypeVar, Unpack, final

import torch
from torch import Tensor

from draftree.beam.background import BeamCounts, BeamWork
from draftree.beam.params import BeamSearchParams
from draftree.beam.result import BeamResult
from draftree.beam.searcher import beam_opening
from draftree.build import costs_of
from draftree.core.errors import GenerationError, InvalidRequestError, UnsupportedModelError
from draftree.core.tree import TokenTree
from draftree.core.types import RoundRecord
from draftree.engine.driver import Driver, RequestHandle
from draftree.engine.prefix_cache import PrefixStats
from draftree.engine.prompts import AsyncPromptEncoder, is_long
from draftree.engine.sequence import FinishReason, Update, WritingSequence
from draftree.llm import LLM
from draftree.models.base import Extend, LanguageModel, Pass, Slot
from draftree.models.images import refuse_images
from draftree.models.source import FeatureSource
from draftree.options import (
    DecoderOptions,
    Messages,
    ModelOptions,
    Prompt,
    RequestKeywords,
    RequestOptions,
    require_decoder_options,
    require_one_conversation,
    takes_arguments_of,
)
from draftree.outputs import Completion, completions_of
from draftree.parallel.entry import on_loss
from draftree.sampling.params import SamplingParams
from draftree.speech.transcriber import Detection, Speech
from draftree.speech.windows import LongSpeech, window_at

T = TypeVar("T")


@final
class Submission:
    """A request in the engine: an async iterator of the updates of its n texts, in order of arrival.

    The iteration ends when all texts are finished. A slow reader receives all unread output of a text in one update.
    A text that fails alone has its error in `Update.sequence.error`; `completions` raises it. Leaving the context, or
    `aclose`, aborts unfinished texts.

    Args:
        request: accepted by the engine.
        leave: aborts the unfinished sequences of a request.
    """

    def __init__(self, request: RequestHandle, leave: Callable[[RequestHandle], None]) -> None:
        self._request = request
        self._leave = leave

    @property
    def request_id(self) -> str:
        """The name of the request in records, errors and updates."""
        return self.sequences[0].request_id

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Token ids of the prompt, after truncation."""
        return self.sequences[0].prompt_ids

    @property
    def decoder_prompt_ids(self) -> tuple[int, ...]:
        """Token ids that the text continues: those of the prompt, or the decoder's prompt if the prompt is a source."""
        history = self.sequences[0].history
        return tuple(history.tokens[: history.prompt_length].tolist())

    @property
    def sequences(self) -> tuple[WritingSequence, ...]:
        """The n sequences; written on the engine's thread until they are finished."""
        return self._request.sequences

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Update:
        update = await self._request.next()
        if update is None:
            raise StopAsyncIteration
        return update

    def completions(self) -> list[Completion]:
        """Return the n completions, in the order of their index; call it after the last update.

        Raises:
            GenerationError: the updates were not read to the end, or the request was aborted.
            DraftreeError: as `AsyncLLM.generate`.
        """
        if not self._request.is_over or any(s.finish_reason is FinishReason.ABORT for s in self.sequences):
            raise GenerationError(
                f"request {self.request_id} is not finished, or was aborted: read its updates to the end first"
            )
        return completions_of([self.sequences])

    async def aclose(self) -> None:
        """Abort unfinished texts within one round; does not wait for it."""
        self._leave(self._request)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()


POOLINGS = ("mean", "last")
CHUNK = 128
"""Tokens of one step, which delays the next round of other requests."""


@final
class Embedding:
    """Computes the embedding of one text in short steps, on the thread of the engine's passes. Mutated by `step`.

    Args:
        model: the model.
        ids: token ids of the text, at least one.
        pooling: "mean" of all tokens, or the "last" token.

    Raises:
        InvalidRequestError: an unknown pooling, a text that does not fit, or a model that does not return its states.
    """

    def __init__(self, model: LanguageModel, ids: Sequence[int], *, pooling: str) -> None:
        if pooling not in POOLINGS:
            raise InvalidRequestError(
                f"pooling is {pooling!r}: use {' or '.join(map(repr, POOLINGS))}", param="pooling"
            )
        refuse_images(ids, "an embedding")
        if not 0 < len(ids) <= model.max_length:
            raise InvalidRequestError(
                f"a text of {len(ids)} tokens was given: 1 to {model.max_length} can be embedded", param="prompt"
            )
        try:
            if not model.num_layers:
                raise UnsupportedModelError(f"{type(model).__name__} has no layers whose states could be returned")
            model.require_capture((model.num_layers,))
        except UnsupportedModelError as error:
            raise InvalidRequestError(f"this model computes no embeddings: {error}", param="model") from error
        self._model, self._ids, self._pooling = model, list(ids), pooling
        self._slot: Slot | None = None
        self._num_read = 0
        self._sum: Tensor | None = None

    def step(self) -> Tensor | None:
        """Read the next tokens; return the embedding after the last ones, of length 1, shape (hidden,), float32."""
        return self._model.lock.run(self._step)

    def _step(self) -> Tensor | None:
        model = self._model
        if self._slot is None:
            model.reserve(model.num_open + 1, len(self._ids))
            self._slot = model.open()
        tokens = self._ids[self._num_read : self._num_read + CHUNK]
        job = Extend(self._slot, tokens, range(-1, len(tokens) - 1), logits_at=(), settled=len(tokens))
        result = model.run(Pass([job], capture=(model.num_layers,)))
        states = model.final_norm(result.hidden_of(0)[:, 0])
        model.commit(self._slot, range(len(tokens)))
        self._num_read += len(tokens)
        if self._pooling == "last":
            self._sum = states[-1]
        else:
            self._sum = states.sum(dim=0) if self._sum is None else self._sum + states.sum(dim=0)
        if self._num_read < len(self._ids):
            return None
        return torch.nn.functional.normalize(self._sum.float(), dim=0).cpu()

    def close(self) -> None:
        """Free the slot."""
        if self._slot is not None:
            self._model.lock.between(partial(self._model.close, self._slot))
            self._slot = None


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
        max_waiting: maximum number of waiting sequences, 256 if it is not given. Beyond it requests wait to be queued,
            or with `wait=False` raise QueueFullError.
        **options: all other arguments of `LLM`.

    Raises:
        DraftreeError: as `LLM`.
    """

    @takes_arguments_of(ModelOptions)
    def __init__(self, options: ModelOptions) -> None:
        waiting = MAX_WAITING if options.max_waiting is None else options.max_waiting
        self._llm = LLM(options, max_waiting=waiting)
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
        wait: bool = True,
        **options: Unpack[RequestKeywords],
    ) -> Submission:
        """Encode and queue a request, and return its updates. Cancelling the task aborts it.

        Args:
            prompt: a text, token ids, the messages of a conversation, or the features of sound.
            params: sampling parameters.
            wait: whether to wait while the queue is full.
            **options: as for `LLM.generate`.

        Raises:
            InvalidRequestError: an invalid prompt or parameter.
            QueueFullError: the queue is full, and `wait` is False.
            EngineClosedError: the engine was closed, or failed.
        """
        requests = self._llm.requests
        prompts = self._llm.prompts
        request_options = RequestOptions.of(params, **options)
        most = requests.longest_prompt(request_options)
        if not isinstance(prompt, FeatureSource) and is_long(prompt):
            prompt = await self._prompts.encode(prompt, source_lang=request_options.source_lang, most=most)
            request_options = replace(request_options, source_lang=None)  # the prompt is token ids now

        def make() -> list[WritingSequence]:
            started = prompts.with_start(request_options)
            if isinstance(prompt, FeatureSource):
                return requests.sequences(prompt, started)
            ids = prompts.encode(prompt, source_lang=request_options.source_lang, most=most)
            return requests.sequences(ids, started)

        loop = asyncio.get_running_loop()
        if not requests.has_grammar(request_options):
            # on separate threads: a grammar may take long to compile
            await loop.run_in_executor(self._compiling, requests.compile_grammar, request_options)
        # long prompts take long to encode: the event loop stays free
        request = RequestHandle(await asyncio.to_thread(make), loop)
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
        wait: bool = True,
        **options: Unpack[RequestKeywords],
    ) -> list[Completion]:
        """Generate the n completions of one prompt. Cancelling the task aborts them.

        Args:
            prompt: as for `submit`.
            params: sampling parameters.
            wait: as for `submit`.
            **options: as for `submit`.

        Raises:
            DraftreeError: as `submit`.
            GenerationError: the request failed during generation; its `completions` holds the finished texts.
        """
        async with await self.submit(prompt, params, wait=wait, **options) as submission:
            async for _ in submission:
                pass
        return submission.completions()

    async def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        wait: bool = True,
        **options: Unpack[RequestKeywords],
    ) -> list[Completion]:
        """Answer one conversation with the model's chat template. Cancelling the task aborts the request.

        Args:
            messages: dictionaries with "role" and "content".
            params: as for `generate`.
            wait: as for `submit`.
            **options: as for `LLM.chat`.

        Raises:
            InvalidRequestError: malformed messages, or a model without a chat template.
            DraftreeError: as `generate`.
        """
        require_one_conversation(messages)
        return await self.generate(messages, params, wait=wait, **options)

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
            while (embedding := await asyncio.wrap_future(self._driver.call(work.step))) is None:
                pass
            return embedding.tolist()
        finally:
            self._driver.call(work.close)

    async def stream(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        *,
        wait: bool = True,
        **options: Unpack[RequestKeywords],
    ) -> AsyncGenerator[str, None]:
        """Generate one text and yield its pieces as they are verified. Closing the generator aborts the request.

        Args:
            prompt: as for `submit`.
            params: sampling parameters, n=1, with `detokenize`.
            wait: as for `submit`.
            **options: as for `submit`.

        Raises:
            DraftreeError: as `generate`.
        """
        request = RequestOptions.of(params, **options)
        request.require_text()
        updates = self.stream_updates(prompt, request, wait=wait)
        try:
            async for update in updates:
                if text := "".join(piece.text for piece in update.pieces):
                    yield text
        finally:
            await updates.aclose()

    async def stream_updates(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        *,
        wait: bool = True,
        **options: Unpack[RequestKeywords],
    ) -> AsyncGenerator[Update, None]:
        """Stream as `stream`, with token ids, and with accepted text and target tokens distinguished.

        The last update's sequence is finished; `completion_of` converts it to a completion.
        """
        request = RequestOptions.of(params, **options)
        request.require_single()
        async with await self.submit(prompt, request, wait=wait) as submission:
            async for update in submission:
                if update.sequence.error is not None and update.is_last:
                    raise update.sequence.error
                yield update

    @property
    def beam_counts(self) -> BeamCounts:
        """Counts of the beam searches so far."""
        return self._beams.counts

    async def beam_search(
        self,
        prompt: Prompt | Messages,
        params: BeamSearchParams | None = None,
        **decoder: Unpack[DecoderOptions],
    ) -> BeamResult:
        """Search the most likely texts of one prompt, beside all other requests. Cancelling the task ends the search.

        Several searches at the same time share their passes. Rounds of other requests and steps of searches take
        turns, so that searches get at most half of the time while other requests run.

        Args:
            prompt: a text, token ids, or the messages of a conversation.
            params: parameters of the search.
            **decoder: as for `LLM.beam_search`.

        Raises:
            InvalidRequestError: an invalid prompt or parameter.
            GenerationError: as `LLM.beam_search`.
            EngineClosedError: the engine was closed, or failed.
        """
        if not isinstance(params, BeamSearchParams | None):
            raise InvalidRequestError(f"params is a {type(params).__name__}: give BeamSearchParams", param="params")
        require_decoder_options(decoder)
        start = await self._prompts.encode_start(RequestOptions(**decoder))
        ids = await self._prompts.encode(prompt, source_lang=decoder.get("source_lang"))
        opening = beam_opening(self._beams.model, ids, start)
        promise: Future[BeamResult] = Future()
        promise.set_running_or_notify_cancel()  # the engine's thread writes it even without a reader
        try:
            added = self._driver.call(
                lambda: self._beams.add(opening, params or BeamSearchParams(), promise), is_new_work=True
            )
            await asyncio.wrap_future(added)
            return await asyncio.wrap_future(promise)
        except BaseException:
            self._driver.call(lambda: self._beams.cancel(promise))
            raise

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
        source = window_at(work, features)
        detected = await asyncio.wrap_future(self._driver.call(lambda: work.detect(source)))
        return await self._prompts.with_tokenizer(lambda _: LongSpeech(work, features, speech, detected=detected))

    async def give(self, submission: Submission, tree: TokenTree) -> None:
        """Give a submission with `drafted_by_client` the tree of its next round."""
        (sequence,), paused = submission.sequences, self._llm.engine.paused
        arrived = paused.batcher.clock()
        await self.between_steps(lambda: paused.give(sequence, tree, arrived=arrived))

    async def park(self, submission: Submission) -> None:
        """Free the slot of a submission that waits for a tree; its beginning stays a cached prefix for a while."""
        (sequence,) = submission.sequences
        await self.between_steps(lambda: self._llm.engine.paused.park(sequence))

    async def between_steps(self, action: Callable[[], T]) -> T:
        """Return the result of an action on the engine's thread, which may use the model, between two steps.

        Raises:
            EngineClosedError: the engine was closed, or failed.
        """
        return await asyncio.wrap_future(self._driver.call(lambda: self._llm.engine.lock.run(action)))

    async def pass_costs(self, max_rows: int) -> Mapping[int, float]:
        """Return seconds of the target's passes by rows, up to at least `max_rows`; measured once."""
        model = self._llm.model
        batcher = self._llm.engine.paused.batcher

        def measured() -> Mapping[int, float]:
            costs = costs_of(model, max_rows=max_rows)
            batcher.fixed = costs[min(costs)]
            return costs

        return await self.between_steps(measured)

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

    async def __aexit__(self, *error: object) -> None:
        await self.close()
