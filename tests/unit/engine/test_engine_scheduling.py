"""Order of service, bounded queues, prefill budgets, memory."""

from __future__ import annotations

import pytest

from draftree.core.errors import InvalidRequestError, QueueFullError
from draftree.engine.memory import SlotBudget
from draftree.engine.scheduler import prefill_budget, split_prefill_budget
from draftree.engine.sequence import FinishReason
from draftree.options import EngineLimits
from engine_samples import engine_of, request, run, table_llm, text


@pytest.mark.parametrize(
    ("pending", "budget", "given"),
    [
        ([], 64, []),
        ([10], 64, [10]),
        ([100], 64, [64]),
        # the first may have half; the rest goes to the soonest done
        ([4000, 30], 64, [34, 30]),
        ([4000, 30, 30], 64, [32, 30, 2]),
        ([4000, 100, 5], 64, [32, 27, 5]),
        ([10, 100], 64, [10, 54]),
        ([100, 100, 100], 64, [32, 32, 0]),
        ([5, 5], 1, [1, 0]),
        ([3, 3, 3], 64, [3, 3, 3]),
    ],
)
def test_shares_of_a_pass(pending: list[int], budget: int, given: list[int]) -> None:
    assert split_prefill_budget(pending, budget) == given


@pytest.mark.parametrize(
    ("num_reading", "num_decoding", "chunk_size", "given"),
    [(3, 0, 64, 512), (1, 1, 64, 64), (2, 1, 64, 128), (15, 1, 64, 512), (7, 9, 64, 64), (2, 1, 800, 800)],
)
def test_the_more_wait_for_a_first_token_the_more_is_read(
    num_reading: int, num_decoding: int, chunk_size: int, given: int
) -> None:
    assert prefill_budget(num_reading, num_decoding, chunk_size) == given


def test_prompts_that_arrive_together_are_read_together() -> None:
    llm = table_llm()
    engine = engine_of(llm, EngineLimits(max_batch_size=8, prefill_chunk_size=16))
    (writing,) = request(llm, [1], max_tokens=200, seed=1)
    engine.add(writing)
    engine.step()
    arriving = [s for first in range(5) for s in request(llm, [first, *[2] * 15], max_tokens=3, seed=first)]
    engine.add(*arriving)
    engine.step()
    assert [s.history.num_output_tokens for s in arriving] == [1] * 5
    assert writing.history.num_output_tokens == 2


def test_a_long_prompt_and_short_ones_do_not_starve_each_other() -> None:
    llm = table_llm()
    engine = engine_of(llm, EngineLimits(max_batch_size=8, prefill_chunk_size=16))
    (writing,) = request(llm, [1], max_tokens=200, seed=1)
    engine.add(writing)
    engine.step()
    (long,) = request(llm, [i * i % 11 for i in range(400)], max_tokens=4, seed=1)
    engine.add(long)
    shorts = []
    for number in range(40):
        shorts += request(llm, [2, 3, number % 7, 4, 5, 6, 7, 8, 9, 1], max_tokens=2, seed=number)
        engine.add(shorts[-1])
        before = writing.history.num_output_tokens
        engine.step()
        engine.check_integrity()
        assert writing.history.num_output_tokens == before + 1  # no pass without it
    # half of each pass was the long one's
    assert long.history.num_output_tokens > 0 or long.num_pending <= 400 - 40 * 8
    assert sum(short.is_finished for short in shorts) > 20
    run(engine)
    assert long.finish_reason is FinishReason.LENGTH


def test_lower_priorities_first_and_then_first_come() -> None:
    llm = table_llm()
    engine = engine_of(llm, EngineLimits(max_batch_size=1))
    order = []
    for priority in (0, 1, -1, 0, -1):
        order += request(llm, [1, 2], priority=priority, max_tokens=3, seed=len(order))
    engine.add(*order)
    finished = []
    while not engine.is_idle:
        finished += [s for s in engine.step() if s.is_finished]
        engine.check_integrity()
    assert finished == [order[2], order[4], order[0], order[3], order[1]]


def test_a_full_queue_refuses_whole_requests() -> None:
    llm = table_llm()
    engine = engine_of(llm, EngineLimits(max_batch_size=2, max_waiting=3))
    engine.add(*request(llm, [1], max_tokens=3, n=2))
    engine.step()
    engine.add(*request(llm, [2], max_tokens=3, n=2))
    with pytest.raises(QueueFullError, match="2 sequences cannot be queued: 2 are waiting and max_waiting is 3"):
        engine.add(*request(llm, [3], max_tokens=3, n=2))
    assert len(engine.waiting) == 2
    engine.add(*request(llm, [3], max_tokens=3))
    run(engine)
    # an empty queue accepts a request of any size: otherwise it would never be served
    engine.add(*request(llm, [3], max_tokens=3, n=9))
    run(engine)


A_TOKEN, A_ROUND, A_TREE = 1000, 50_000, 64


def costly(num_bytes: int | None) -> SlotBudget:
    """Tables cost nothing; here they do."""
    return SlotBudget(None, 0, 10**9 if num_bytes is None else num_bytes, A_TOKEN, A_ROUND, A_TREE)


@pytest.fixture
def priced(monkeypatch: pytest.MonkeyPatch) -> SlotBudget:
    monkeypatch.setattr("draftree.engine.engine.slot_budget", lambda parts, num_bytes: costly(num_bytes))
    return costly(0)


def test_what_can_never_fit_is_refused_at_once_with_the_numbers(priced: SlotBudget) -> None:
    llm = table_llm()
    engine = engine_of(llm, EngineLimits(max_batch_size=4, sequence_memory=priced.slot_bytes(100)))
    assert engine.longest == 100
    engine.add(*request(llm, [1] * 60, max_tokens=40))
    with pytest.raises(InvalidRequestError) as caught:
        engine.add(*request(llm, [1] * 61, max_tokens=40))
    for fact in ("101 tokens", "1000 bytes a token", "enough for 100 tokens", "max_tokens"):
        assert fact in str(caught.value)
    run(engine)


def test_memory_bounds_the_batch(priced: SlotBudget) -> None:
    llm = table_llm()
    engine = engine_of(llm, EngineLimits(max_batch_size=None, sequence_memory=3 * priced.slot_bytes(300)))
    assert engine.num_slots(300) == costly(3 * priced.slot_bytes(300)).num_slots(300) == 3
    sequences = [s for seed in range(6) for s in request(llm, [1, 2], max_tokens=298, seed=seed)]
    engine.add(*sequences)
    engine.step()
    assert len(engine.running) == 3  # each may write a little ahead without being counted again
    run(engine)
    assert all(s.finish_reason is FinishReason.LENGTH for s in sequences)


def test_who_grows_too_large_waits_again_and_writes_the_same(priced: SlotBudget) -> None:
    llm = table_llm("ngram,min=1")
    params = [{"max_tokens": 600, "seed": seed} for seed in range(3)]
    engine = engine_of(llm, EngineLimits(max_batch_size=None, sequence_memory=priced.slot_bytes(650)))
    sequences = [s for given in params for s in request(llm, [1, 2], **given)]
    engine.add(*sequences)
    most, was_alone = 0, False
    while not engine.is_idle:
        engine.step()
        engine.check_integrity()
        most = max(most, len(engine.running))
        was_alone = was_alone or (len(engine.running) == 1 and len(engine.waiting) == 2)
    assert most == 2
    assert was_alone
    alone = [request(llm, [1, 2], **given)[0] for given in params]
    for one in alone:
        llm.engine.add(one)
        run(llm.engine)
    assert [text(s) for s in sequences] == [text(s) for s in alone]


def test_a_sequence_is_added_once() -> None:
    llm = table_llm()
    engine = engine_of(llm, EngineLimits())
    (one,), (other,) = (request(llm, [1, 2, 3], max_tokens=4, seed=seed) for seed in (1, 2))
    for twice in ([one, one], [other, one, one]):
        with pytest.raises(InvalidRequestError, match="being written already"):
            engine.add(*twice)
        assert engine.is_idle
    engine.add(one)
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="being written already"):
            engine.add(one)
        engine.check_integrity()
        engine.step()
    run(engine)
    with pytest.raises(InvalidRequestError, match="finished already"):
        engine.add(one)
    engine.abort([other])
    with pytest.raises(InvalidRequestError, match="finished already"):
        engine.add(other)
    engine.check_integrity()
    assert len(text(one)) == 4
