"""Grammars compile within a time limit, and delay only their own requests."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from async_samples import asynchronous
from draftree import AsyncLLM, SamplingParams
from draftree.core.errors import InvalidRequestError, QueueFullError
from draftree.models.table import TableLM, hashed
from draftree.sampling.grammar import compiler as compilations
from draftree.sampling.grammar.compiler import MAX_COMPILING, Compilations
from draftree.text.tokenizer import Tokenizer
from text_backends import byte_level


def result(size: int = 1) -> Any:
    return SimpleNamespace(memory_size_bytes=size)


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the longest time that a request waits for its grammar, in seconds."""
    return lambda seconds: monkeypatch.setattr(compilations, "COMPILE_SECONDS", seconds)


def test_a_result_is_kept_and_an_error_is_not() -> None:
    made: list[int] = []

    def task() -> Any:
        made.append(1)
        if len(made) == 1:
            raise ValueError("no")
        return result()

    kept = Compilations()
    with pytest.raises(ValueError, match="no"):
        kept.get(("regex", "a"), task)
    first = kept.get(("regex", "a"), task)
    assert kept.get(("regex", "a"), task) is first
    assert len(made) == 2
    assert kept.is_done(("regex", "a"))


def test_the_least_recently_used_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilations, "CACHE_BYTES", 10)
    kept = Compilations()
    for name in "abac":
        kept.get(("regex", name), lambda: result(4))
    assert [kept.is_done(("regex", name)) for name in "abc"] == [True, False, True]


def test_a_slow_compilation_continues_and_its_result_is_kept(patience: Callable[[float], None]) -> None:
    gate, kept = threading.Event(), Compilations()

    def task() -> Any:
        gate.wait(300)
        return result()

    patience(0.0)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            kept.get(("regex", "slow"), task)
    patience(300.0)
    assert kept.get(("regex", "fast"), result) is kept.get(("regex", "fast"), result)
    gate.set()
    kept.get(("regex", "slow"), task)
    assert kept.is_done(("regex", "slow"))


def test_beyond_so_many_others_wait_and_are_refused(patience: Callable[[float], None]) -> None:
    gate, kept = threading.Event(), Compilations()
    kept.get(("regex", "kept"), result)
    patience(0.0)
    for number in range(MAX_COMPILING):
        with pytest.raises(TimeoutError):
            kept.get(("regex", f"slow {number}"), lambda: gate.wait(300) and result())
    with pytest.raises(QueueFullError, match="2 grammars are still compiling"):
        kept.get(("regex", "new"), result)
    kept.get(("regex", "kept"), result)
    patience(300.0)
    gate.set()
    kept.get(("regex", "new"), result)


def model() -> tuple[TableLM, Tokenizer]:
    tokenizer = Tokenizer(byte_level())
    return TableLM(hashed(len(tokenizer.vocabulary()), seed=1)), tokenizer


def test_a_grammar_that_compiles_for_long_holds_up_no_other_request(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, began, compiled = threading.Event(), threading.Event(), compilations.Grammars._compiled

    def slowly(grammars: compilations.Grammars, params: SamplingParams) -> Any:
        if params.regex == "slow":
            began.set()
            assert gate.wait(300)
        return compiled(grammars, params)

    monkeypatch.setattr(compilations.Grammars, "_compiled", slowly)

    @asynchronous
    async def write() -> None:
        table, tokenizer = model()
        async with AsyncLLM(table, "none", tokenizer=tokenizer) as llm:
            slow = asyncio.ensure_future(llm.generate([5], SamplingParams(regex="slow")))
            await asyncio.to_thread(began.wait, 300)
            others = [llm.generate("abc", SamplingParams(max_tokens=5, bad_words=["x"])) for _ in range(10)]
            assert len(await asyncio.gather(*others)) == 10
            (fast,) = await llm.generate([5], SamplingParams(regex="ab"))
            assert fast.text == "ab"
            assert not slow.done()
            gate.set()
            assert (await slow)[0].text == "slow"

    write()


@asynchronous
async def test_refusals_come_from_the_thread_that_compiles() -> None:
    table, tokenizer = model()
    async with AsyncLLM(table, "none", tokenizer=tokenizer) as llm:
        with pytest.raises(InvalidRequestError, match="parenthesis is not closed"):
            await llm.generate([5], SamplingParams(regex="(a"))
        with pytest.raises(InvalidRequestError, match="another document"):
            await llm.generate([5], SamplingParams(json_schema={"$ref": "https://x.org/s"}))
    async with AsyncLLM(TableLM(hashed(8, seed=1)), "none") as llm:
        with pytest.raises(InvalidRequestError, match="regex needs a tokenizer"):
            await llm.generate([1], SamplingParams(regex="a"))


def test_a_grammar_that_is_not_done_in_time_is_refused_by_name(
    patience: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    patience(0.0)
    monkeypatch.setattr(compilations.Grammars, "_compiled", lambda *_: gate.wait(300) and result())
    grammars = compilations.Grammars([b"a", None], vocab_size=2)
    with pytest.raises(InvalidRequestError, match=r"regex='a\+' is refused: .* simplify it"):
        grammars.open(SamplingParams(regex="a+"), [1])
    gate.set()


def test_a_process_ends_while_a_grammar_compiles() -> None:
    code = (
        "from draftree import SamplingParams\n"
        "from draftree.sampling.grammar import compiler as grammar\n"
        "grammar.COMPILE_SECONDS = 0.1\n"
        "grammars = grammar.Grammars([bytes([i]) for i in range(256)] + [None], vocab_size=257)\n"
        "schema = {'type': 'object', 'properties': {f'p {i}': {'type': 'string'} for i in range(1500)}}\n"
        "try:\n    grammars.open(SamplingParams(json_schema=schema), [256])\n"
        "except ValueError as error:\n    print('refused' if 'simplify' in str(error) else error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "refused"), done.stderr
