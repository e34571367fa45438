"""Cached prefixes are copied: n texts, common prefixes, conversations; they are evicted when room is needed."""

from __future__ import annotations

import pytest

from draftree import LLM, SamplingParams
from draftree.core.types import RoundRecord
from draftree.options import EngineLimits
from engine_samples import engine_of, request, run, table_llm, text
from families import prompts, target

SYSTEM = [1 + i * i % 9 for i in range(50)]


def test_n_texts_read_their_prompt_once() -> None:
    records: list[RoundRecord] = []
    done = table_llm(on_round=records.append).generate(SYSTEM, SamplingParams(n=4, max_tokens=5, seed=1))
    assert [d.stats.cached_tokens for d in done] == [0, 49, 49, 49]
    assert [d.stats.prompt_tokens for d in done] == [50] * 4
    assert sum(record.num_prompt_rows for record in records) == 49, "roots are not read for the prompt's sake"


def test_requests_at_once_share_their_beginning() -> None:
    tails = [[2, 3, 4], [5, 6], [7, 8, 9, 1]]
    llm = table_llm()
    done = llm.generate([SYSTEM + tail for tail in tails], SamplingParams(max_tokens=5, seed=1))
    assert [d.stats.cached_tokens for d in done] == [0, 50, 50]
    stats = llm.prefix_stats
    assert (stats.sequences, stats.hits, stats.prompt_tokens, stats.cached_tokens) == (3, 2, 159, 100)
    alone = [table_llm().generate(SYSTEM + tail, SamplingParams(max_tokens=5, seed=1))[0] for tail in tails]
    assert [d.token_ids for d in done] == [a.token_ids for a in alone]


def test_a_conversation_continues_from_the_cache() -> None:
    llm = table_llm("ngram,min=1")
    ids, cached = list(SYSTEM), []
    for _ in range(4):
        (done,) = llm.generate(ids, SamplingParams(max_tokens=6, seed=1))
        cached.append(done.stats.cached_tokens)
        ids += [*done.token_ids, 3, 4, 5]
    assert cached[0] == 0
    # all but what the last round wrote was there already
    assert all(have >= 50 + 9 * turn - 9 for turn, have in enumerate(cached[1:], 1))
    assert llm.prefix_stats.kept == 1  # a longer turn replaces what it contains


def test_a_deleted_engine_keeps_nothing() -> None:
    llm = table_llm()
    model = llm.model
    llm.generate(SYSTEM, SamplingParams(max_tokens=5, seed=1))
    assert model.num_open == 1
    del llm
    assert model.num_open == 0


@pytest.mark.parametrize("keep", [0, 1, 3])
def test_kept_prefixes_are_bounded_and_the_oldest_goes_first(keep: int) -> None:
    llm = table_llm(prefix_cache_size=keep)
    texts = [[start, *SYSTEM] for start in range(1, 7)]
    for ids in texts:
        llm.generate(ids, SamplingParams(max_tokens=3, seed=1))
        llm.engine.check_integrity()
    assert llm.prefix_stats.kept == keep
    found = [llm.generate(ids, SamplingParams(max_tokens=3, seed=1))[0].stats.cached_tokens > 0 for ids in texts[-1:]]
    assert found == [keep > 0]


def test_kept_prefixes_make_room_for_requests() -> None:
    llm = table_llm()
    engine = engine_of(llm, EngineLimits(max_batch_size=2, prefix_cache_size=1))
    for start in range(1, 4):
        engine.add(*request(llm, [start, *SYSTEM], max_tokens=3, seed=1, n=2))
        run(engine)
    assert engine.prefix_stats.kept == 1
    assert engine.prefix_stats.evicted > 0
    assert llm.model.num_open == 1


def test_a_failed_text_is_not_kept() -> None:
    llm = table_llm()
    (sequence,) = request(llm, SYSTEM, max_tokens=9, seed=1)
    llm.engine.add(sequence)
    llm.engine.step()
    sequence.fail(RuntimeError("sick"))
    llm.engine.step()
    assert llm.prefix_stats.kept == 0


@pytest.mark.parametrize("draft", [None, "ngram,min=1"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_copied_prefixes_write_the_same_text(draft: str | None, temperature: float) -> None:
    (system,) = prompts(60)
    tails = prompts(5, 1, 9)
    params = SamplingParams(max_tokens=12, temperature=temperature, seed=4)
    plain = LLM(target("llama"), "none", prefix_cache_size=0)
    wanted = [plain.generate(system + tail, params)[0].token_ids for tail in tails]
    llm = LLM(target("llama"), draft)
    for _ in range(2):  # the second time from kept slots
        done = llm.generate([system + tail for tail in tails], params)
        assert [d.token_ids for d in done] == wanted
        assert sum(d.stats.cached_tokens for d in done) >= 120
        llm.engine.check_integrity()
    llm.forget()


def test_text_of_aborted_requests_may_be_kept() -> None:
    llm = table_llm()
    (sequence,) = request(llm, SYSTEM, max_tokens=9, seed=1)
    llm.engine.add(sequence)
    llm.engine.step()
    llm.engine.abort([sequence])
    (again,) = request(llm, SYSTEM, max_tokens=9, seed=1)
    llm.engine.add(again)
    run(llm.engine)
    assert again.counts.cached_tokens == 49
    assert text(again)[:1] == text(sequence)
