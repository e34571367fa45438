"""Threads that share a model get the texts that each gets alone; copies and forked processes are refused."""

from __future__ import annotations

import asyncio
import copy
import ctypes
import os
import pickle
import signal
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from draftree import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from draftree.core.errors import EngineClosedError, GenerationError, ModelError
from draftree.text.tokenizer import Tokenizer
from families import prompts, target

PROMPTS = prompts(3, 30, 1, 11, 7)
DRAFTS = ("ngram,min=1", "suffix,floor=0")
NUM_THREADS = 8
Call = Callable[[LLM], Any]


def params(index: int) -> SamplingParams:
    return SamplingParams(max_tokens=4 + index % 9, temperature=float(index % 2), seed=index)


def call(index: int) -> Call:
    """One of sixty calls of several kinds."""
    prompt, given = PROMPTS[index % 5], params(index % 60)
    if index % 4 == 0:
        return lambda llm: [token for u in llm.stream_updates(prompt, given) for token in u.token_ids]
    if index % 6 == 1:
        search = BeamSearchParams(beam_width=2, max_new_tokens=5)
        return lambda llm: list(llm.beam_search(prompt, search)[0].hypotheses[0].tokens)
    return lambda llm: list(llm.generate(prompt, given, draft=(*llm.drafts, "none")[index % 3])[0].token_ids)


def test_threads_get_the_texts_of_one_thread() -> None:
    llm, calls = LLM(target("llama"), DRAFTS), [call(index) for index in range(60)]
    expected = [one(llm) for one in calls]
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        assert list(threads.map(lambda index: calls[index % 60](llm), range(1000))) == [
            expected[index % 60] for index in range(1000)
        ]
    llm.engine.check_integrity()


def test_several_llms_share_one_model() -> None:
    """A third one of them is created and dropped again and again meanwhile."""
    first, second = LLM(target("llama"), DRAFTS), LLM(target("llama"), DRAFTS)
    calls = [call(index) for index in range(60)]
    expected = [one(first) for one in calls]

    async def concurrently() -> list[Any]:
        async with AsyncLLM(target("llama"), DRAFTS[0]) as llm:
            done = [llm.generate(PROMPTS[index % 5], params(index)) for index in range(60)]
            states = [llm.embed(PROMPTS[index % 5]) for index in range(20)]
            texts, *vectors = await asyncio.gather(asyncio.gather(*done), *states)
            return [[list(one[0].token_ids) for one in texts], vectors]

    def brief(index: int) -> Any:
        return calls[index](LLM(target("llama"), DRAFTS))

    alone = asyncio.run(concurrently())
    with ThreadPoolExecutor(NUM_THREADS) as threads:
        beside = threads.submit(lambda: asyncio.run(concurrently()))
        texts = [list(threads.map(lambda one, llm=llm: one(llm), calls)) for llm in (first, second)]
        assert [*texts, list(threads.map(brief, range(60)))] == [expected] * 3
        assert beside.result() == alone
    first.engine.check_integrity()


def test_streams_are_read_alternately_by_two_threads() -> None:
    llm = LLM(target("llama"), DRAFTS[0])
    expected = [list(llm.generate(prompt, params(8))[0].token_ids) for prompt in PROMPTS[:2]]
    streams = [llm.stream_updates(prompt, params(8)) for prompt in PROMPTS[:2]]
    found: list[list[int]] = [[], []]
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        while streams[0] or streams[1]:
            for place, thread in enumerate((one, other)):
                update = thread.submit(next, streams[place], None).result() if streams[place] else None
                found[place] += () if update is None else update.token_ids
                streams[place] = streams[place] if update is not None else None  # type: ignore[call-overload]
    assert found == expected


def test_an_abandoned_stream_keeps_nothing() -> None:
    llm = LLM(target("llama"), DRAFTS[0])
    expected = llm.generate(PROMPTS[0], params(8))[0].token_ids
    stream: Any = llm.stream_updates(PROMPTS[1], params(8))
    next(stream)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(llm.generate, PROMPTS[0], params(8)).result()[0].token_ids == expected
    del stream
    assert llm.engine.is_idle
    llm.engine.check_integrity()


def test_a_stream_that_is_closed_within_a_step_ends_after_it() -> None:
    """As by the garbage collector, which may run at any place."""
    streams: list[Any] = []
    llm = LLM(
        target("llama"), DRAFTS[0], on_round=lambda record: streams.clear() if len(record.sequences) > 1 else None
    )
    expected = llm.generate(PROMPTS[0], params(8))[0].token_ids
    streams.append(llm.stream_updates(PROMPTS[1], params(8)))
    next(streams[0])
    assert llm.generate(PROMPTS[0], params(8))[0].token_ids == expected
    assert not streams
    assert llm.engine.is_idle
    llm.engine.check_integrity()


def test_exceptions_of_other_threads_leave_the_model_usable() -> None:
    llm = LLM(target("llama"), DRAFTS[0])
    expected = llm.generate(PROMPTS[1], params(8))[0].token_ids
    num_interrupted = 0

    def decode() -> None:
        nonlocal num_interrupted
        while num_interrupted < 20:
            try:
                while True:
                    llm.generate(PROMPTS[0], params(8))
            except KeyboardInterrupt:
                num_interrupted += 1

    thread = threading.Thread(target=decode)
    thread.start()
    while thread.is_alive():
        before = num_interrupted
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident or 0), ctypes.py_object(KeyboardInterrupt)
        )
        while thread.is_alive() and num_interrupted == before:
            time.sleep(0.001)
    assert llm.generate(PROMPTS[1], params(8))[0].token_ids == expected
    llm.engine.check_integrity()


def test_other_calls_of_an_interrupted_batch_are_told() -> None:
    interrupted = threading.Event()

    def interrupt(_: object) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt

    llm = LLM(target("llama"), DRAFTS[0], on_round=interrupt)
    stream = llm.stream_updates(PROMPTS[1], params(8))
    next(stream)
    interrupted.set()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS[0], params(8))
    with pytest.raises(GenerationError, match="KeyboardInterrupt interrupted the batch"):
        list(stream)


class ChangingBackend:
    """A tokenizer that sets an option for each call, as those of transformers do."""

    def encode(self, text: str, *, add_special_tokens: bool, split_special_tokens: bool = False, **_: Any) -> list[int]:
        self.split = split_special_tokens
        time.sleep(0.001)
        return [int(self.split)]


def test_options_of_a_tokenizer_are_those_of_the_call() -> None:
    backend = ChangingBackend()
    plain, literal = Tokenizer(backend), Tokenizer(backend)
    with ThreadPoolExecutor(2) as threads:
        spelled = threads.submit(lambda: [literal.encode_literally("a") for _ in range(30)])
        assert [plain.encode("a") for _ in range(30)] == [[0]] * 30
        assert spelled.result() == [[1]] * 30


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_are_refused(copied: Callable[[Any], Any]) -> None:
    llm = LLM(target("llama"), "none")
    for one in (llm, llm.model, AsyncLLM.__new__(AsyncLLM)):
        with pytest.raises(TypeError, match=f"{type(one).__name__} can be neither pickled nor copied"):
            copied(one)


def in_a_fork(action: Callable[[], Any]) -> bool:
    """Whether an action ends without an error in a forked process; one that hangs is ended."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads, from Python 3.12
        child = os.fork()
    if not child:
        signal.alarm(60)
        try:
            action()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_forked_processes_are_told() -> None:
    llm = LLM(target("llama"), "none")

    def check() -> None:
        for use in (lambda: llm.generate([1], params(0)), lambda: next(llm.stream_updates([1], params(0)))):
            with pytest.raises(ModelError, match="forked after the model was loaded"):
                use()

    async def parent() -> None:
        async with AsyncLLM(target("llama"), "none") as served:

            def child() -> None:
                with pytest.raises(EngineClosedError, match="forked after the engine was created"):
                    asyncio.new_event_loop().run_until_complete(served.generate([1], params(0)))

            assert await asyncio.to_thread(in_a_fork, child)

    assert in_a_fork(check)
    asyncio.run(parent())
