"""No text depends on other sequences, their order, their arrival times, or failures."""

from __future__ import annotations

import functools
import pkgutil
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftree import LLM, SamplingParams
from draftree.core.errors import GenerationError
from draftree.drafters.ngram import NgramDrafter
from draftree.engine.engine import Engine
from draftree.engine.sequence import FinishReason, WritingSequence
from draftree.loading.transformers_model import wrap_model
from draftree.models.table import TableLM, hashed
from draftree.options import EngineLimits
from engine_samples import VOCAB, engine_of, request, run, table_llm, text
from families import fresh, prompts, target

SYSTEM = [1 + i * i % 9 for i in range(30)]
ASKED: list[dict[str, Any]] = [
    {"ids": [*SYSTEM, 2, 3], "max_tokens": 9, "seed": 1},
    {"ids": [4], "max_tokens": 14, "seed": 2},
    {"ids": SYSTEM, "max_tokens": 5, "seed": 3, "n": 2},
    {"ids": [1 + i % 7 for i in range(90)], "max_tokens": 6, "temperature": 0},
    {"ids": [*SYSTEM[:20], 9], "max_tokens": 11, "seed": 4, "repetition_penalty": 1.3},
    {"ids": [5, 6, 7], "max_tokens": 3, "seed": 5, "stop_token_ids": [1, 2, 3]},
]
DRAFTS = [None, "ngram,min=1", "suffix,floor=0"]


def made(llm: LLM, index: int) -> list[WritingSequence]:
    asked = dict(ASKED[index])
    return request(llm, asked.pop("ids"), **asked)


@functools.cache
def alone(kind: str) -> list[list[list[int]]]:
    llm = LLM(model(kind), "none", prefix_cache_size=0)
    texts = []
    for index in range(len(ASKED)):
        sequences = made(llm, index)
        for sequence in sequences:
            engine = engine_of(llm, EngineLimits(max_batch_size=1, prefix_cache_size=0))
            engine.add(sequence)
            while not engine.is_idle:
                engine.step()
        texts.append([text(sequence) for sequence in sequences])
    return texts


@functools.cache
def model(kind: str) -> Any:
    return TableLM(hashed(VOCAB, seed=5), order=3) if kind == "table" else target(kind)


def arrivals() -> Any:
    order = st.permutations(range(len(ASKED)))
    gaps = st.lists(st.integers(0, 4), min_size=len(ASKED), max_size=len(ASKED))
    limits = st.builds(
        EngineLimits,
        max_batch_size=st.integers(1, 8),
        prefill_chunk_size=st.sampled_from([1, 7, 64]),
        prefix_cache_size=st.integers(0, 3),
    )
    return st.tuples(order, gaps, limits)


def play(engine: Engine, llm: LLM, order: Any, gaps: Any) -> dict[int, list[WritingSequence]]:
    sequences = {}
    for index, gap in zip(order, gaps, strict=True):
        sequences[index] = made(llm, index)
        engine.add(*sequences[index])
        for _ in range(gap):
            engine.step()
            engine.check_integrity()
    while not engine.is_idle:
        engine.step()
        engine.check_integrity()
    return sequences


@pytest.mark.parametrize("draft", DRAFTS)
@given(given=arrivals())
@settings(max_examples=12)
def test_arrivals_change_nothing_on_tables(draft: str | None, given: Any) -> None:
    order, gaps, limits = given
    llm = LLM(model("table"), draft)
    engine = engine_of(llm, limits)
    for index, sequences in play(engine, llm, order, gaps).items():
        assert [text(s) for s in sequences] == alone("table")[index]
    engine.forget()
    assert llm.model.num_open == 0


@given(given=arrivals())
@settings(max_examples=5)
def test_arrivals_change_nothing_on_a_model(given: Any) -> None:
    order, gaps, limits = given
    llm = LLM(model("llama"), "ngram,min=1")
    engine = engine_of(llm, limits)
    for index, sequences in play(engine, llm, order, gaps).items():
        assert [text(s) for s in sequences] == alone("llama")[index]
    engine.forget()


@given(given=arrivals(), aborted=st.sets(st.integers(0, len(ASKED) - 1)), when=st.integers(0, 20))
@settings(max_examples=15)
def test_an_aborted_sequence_affects_no_other(given: Any, aborted: set[int], when: int) -> None:
    order, _, limits = given
    llm = LLM(model("table"), "ngram,min=1")
    engine = engine_of(llm, limits)
    sequences = {index: made(llm, index) for index in order}
    for index in order:
        engine.add(*sequences[index])
    for _ in range(when):
        engine.step()
        engine.check_integrity()
    engine.abort([s for index in aborted for s in sequences[index]])
    engine.check_integrity()
    while not engine.is_idle:
        engine.step()
        engine.check_integrity()
    for index, own in sequences.items():
        for sequence, wanted in zip(own, alone("table")[index], strict=True):
            if sequence.finish_reason is FinishReason.ABORT:
                assert index in aborted
                assert text(sequence) == wanted[: len(text(sequence))]
            else:
                assert text(sequence) == wanted
    engine.forget()
    assert llm.model.num_open == 0


PHASES = {
    "plan": "draftree.planners.fixed.FixedPlanner.budgets",
    "draft": "draftree.drafters.ngram.NgramDrafter.draft_one",
    "score": "draftree.models.table.TableLM.run",
    "verify": "draftree.verifiers.coupled.Coupled.verify_many",
    "distributions": "draftree.engine.round.Distributions",
    "write": "draftree.engine.sequence.WritingSequence.write",
    "commit": "draftree.models.table.check_commit",
    "observe": "draftree.drafters.ngram.NgramDrafter.observe",
    "learn": "draftree.planners.fixed.FixedPlanner.observe",
}


def burning(original: Any, fuse: list[int]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        fuse[0] -= 1
        if fuse[0] == 0:
            raise RuntimeError("injected")
        return original(*args, **kwargs)

    return call


@pytest.mark.parametrize("call", [1, 2, 5, 11])
@pytest.mark.parametrize("phase", PHASES)
def test_a_single_failure_loses_no_text(monkeypatch: pytest.MonkeyPatch, phase: str, call: int) -> None:
    llm = table_llm("ngram,min=1", plan="fixed")
    wanted = alone("table")
    owner, name = PHASES[phase].rsplit(".", 1)
    place = pkgutil.resolve_name(owner)
    fuse = [call]
    monkeypatch.setattr(place, name, burning(getattr(place, name), fuse))
    engine = engine_of(llm, EngineLimits(max_batch_size=4, prefill_chunk_size=16))
    sequences = play(engine, llm, range(len(ASKED)), [1] * len(ASKED))
    assert fuse[0] <= 0, "it burned"
    failed = [(i, k) for i, own in sequences.items() for k, s in enumerate(own) if s.error is not None]
    # turning tokens into text is one sequence's own affair; all else is tried again
    assert len(failed) == (1 if phase == "write" else 0)
    for index, own in sequences.items():
        for number, sequence in enumerate(own):
            if (index, number) in failed:
                assert text(sequence) == wanted[index][number][: len(text(sequence))]
            else:
                assert text(sequence) == wanted[index][number]
    engine.forget()
    assert llm.model.num_open == 0


@pytest.mark.parametrize("call", range(2, 6))
def test_a_chunk_that_is_read_when_its_pass_breaks_is_not_read_twice(call: int) -> None:
    """A planner that fails does so after the commit: the last chunk is then shorter than the one that was planned."""
    llm = table_llm("ngram,min=1", plan="fixed")
    ids = [1 + i % 7 for i in range(40)]
    (wanted,) = request(llm, ids, max_tokens=6, seed=3)
    llm.engine.add(wanted)
    run(llm.engine)
    engine = engine_of(llm, EngineLimits(max_batch_size=2, prefill_chunk_size=16, prefix_cache_size=0))
    (writing,), (late,) = request(llm, [4], max_tokens=20, seed=2), request(llm, ids, max_tokens=6, seed=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.planner, "observe", burning(llm.planner.observe, [call]))
        engine.add(writing)
        engine.step()
        engine.add(late)
        run(engine)
    assert (writing.error, late.error) == (None, None)
    assert text(late) == text(wanted)


@pytest.mark.parametrize("phase", ["score", "draft"])
def test_a_sequence_that_always_fails_fails_alone(monkeypatch: pytest.MonkeyPatch, phase: str) -> None:
    """Request 1, whose prompt is token 4 alone, cannot be passed over; all others can."""
    llm = table_llm("ngram,min=1", plan="fixed")
    wanted = alone("table")
    if phase == "score":
        original = TableLM.run

        def run(self: Any, pass_: Any) -> Any:
            if any(job.slot.prefix[:1] == [4] or (not job.slot.length and job.tokens[0] == 4) for job in pass_.jobs):
                raise RuntimeError("poison")
            return original(self, pass_)

        monkeypatch.setattr(TableLM, "run", run)
    else:
        draft_one = NgramDrafter.draft_one

        def draft(self: Any, state: Any, budget: Any) -> Any:
            if state.history.tokens[0] == 4:
                raise RuntimeError("poison")
            return draft_one(self, state, budget)

        monkeypatch.setattr(NgramDrafter, "draft_one", draft)
    engine = engine_of(llm, EngineLimits(max_batch_size=4))
    sequences = play(engine, llm, range(len(ASKED)), [1] * len(ASKED))
    assert str(sequences[1][0].error) == "poison"
    for index, own in sequences.items():
        if index != 1:
            assert [text(s) for s in own] == wanted[index]


def test_nan_in_a_slot_does_not_reach_the_next_sequence() -> None:
    """Masked keys are multiplied by 0, and 0 times NaN is NaN."""
    tiny = fresh("llama")
    with torch.no_grad():
        tiny.model.embed_tokens.weight[93] = float("nan")
    llm = LLM(wrap_model(tiny), "none")
    (prompt,) = prompts(20)
    healthy = [token if token != 93 else 8 for token in prompt]
    params = SamplingParams(max_tokens=4, temperature=0)
    wanted = llm.generate(healthy[:3], params)[0].token_ids
    with pytest.raises(GenerationError):
        llm.generate([93, *healthy], params)
    assert llm.generate([healthy[:3], healthy], params)[0].token_ids == wanted
