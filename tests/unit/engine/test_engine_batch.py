"""Admission to the batch: first come, first served, and each text as if it were alone."""

from __future__ import annotations

from typing import Any

import pytest

from draftree import LLM, SamplingParams
from draftree.core.types import RoundRecord
from draftree.engine.engine import Engine
from draftree.engine.parts import EngineParts
from draftree.engine.sequence import FinishReason, WritingSequence
from draftree.models.table import TableLM, hashed
from draftree.options import EngineLimits
from draftree.sampling.controls import build_controls
from draftree.verifiers import VERIFIERS

VOCAB = 10
PROMPTS = [[1, 2], [3], [4, 5, 6], [7], [8, 9, 1, 2], [2], [6, 6]]
LENGTHS = [5, 9, 1, 12, 3, 7, 2]


def model() -> TableLM:
    return TableLM(hashed(VOCAB, seed=5))


def each(temperature: float = 1.0) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=n, seed=i, temperature=temperature) for i, n in enumerate(LENGTHS)]


def sequence(prompt: list[int], count: int, name: str = "r") -> WritingSequence:
    params = SamplingParams(max_tokens=count, temperature=0)
    controls = build_controls(params, vocab_size=VOCAB, seed=1)
    return WritingSequence(name, 0, prompt, controls=controls, limit=len(prompt) + count, detokenizer=None)


def engine(target: TableLM, max_batch_size: int, records: list[RoundRecord] | None = None) -> Engine:
    verifier = VERIFIERS.find("coupled")
    parts = EngineParts(target, verifier(verifier.Config()))
    return Engine(
        parts, EngineLimits(max_batch_size=max_batch_size), on_round=None if records is None else records.append
    )


@pytest.mark.parametrize("draft", [None, "ngram,min=1"])
@pytest.mark.parametrize("size", [1, 2, 3, 16])
def test_any_batch_size_writes_the_same_texts(size: int, draft: str | None) -> None:
    records: list[RoundRecord] = []
    llm = LLM(model(), draft, max_batch_size=size, on_round=records.append)
    done = llm.generate(PROMPTS, each())
    alone = [LLM(model(), "none").generate(prompt, params)[0] for prompt, params in zip(PROMPTS, each(), strict=True)]
    assert [d.token_ids for d in done] == [a.token_ids for a in alone]
    assert [len(d.token_ids) for d in done] == LENGTHS
    assert [d.prompt_index for d in done] == list(range(len(PROMPTS)))
    assert max(len(record.sequences) for record in records) == min(size, len(PROMPTS))


def test_a_waiting_sequence_joins_as_soon_as_a_slot_is_free() -> None:
    records: list[RoundRecord] = []
    LLM(model(), "none", max_batch_size=2, on_round=records.append).generate(PROMPTS, each(0.0))
    running = [len(record.sequences) for record in records]
    # two places, 39 tokens, one per round: no slot is empty while a sequence waits
    assert sum(running) == sum(LENGTHS)
    assert running[:-4] == [2] * len(running[:-4])


def test_rounds_add_up_to_the_completions() -> None:
    records: list[RoundRecord] = []
    done = LLM(model(), "ngram,min=1", max_batch_size=3, on_round=records.append).generate(PROMPTS, each())
    rows = [row for record in records for row in record.sequences]
    for kind, field in (("draft_tokens", "num_drafted"), ("accepted_tokens", "num_accepted")):
        assert sum(getattr(d.stats, kind) for d in done) == sum(getattr(row, field) for row in rows)
    assert sum(d.stats.completion_tokens for d in done) == sum(row.num_written for row in rows)
    assert sum(d.stats.rounds for d in done) == len(rows)
    prefilled = sum(len(prompt) - 1 for prompt in PROMPTS)
    assert sum(record.num_rows for record in records) == prefilled + len(rows) + sum(row.num_drafted for row in rows)
    for record in records:
        parts = (record.plan_seconds, record.draft_seconds, record.score_seconds, record.verify_seconds)
        assert min(parts) >= 0
        assert sum(parts) + record.commit_seconds == pytest.approx(record.total_seconds)


def test_n_texts_of_one_prompt() -> None:
    llm = LLM(model(), "ngram,min=1")
    params = SamplingParams(n=4, max_tokens=12, seed=9)
    done = llm.generate([PROMPTS[0], PROMPTS[1]], params)
    assert [(d.prompt_index, d.index) for d in done] == [(p, i) for p in range(2) for i in range(4)]
    assert len({d.token_ids for d in done[:4]}) == 4
    assert len({d.seed for d in done[:4]}) == 4
    assert done[0].seed == 9
    assert [d.token_ids for d in LLM(model(), "none").generate([PROMPTS[0], PROMPTS[1]], params)] == [
        d.token_ids for d in done
    ]
    for one in done[:4]:
        (again,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=12, seed=one.seed))
        assert again.token_ids == one.token_ids


def test_a_seed_that_was_not_given_is_reported_and_gives_the_text_again() -> None:
    llm = LLM(model(), "none")
    first, second = (llm.generate(PROMPTS[0], SamplingParams(max_tokens=12))[0] for _ in range(2))
    assert first.seed != second.seed
    assert llm.generate(PROMPTS[0], SamplingParams(max_tokens=12, seed=first.seed))[0].token_ids == first.token_ids


def test_an_aborted_sequence_frees_its_slot_and_the_others_go_on() -> None:
    target = model()
    writing = engine(target, 2)
    first, second, third = sequence([1], 10), sequence([2], 10), sequence([3], 10)
    for one in (first, second, third):
        writing.add(one)
    writing.step()
    writing.step()
    writing.abort([first, third])
    assert (first.finish_reason, third.finish_reason) == (FinishReason.ABORT, FinishReason.ABORT)
    assert first.history.num_output_tokens == 2
    assert target.num_open == 1
    while not writing.is_idle:
        writing.step()
    assert (second.finish_reason, second.history.num_output_tokens) == (FinishReason.LENGTH, 10)
    assert target.num_open == 0


def test_aborting_what_is_finished_changes_nothing() -> None:
    writing = engine(model(), 2)
    one = sequence([1], 2)
    writing.add(one)
    while not writing.is_idle:
        writing.step()
    writing.abort([one])
    assert one.finish_reason is FinishReason.LENGTH


def test_an_idle_engine_returns_no_updates() -> None:
    writing = engine(model(), 2)
    assert writing.is_idle
    assert writing.step() == []


def test_short_prompts_are_written_while_a_long_one_is_read() -> None:
    target = model()
    writing = Engine(engine(target, 4).parts, EngineLimits(max_batch_size=4, prefill_chunk_size=16))
    long, short = sequence([i % VOCAB for i in range(70)], 4, "long"), sequence([1], 8, "short")
    writing.add(short)
    writing.step()
    writing.add(long)
    written = []
    while not writing.is_idle:
        writing.step()
        written.append((long.history.num_output_tokens, short.history.num_output_tokens))
    # four chunks of 16 leave 6 tokens for the first round
    assert written == [(0, 2), (0, 3), (0, 4), (0, 5), (1, 6), (2, 7), (3, 8), (4, 8)]
    alone = sequence(long.history.tokens[:70].tolist(), 4)
    plain = engine(target, 1)
    plain.add(alone)
    while not plain.is_idle:
        plain.step()
    assert alone.history.output.tolist() == long.history.output.tolist()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33, 48])
def test_prompts_around_a_chunk(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    prompt = [i % VOCAB for i in range(length)]
    params = SamplingParams(max_tokens=4, seed=1)
    (whole,) = LLM(model(), "none").generate(prompt, params)
    monkeypatch.setattr("draftree.engine.scheduler.PREFILL_TOKENS_IDLE", 16)
    (pieces,) = LLM(model(), "ngram,min=1").generate(prompt, params)
    assert pieces.token_ids == whole.token_ids
    assert pieces.stats.prompt_tokens == length


@pytest.mark.parametrize("size", [0, -1, True, 2.0])
def test_an_invalid_batch_size_is_refused(size: Any) -> None:
    with pytest.raises(ValueError, match="max_batch_size"):
        LLM(model(), "none", max_batch_size=size)


def test_one_llm_serves_again_and_again() -> None:
    llm = LLM(model(), "ngram,min=1")
    first = llm.generate(PROMPTS, each())
    for _ in range(2):
        assert [d.token_ids for d in llm.generate(PROMPTS, each())] == [d.token_ids for d in first]
    assert llm.generate([], SamplingParams()) == []
