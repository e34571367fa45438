"""Alternating batches: one half is drafted while the other is verified, and no text changes."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import pytest

from async_samples import asked, held
from draftree import LLM, AsyncLLM, SamplingParams
from draftree.core.errors import ConfigurationError
from draftree.engine.alternating import Alternation
from draftree.engine.two_ways import LEAST_HELD, TRIAL_ROUNDS, TwoWays
from draftree.models.base import Pass, PassResult
from draftree.models.table import TableLM
from piped_drafts import TABLE, VOCAB, piped_drafts

PROMPTS = [[1, 2, 3], [4, 5], [6] * 7, [2, 2], [9]]
SECONDS = 300
drafting = pytest.fixture(piped_drafts)
DRAFT = "model:any,k=4,alternate=true"
PLANS = ["fixed", "adaptive", "heuristic"]


def alternating(draft: str | Sequence[str] = DRAFT, **options: Any) -> LLM:
    """An `LLM` that alternates always, whatever is faster."""
    llm = LLM(TableLM(TABLE), draft, prefix_cache_size=0, **options)
    llm.engine.alternation = Alternation(llm.engine.parts)
    return llm


def texts(llm: LLM, temperature: float, prompts: Sequence[Sequence[int]] = PROMPTS, **more: Any) -> list[list[int]]:
    params = SamplingParams(max_tokens=30, temperature=temperature, seed=4, **{"ignore_eos": True, **more})
    return [list(one.token_ids) for one in llm.generate([list(prompt) for prompt in prompts], params)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("plan", PLANS)
def test_texts_are_those_of_plain_decoding(plan: str, temperature: float, drafting: list[Connection]) -> None:
    llm = alternating(plan=plan)
    assert texts(llm, temperature) == texts(LLM(TableLM(TABLE), "none"), temperature)
    assert llm.engine.alternation is not None
    assert llm.engine.alternation.num_alternated > 5
    llm.engine.check_integrity()


@pytest.mark.parametrize("draft", ["model:any,tree=3-2-1,alternate=true", f"{DRAFT}+suffix", "suffix+" + DRAFT])
def test_trees_and_merged_drafters_alternate(draft: str, drafting: list[Connection]) -> None:
    llm = alternating(draft, plan="fixed")
    assert texts(llm, 1.0) == texts(LLM(TableLM(TABLE), "none"), 1.0)
    assert llm.engine.alternation is not None
    assert llm.engine.alternation.num_alternated > 5


def test_the_other_half_is_drafted_during_the_pass(drafting: list[Connection], monkeypatch: pytest.MonkeyPatch) -> None:
    barrier, submitted, met = threading.Barrier(2), [], []
    llm = alternating(plan="fixed")
    drafter, target, alternation = llm.engine.parts.drafter, llm.engine.parts.target, llm.engine.alternation
    assert drafter is not None
    assert alternation is not None
    draft, run, submit, main = drafter.draft, target.run, alternation._pool.submit, threading.current_thread()

    def drafted(states: Any, budgets: Any) -> Any:
        if threading.current_thread() is not main:
            barrier.wait(SECONDS)  # goes on only while the target's pass runs
        return draft(states, budgets)

    def verified(pass_: Pass) -> PassResult:
        if submitted:
            submitted.clear()
            barrier.wait(SECONDS)
            met.append(len(pass_.jobs))
        return run(pass_)

    def noted(*work: Any) -> Any:
        submitted.append(work)
        return submit(*work)

    monkeypatch.setattr(alternation._pool, "submit", noted)
    monkeypatch.setattr(drafter, "draft", drafted)
    monkeypatch.setattr(target, "run", verified)
    assert texts(llm, 0.0, PROMPTS[:4]) == texts(LLM(TableLM(TABLE), "none"), 0.0, PROMPTS[:4])
    assert len(met) > 5
    assert met.count(2) > 5  # two of four sequences


def test_sequences_that_join_and_leave_change_nothing(drafting: list[Connection]) -> None:
    llm, plain = alternating(plan="fixed", max_batch_size=3), LLM(TableLM(TABLE), "none")
    many = [[place % VOCAB, 3] for place in range(9)]
    lengths = [5, 30, 12, 3, 25, 9, 40, 2, 17]
    params = [SamplingParams(max_tokens=length, temperature=1.0, seed=2, ignore_eos=True) for length in lengths]
    found = [one.token_ids for one in llm.generate(many, params)]
    assert found == [one.token_ids for one in plain.generate(many, params)]
    llm.engine.check_integrity()
    assert llm.engine.is_idle


def test_sequences_that_are_aborted_while_they_wait_are_left_out(drafting: list[Connection]) -> None:
    llm, plain = alternating(plan="fixed"), LLM(TableLM(TABLE), "none")
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=2, ignore_eos=True)
    sequences = [s for prompt in PROMPTS for s in llm.requests.sequences(prompt, params)]
    llm.engine.add(*sequences)
    for step in range(200):
        llm.engine.step()
        llm.engine.check_integrity()
        if step in (5, 8):
            llm.engine.abort([sequences[step - 5]])
        if llm.engine.is_idle:
            break
    wanted = [list(one.token_ids) for one in plain.generate(PROMPTS, params)]
    for place in (1, 2, 4):
        assert sequences[place].history.tokens[len(PROMPTS[place]) :].tolist() == wanted[place]


def test_concurrent_requests_have_the_same_texts(drafting: list[Connection]) -> None:
    async def generate() -> tuple[list[list[int]], int]:
        async with AsyncLLM(TableLM(TABLE), DRAFT, plan="fixed", prefix_cache_size=0) as llm:
            engine = llm.llm.engine
            engine.alternation = Alternation(engine.parts)
            params = SamplingParams(max_tokens=30, temperature=1.0, seed=4, ignore_eos=True)
            async with held(llm):
                writing = [asyncio.ensure_future(llm.generate(prompt, params)) for prompt in PROMPTS]
                await asked(llm, len(writing))
            found = await asyncio.gather(*writing)
            return [list(one[0].token_ids) for one in found], engine.alternation.num_alternated

    found, count = asyncio.run(generate())
    assert found == texts(LLM(TableLM(TABLE), "none"), 1.0)
    assert count > 0


def test_a_single_sequence_and_requests_without_drafts_do_not_alternate(drafting: list[Connection]) -> None:
    llm = alternating([DRAFT, "none"], plan="fixed")
    assert texts(llm, 1.0, PROMPTS[:1]) == texts(LLM(TableLM(TABLE), "none"), 1.0, PROMPTS[:1])
    assert llm.engine.alternation is not None
    assert llm.engine.alternation.num_alternated == 0


def test_an_error_of_the_drafter_fails_no_text(drafting: list[Connection], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = alternating(plan="fixed")
    drafter, main = llm.engine.parts.drafter, threading.current_thread()
    assert drafter is not None
    draft = drafter.draft

    def sometimes(states: Any, budgets: Any) -> Any:
        if threading.current_thread() is not main:
            raise ValueError("this half cannot be drafted")
        return draft(states, budgets)

    monkeypatch.setattr(drafter, "draft", sometimes)
    assert texts(llm, 1.0) == texts(LLM(TableLM(TABLE), "none"), 1.0)
    llm.engine.check_integrity()


def test_texts_go_on_without_drafts_when_the_process_ends(drafting: list[Connection]) -> None:
    rounds: list[Any] = []

    def end_process(record: Any) -> None:
        rounds.append(record)
        if len(rounds) == 6:
            with socket.socket(fileno=os.dup(drafting[0].fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)

    llm = alternating(plan="fixed", on_round=end_process)
    assert texts(llm, 1.0) == texts(LLM(TableLM(TABLE), "none"), 1.0)
    assert "drafting has ended" in llm.draft_note
    assert not any(row.num_drafted for row in rounds[-1].sequences)


def test_the_way_is_chosen_by_measured_speed(drafting: list[Connection]) -> None:
    llm = LLM(TableLM(TABLE), DRAFT, plan="fixed", prefix_cache_size=0)
    params = SamplingParams(max_tokens=200, temperature=1.0, seed=4, ignore_eos=True)
    plain = LLM(TableLM(TABLE), "none")
    found = [one.token_ids for one in llm.generate(PROMPTS, params)]
    assert found == [one.token_ids for one in plain.generate(PROMPTS, params)]
    assert "tokens/s whole batches" in llm.draft_note
    assert llm.engine.alternation is not None
    assert llm.engine.alternation.num_alternated >= 2 * TRIAL_ROUNDS


@pytest.mark.parametrize(("first", "second", "wins"), [(1.0, 0.4, True), (1.0, 0.6, False)])
def test_the_faster_way_is_kept_and_measured_again(first: float, second: float, wins: bool) -> None:
    ways = TwoWays("first", "second")
    chosen = []
    for _ in range(3 * LEAST_HELD):
        way = ways.is_second(4)
        chosen.append(way)
        ways.note_round(4, second if way else first, 4 if not way else 2)
    trial = 1 + 2 * TRIAL_ROUNDS
    assert chosen[:trial] == [True] * trial
    assert chosen[trial : trial + 1 + TRIAL_ROUNDS] == [False] * (1 + TRIAL_ROUNDS)
    held = chosen[trial + 1 + TRIAL_ROUNDS :][:LEAST_HELD]
    assert held == [wins] * LEAST_HELD
    assert chosen[trial + 1 + TRIAL_ROUNDS + LEAST_HELD] is True  # the next trial
    assert ways.note.startswith("second" if wins else "first")


def test_batches_of_other_sizes_are_measured_again() -> None:
    ways = TwoWays("first", "second")
    for _ in range(60):
        ways.note_round(4, 1.0 if not ways.is_second(4) else 9.0, 4)
    assert not ways.is_second(4)
    assert not ways.is_second(8)
    assert ways.is_second(9)


@pytest.mark.parametrize(
    ("draft", "reason"),
    [
        ("model:any,ahead=1,alternate=true", "choose one of them"),
        ("model:any,map=strings,alternate=true", "map=tokens"),
        ("model:any,alternate=true+model:other", "'model:other' runs a model in the target's process"),
        (["model:any,alternate=true", "early-exit:1"], "'early-exit:1' runs a model"),
    ],
)
def test_what_cannot_alternate_is_refused(draft: str | list[str], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        LLM(TableLM(TABLE), draft)
