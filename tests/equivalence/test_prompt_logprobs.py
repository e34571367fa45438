"""Log-probabilities of prompts equal those of one pass over the whole prompt, however it is prefilled."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from draftree import LLM, AsyncLLM, Completion, SamplingParams
from draftree.core.errors import NonFiniteLogitsError
from draftree.engine import round
from draftree.engine.sequence import TokenLogprob, WritingSequence
from draftree.models.base import LanguageModel
from draftree.models.table import TableLM, hashed
from draftree.options import EngineLimits
from engine_samples import VOCAB, engine_of, request, run, table_llm, text
from families import VOCAB_SIZE, fresh, prompts, target
from native_samples import in_c, native
from native_samples import text as native_text

PROMPTS = prompts(40, 7, 1, 90, 2)
FAMILIES = ["llama", "gemma2", "gpt2", "falcon-alibi"]


@functools.cache
def log_probs_of_peer(family: str, prompt: tuple[int, ...]) -> Tensor:
    """By transformers' own forward, shape (tokens, vocab)."""
    with torch.inference_mode():
        logits = fresh(family)(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)


def check(entries: Sequence[TokenLogprob | None] | None, prompt: Sequence[int], wanted: Tensor, *, top: int) -> None:
    assert entries is not None
    assert len(entries) == len(prompt)
    assert entries[0] is None
    for place, entry in enumerate(entries[1:], 1):
        assert entry is not None
        row = wanted[place - 1]
        assert entry.token_id == prompt[place]
        assert entry.logprob == pytest.approx(float(row[prompt[place]]), abs=1e-4)
        best = row.topk(top)
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert all(value == pytest.approx(float(row[token]), abs=1e-4) for token, value in entry.top)


@pytest.mark.parametrize("draft", [None, "ngram,min=1,k=4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_logprobs_equal_those_of_transformers(family: str, draft: str | None) -> None:
    llm = LLM(target(family), draft)
    params = SamplingParams(max_tokens=6, temperature=0, prompt_logprobs=3)
    for done, prompt in zip(llm.generate(PROMPTS, params), PROMPTS, strict=True):
        check(done.prompt_logprobs, prompt, log_probs_of_peer(family, tuple(prompt)), top=3)
    plain = LLM(target(family), "none").generate(PROMPTS, SamplingParams(max_tokens=6, temperature=0))
    assert [done.token_ids for done in llm.generate(PROMPTS, params)] == [done.token_ids for done in plain]


def passes_by(model: LanguageModel, prompt: Sequence[int]) -> Tensor:
    """Logits of a whole prompt in one pass of the target model."""
    from slot_samples import at_once

    return torch.log_softmax(at_once(model, list(prompt)), dim=-1)


@in_c
@pytest.mark.parametrize("draft", [None, "suffix,floor=0.05,k=4"])
def test_passes_in_c_give_bit_identical_prompt_logprobs(draft: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round, "PROMPT_LOGIT_BYTES", 13 * 4 * VOCAB_SIZE)
    model, prompt = native("llama"), native_text(150)
    done = LLM(model, draft).generate(
        [prompt, native_text(60)], SamplingParams(max_tokens=5, temperature=0.7, seed=1, prompt_logprobs=2, logprobs=2)
    )[0]
    wanted = passes_by(model, prompt)
    assert done.prompt_logprobs is not None
    assert [entry.logprob for entry in done.prompt_logprobs if entry] == [
        float(wanted[place, token]) for place, token in enumerate(prompt[1:])
    ]


def table_log_probs(llm: LLM, prompt: Sequence[int]) -> list[list[float]]:
    assert isinstance(llm.model, TableLM)
    rows = [llm.model.logits(prompt[:place]) for place in range(1, len(prompt))]
    return [torch.log_softmax(row, dim=-1).tolist() for row in rows]


def check_table(llm: LLM, sequence: Completion | WritingSequence, prompt: Sequence[int], *, top: int) -> None:
    entries = sequence.prompt_logprobs
    assert entries is not None
    assert entries[0] is None
    found = [entry for entry in entries[1:] if entry is not None]
    wanted = table_log_probs(llm, prompt)
    assert [entry.token_id for entry in found] == list(prompt[1:])
    assert [entry.logprob for entry in found] == [row[token] for row, token in zip(wanted, prompt[1:], strict=True)]
    assert [[value for _, value in entry.top] for entry in found] == [sorted(row)[::-1][:top] for row in wanted]


@pytest.mark.parametrize("rows", [1, 5, 1000])
def test_batches_chunks_and_streams_give_the_same(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round, "PROMPT_LOGIT_BYTES", rows * 4 * VOCAB)
    llm = table_llm("ngram,min=1", prefill_chunk_size=8)
    batch = [[1 + i * i % 9 for i in range(length)] for length in (30, 1, 17, 2, 64)]
    params = [SamplingParams(max_tokens=6, seed=3, prompt_logprobs=count, n=n) for count, n in
              ((0, 1), (2, 1), (-1, 2), (1, 1), (3, 1))]  # fmt: skip
    done = llm.generate(batch, params)
    for one in done:
        given = params[one.prompt_index].prompt_logprobs
        assert given is not None
        check_table(llm, one, batch[one.prompt_index], top=VOCAB if given == -1 else given)
    alone = [table_llm().generate(ids, SamplingParams(max_tokens=6, seed=3))[0] for ids in batch]
    assert [one.token_ids for one in done if one.index == 0] == [one.token_ids for one in alone]


def test_logits_of_a_pass_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round, "PROMPT_LOGIT_BYTES", 7 * 4 * VOCAB)
    llm, rows = table_llm(), []
    run = llm.model.run

    def counting(pass_: Any) -> Any:
        rows.append(sum(job.num_logits for job in pass_.jobs))
        return run(pass_)

    monkeypatch.setattr(llm.model, "run", counting)
    batch = [[1 + i % 7 for i in range(40)], [2 + i % 5 for i in range(30)]]
    llm.generate(batch, SamplingParams(max_tokens=2, seed=1, prompt_logprobs=0))
    assert max(rows) <= 7 + len(batch)
    assert sum(rows) == 39 + 29 + 4


def test_a_prefix_that_is_known_is_read_again_and_then_shared() -> None:
    llm = table_llm()
    prompt = [1 + i * i % 9 for i in range(50)]
    first, second, third = (
        llm.generate(prompt, SamplingParams(max_tokens=3, seed=1, prompt_logprobs=count))[0]
        for count in (None, 1, None)
    )
    assert [done.stats.cached_tokens for done in (first, second, third)] == [0, 0, 49]
    assert first.prompt_logprobs is None
    check_table(llm, second, prompt, top=1)


def test_a_preempted_sequence_scores_no_token_twice() -> None:
    llm = table_llm()
    engine = engine_of(llm, EngineLimits(prefill_chunk_size=8, prefix_cache_size=4))
    prompt = [1 + i * i % 9 for i in range(60)]
    (writer,) = request(llm, [1, 2, 3], max_tokens=40, ignore_eos=True)
    (scored,) = request(llm, prompt, max_tokens=3, prompt_logprobs=1, seed=1)
    engine.add(writer)
    engine.step()
    engine.add(scored)
    for _ in range(4):
        engine.step()
    assert 8 < len(scored.prompt_logprobs) < 60
    engine._allocator.leave(scored, may_keep=True)
    engine._scheduler.put_back(scored)
    run(engine)
    check_table(llm, scored, prompt, top=1)
    assert text(scored) == list(llm.generate(prompt, SamplingParams(max_tokens=3, seed=1))[0].token_ids)


def test_a_failed_pass_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = table_llm()
    run, calls = llm.model.run, []

    def failing(pass_: Any) -> Any:
        calls.append(len(pass_.jobs))
        if len(calls) == 1:
            raise RuntimeError("once")
        return run(pass_)

    monkeypatch.setattr(llm.model, "run", failing)
    prompt = [1 + i * i % 9 for i in range(30)]
    done = llm.generate([prompt, prompt[:20]], SamplingParams(max_tokens=3, seed=1, prompt_logprobs=1))
    for one, ids in zip(done, (prompt, prompt[:20]), strict=True):
        check_table(llm, one, ids, top=1)


def test_a_prompt_row_of_nan_fails_its_own_request() -> None:
    base = hashed(VOCAB, seed=5)

    def table(context: tuple[int, ...]) -> Tensor:
        return torch.full((VOCAB,), math.nan, dtype=torch.float64) if context == (7, 7) else base(context)

    llm = LLM(TableLM(table), "none")
    with pytest.raises(Exception, match="prompt's token at position 2 is NaN") as caught:
        llm.generate([[7, 7, 1], [1, 2, 3]], SamplingParams(max_tokens=2, prompt_logprobs=0))
    error = caught.value
    assert isinstance(error.__cause__, NonFiniteLogitsError)
    assert len(error.completions) == 1  # type: ignore[attr-defined]


def test_asyncio_gives_prompt_logprobs() -> None:
    prompt = [1 + i * i % 9 for i in range(30)]

    async def ask() -> list[Completion]:
        async with AsyncLLM(TableLM(hashed(VOCAB, seed=5), order=3), "none") as llm:
            params = SamplingParams(max_tokens=3, prompt_logprobs=2)
            both = await asyncio.gather(llm.generate(prompt, params), llm.generate(prompt[:9], params))
            return [done for one in both for done in one]

    one, other = asyncio.run(ask())
    check_table(table_llm(), one, prompt, top=2)
    check_table(table_llm(), other, prompt[:9], top=2)


@pytest.mark.parametrize("draft", [None, "ngram,min=1"])
def test_log_probabilities_of_all_tokens(draft: str | None) -> None:
    llm = table_llm(draft)
    (done,) = llm.generate([1, 2, 1, 2], SamplingParams(max_tokens=8, seed=1, logprobs=-1))
    assert done.logprobs is not None
    ids = [1, 2, 1, 2, *done.token_ids]
    wanted = table_log_probs(llm, ids)[3:]
    for entry, row in zip(done.logprobs, wanted, strict=True):
        assert sorted(entry.top) == [(token, row[token]) for token in range(VOCAB)]
        assert [value for _, value in entry.top] == sorted(row)[::-1]
