"""Failures are isolated: only the failing request ends, its slots are freed, and the engine continues."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from draftree import LLM, Completion, SamplingParams
from draftree.core.errors import GenerationError, NonFiniteLogitsError
from draftree.core.tree import Draw, TokenTree, chain
from draftree.core.types import Budget
from draftree.models.base import Commit, LanguageModel, Pass, PassResult
from draftree.models.table import TableLM, hashed
from draftree.verifiers import VERIFIERS
from families import target

VOCAB = 10
SICK = 7
"""First token of prompts whose text meets NaN."""
PROMPTS = [[1, 2], [SICK, 2], [3]]
Scripts = dict[str, Any]


def sick(place: int, value: float = float("nan")) -> TableLM:
    """Texts of bad prompts get this value after a number of tokens."""
    base = hashed(VOCAB, seed=5)

    def table(context: tuple[int, ...]) -> Tensor:
        is_sick = context[:1] == (SICK,) and len(context) >= place
        return torch.full((VOCAB,), value, dtype=torch.float64) if is_sick else base(context)

    return TableLM(table)


def healthy(**options: Any) -> list[Completion]:
    return LLM(TableLM(hashed(VOCAB, seed=5)), "none").generate(
        [PROMPTS[0], PROMPTS[2]], SamplingParams(seed=1, **options)
    )


@pytest.mark.parametrize("draft", [None, "ngram,min=1", "scripted:blind"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
@pytest.mark.parametrize("place", [2, 3, 6])
def test_a_request_that_meets_nan_fails_alone(scripts: Scripts, draft: str | None, value: float, place: int) -> None:
    scripts["blind"] = lambda tokens, budget: chain([0] * min(budget.num_nodes, 3))
    model = sick(place, value)
    llm = LLM(model, draft)
    with pytest.raises(GenerationError, match=r"1 of 3 requests failed; .*NaN.*check weights and dtype") as caught:
        llm.generate(PROMPTS, SamplingParams(max_tokens=8, seed=1))
    assert [done.prompt_index for done in caught.value.completions] == [0, 2]
    assert [done.token_ids for done in caught.value.completions] == [d.token_ids for d in healthy(max_tokens=8)]
    assert model.num_open == 0
    assert (
        llm.generate(PROMPTS[0], SamplingParams(max_tokens=8, seed=1))[0].token_ids
        == healthy(max_tokens=8)[0].token_ids
    )


def test_a_single_request_raises_its_own_error() -> None:
    with pytest.raises(NonFiniteLogitsError, match="position 4"):
        LLM(sick(4), "none").generate([SICK, 2], SamplingParams(max_tokens=8, seed=1))


@pytest.mark.parametrize("verify", VERIFIERS.names())
@pytest.mark.parametrize("place", [2, 4])
def test_no_rule_trips_over_nan(scripts: Scripts, verify: str, place: int) -> None:
    scripts["blind"] = lambda tokens, budget: chain([0] * min(budget.num_nodes, 3), draw=Draw.POINT)
    cls = VERIFIERS.find(verify)
    if Draw.POINT not in cls.accepts:
        pytest.skip("takes no certain guesses")
    model = sick(place)
    with pytest.raises(GenerationError) as caught:
        LLM(model, "scripted:blind", verify=verify, plan="fixed").generate(
            PROMPTS, SamplingParams(max_tokens=6, seed=1)
        )
    assert [done.prompt_index for done in caught.value.completions] == [0, 2]
    assert model.num_open == 0


def test_nan_after_a_rejected_guess_is_never_read(scripts: Scripts) -> None:
    base = hashed(VOCAB, seed=5)
    text = LLM(TableLM(base), "none").generate([1], SamplingParams(max_tokens=8, temperature=0))[0].token_ids
    wrong = [(token + 1) % VOCAB for token in text]

    def table(context: tuple[int, ...]) -> Tensor:
        strays = any(token == other for token, other in zip(context[1:], wrong, strict=False))
        return base(context) * (float("nan") if strays else 1.0)

    def draft(tokens: np.ndarray, budget: Budget) -> TokenTree:
        start, count = len(tokens) - 1, min(budget.num_nodes, 3)
        return chain([*text[start : start + count - 1], *wrong[start + count - 1 : start + count]])

    scripts["stray"] = draft
    (done,) = LLM(TableLM(table), "scripted:stray", plan="fixed").generate(
        [1], SamplingParams(max_tokens=8, temperature=0)
    )
    assert done.token_ids == text
    assert done.stats.accepted_tokens > 0


class Failing(LanguageModel):
    """A model that raises in the nth call of one of its methods."""

    def __init__(self, inner: TableLM, method: str, call: int, error: BaseException) -> None:
        self.inner = inner
        self.vocab_size, self.max_length, self.supports_trees = inner.vocab_size, inner.max_length, True
        self.device, self.dtype = inner.device, inner.dtype
        self._fuse = {method: call}
        self._error = error

    def _spark(self, method: str) -> None:
        self._fuse[method] = self._fuse.get(method, 0) - 1
        if self._fuse[method] == 0:
            raise self._error

    def reserve(self, num_slots: int, length: int) -> None:
        self._spark("reserve")
        self.inner.reserve(num_slots, length)

    def open(self) -> Any:
        self._spark("open")
        return self.inner.open()

    def run(self, pass_: Pass) -> PassResult:
        self._spark("run")
        return self.inner.run(pass_)

    def apply(self, edits: Any) -> Any:
        if any(isinstance(edit, Commit) for edit in edits):
            self._spark("commit")
        return self.inner.apply(edits)


@pytest.mark.parametrize(("method", "call"), [("reserve", 1), ("open", 2), ("run", 1), ("run", 3), ("commit", 4)])
def test_an_interruption_frees_all_slots(method: str, call: int) -> None:
    inner = TableLM(hashed(VOCAB, seed=5))
    llm = LLM(Failing(inner, method, call, KeyboardInterrupt()), "ngram,min=1", plan="fixed")
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, SamplingParams(max_tokens=8, seed=1))
    assert inner.num_open == 0
    again = llm.generate([PROMPTS[0], PROMPTS[2]], SamplingParams(max_tokens=8, seed=1))
    assert [done.token_ids for done in again] == [done.token_ids for done in healthy(max_tokens=8)]


def test_a_request_that_gets_no_slot_fails_alone() -> None:
    inner = TableLM(hashed(VOCAB, seed=5))
    llm = LLM(Failing(inner, "open", 2, RuntimeError("out of memory")), "none")
    with pytest.raises(GenerationError, match="1 of 3 requests failed; the first: out of memory") as caught:
        llm.generate(PROMPTS, SamplingParams(max_tokens=8, seed=1))
    assert [done.prompt_index for done in caught.value.completions] == [0, 2]
    assert inner.num_open == 0


@pytest.mark.parametrize(("method", "call"), [("reserve", 1), ("run", 1), ("run", 3), ("commit", 4)])
def test_a_single_exception_is_retried(method: str, call: int) -> None:
    inner = TableLM(hashed(VOCAB, seed=5))
    llm = LLM(Failing(inner, method, call, RuntimeError("out of memory")), "ngram,min=1", plan="fixed")
    done = llm.generate(PROMPTS, SamplingParams(max_tokens=8, seed=1))
    plain = LLM(TableLM(hashed(VOCAB, seed=5)), "none").generate(PROMPTS, SamplingParams(max_tokens=8, seed=1))
    assert [d.token_ids for d in done] == [p.token_ids for p in plain]
    assert inner.num_open == 0


def test_a_listener_that_raises_frees_all_slots() -> None:
    def listen(update: object) -> None:
        raise RuntimeError("the consumer has gone")

    model = TableLM(hashed(VOCAB, seed=5))
    with pytest.raises(RuntimeError, match="the consumer has gone"):
        LLM(model, "none").generate(PROMPTS, SamplingParams(max_tokens=8, seed=1), on_update=listen)
    assert model.num_open == 0


@functools.cache
def spoken() -> LLM:
    from spelling import tokenizer

    return LLM(target("llama"), "ngram,min=1", tokenizer=tokenizer())


@pytest.mark.parametrize("pieces", [0, 1, 4])
def test_a_stream_that_is_closed_early_frees_its_slot(pieces: int) -> None:
    llm = spoken()
    before = llm.model.num_open
    stream = llm.stream([5, 6, 7], SamplingParams(max_tokens=30, seed=1))
    for _ in range(pieces):
        next(stream)
    stream.close()
    assert llm.model.num_open == before


def test_a_consumer_that_raises_while_it_holds_a_piece_frees_the_slot() -> None:
    llm = spoken()
    before = llm.model.num_open
    stream = llm.stream([5, 6, 7], SamplingParams(max_tokens=30, seed=1))
    with pytest.raises(RuntimeError, match="stop"):
        stream.throw(RuntimeError("stop"))
    started = llm.stream([5, 6, 7], SamplingParams(max_tokens=30, seed=1))
    next(started)
    with pytest.raises(RuntimeError, match="stop"):
        started.throw(RuntimeError("stop"))
    assert llm.model.num_open == before


def test_streams_may_be_read_by_turns() -> None:
    llm = spoken()
    params = SamplingParams(max_tokens=12, seed=4)
    alone = [done.text for done in llm.generate([[5, 6, 7], [8, 9]], params)]
    streams = [llm.stream(prompt, params) for prompt in ([5, 6, 7], [8, 9])]
    texts = ["", ""]
    going = {0, 1}
    while going:
        for number in sorted(going):
            piece = next(streams[number], None)
            if piece is None:
                going.discard(number)
            else:
                texts[number] += piece
    assert texts == alone


def test_a_tree_for_a_target_of_chains_is_an_assertion_error(scripts: Scripts) -> None:
    scripts["forked"] = lambda tokens, budget: TokenTree((1, 2), (-1, -1))
    model = TableLM(hashed(VOCAB, seed=5), supports_trees=False)
    with pytest.raises(AssertionError, match="chains only"):
        LLM(model, "scripted:forked", plan="fixed").generate(PROMPTS, SamplingParams(max_tokens=8, seed=1))
    assert model.num_open == 0
