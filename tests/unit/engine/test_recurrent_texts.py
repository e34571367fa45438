"""Texts of a model with recurrent states are those of the same recurrence without slots, in all that an engine does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from draftree import LLM, SamplingParams
from draftree.core.errors import ConfigurationError
from draftree.core.types import RoundRecord
from draftree.engine.memory import SlotBudget, slot_budget
from draftree.models.base import Commit, Edit, Extend, Pass, PassResult, Slot
from draftree.options import EngineLimits
from engine_samples import engine_of, request, run, text
from recurrent import LEAST_KEPT, RecurrentLM

SYSTEM = [1 + i * i % 9 for i in range(60)]
PROMPTS = [[3], [1, 2, 1, 2, 1, 2, 1], SYSTEM, [*SYSTEM, 5, 6], [*SYSTEM, 7, 8, 9, 1], [2, *SYSTEM]]
CHAINS = ["none", "ngram,min=1", "synthetic,accept=0.7", "early-exit:1", "suffix,width=1", "prediction,width=1"]
TREES = ["suffix", "ngram,min=1+suffix", "lookahead", "synthetic,accept=0.7,width=3", "early-exit:1,tree=2-2-1"]
CASES = [(draft, False) for draft in CHAINS] + [(draft, True) for draft in [*CHAINS, *TREES]]


def wanted(prompts: Sequence[Sequence[int]], **params: Any) -> list[tuple[int, ...]]:
    """Plain decoding, one prompt after the other, of a model that has no states."""
    llm = LLM(RecurrentLM().without_slots(), "none", prefix_cache_size=0)
    return [done.token_ids for ids in prompts for done in llm.generate(list(ids), SamplingParams(seed=3, **params))]


def texts(llm: LLM, prompts: Sequence[Sequence[int]], **params: Any) -> list[tuple[int, ...]]:
    done = llm.generate([list(ids) for ids in prompts], SamplingParams(seed=3, **params))
    llm.engine.check_integrity()
    return [one.token_ids for one in done]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("draft", "trees"), CASES)
def test_a_batch_writes_the_texts_of_plain_decoding(draft: str, trees: bool, temperature: float) -> None:
    params: dict[str, Any] = {"max_tokens": 20, "temperature": temperature}
    prediction = {"prediction": SYSTEM[:30]} if "prediction" in draft else {}
    llm = LLM(RecurrentLM(supports_trees=trees), draft)
    for _ in range(2):  # the second time from kept slots
        assert texts(llm, PROMPTS, **params, **prediction) == wanted(PROMPTS, **params)


def test_drafts_with_branches_need_states_by_node() -> None:
    with pytest.raises(ConfigurationError, match="scores chains only"):
        LLM(RecurrentLM(supports_trees=False), "suffix")


@pytest.mark.parametrize("draft", ["none", "synthetic,accept=0.8", "early-exit:1"])
def test_prompts_are_read_in_chunks_beside_other_texts(draft: str) -> None:
    model = RecurrentLM()
    llm = LLM(model, draft)
    engine = engine_of(llm, EngineLimits(max_batch_size=4, prefill_chunk_size=16))
    sequences = request(llm, [1], max_tokens=60, seed=3)
    engine.add(*sequences)
    engine.step()
    prompts = [SYSTEM * 3, [5, *SYSTEM], [*SYSTEM, 4]]
    for ids in prompts:
        sequences += request(llm, ids, max_tokens=9, seed=3)
    engine.add(*sequences[1:])
    run(engine)
    assert tuple(text(sequences[0])) == wanted([[1]], max_tokens=60)[0]
    assert [tuple(text(s)) for s in sequences[1:]] == wanted(prompts, max_tokens=9)
    # prompts and written tokens move the state on; only drafts have states of their own
    assert model.num_settled >= sum(map(len, prompts)) - 60


def test_n_texts_share_the_prompt() -> None:
    model = RecurrentLM()
    done = LLM(model, "none").generate(SYSTEM, SamplingParams(n=4, max_tokens=5, seed=1))
    assert [d.stats.cached_tokens for d in done] == [0, 59, 59, 59]
    plain = LLM(model.without_slots(), "none").generate(SYSTEM, SamplingParams(n=4, max_tokens=5, seed=1))
    assert [d.token_ids for d in done] == [p.token_ids for p in plain]


def test_requests_at_once_share_their_beginning() -> None:
    tails = [[2, 3, 4], [5, 6], [7, 8, 9, 1], [5, 6, 7, *SYSTEM]]
    llm = LLM(RecurrentLM(), "none")
    prompts = [SYSTEM + tail for tail in tails]
    assert texts(llm, prompts, max_tokens=5) == wanted(prompts, max_tokens=5)
    stats = llm.prefix_stats
    assert (stats.sequences, stats.hits, stats.cached_tokens) == (4, 3, 3 * 60)


def test_requests_one_after_the_other_share_a_system_prompt() -> None:
    llm, cached = LLM(RecurrentLM(), "none"), []
    for number in range(1, 6):
        ids = [*SYSTEM, *[number] * 12]
        (done,) = llm.generate(ids, SamplingParams(max_tokens=4, seed=3))
        assert done.token_ids == wanted([ids], max_tokens=4)[0]
        cached.append(done.stats.cached_tokens)
    # the second one finds where texts depart, and keeps its state
    assert cached == [0, 0, 60, 60, 60]


def test_the_same_prompt_again_is_found() -> None:
    llm, cached = LLM(RecurrentLM(), "none"), []
    for _ in range(4):
        (done,) = llm.generate(SYSTEM, SamplingParams(max_tokens=4, seed=3))
        assert done.token_ids == wanted([SYSTEM], max_tokens=4)[0]
        cached.append(done.stats.cached_tokens)
    assert cached == [0, 0, 59, 59]


@pytest.mark.parametrize("draft", ["none", "ngram,min=1", "synthetic"])
def test_a_conversation_continues_from_the_cache(draft: str) -> None:
    llm = LLM(RecurrentLM(), draft)
    ids, cached = list(SYSTEM), []
    for _ in range(4):
        (done,) = llm.generate(ids, SamplingParams(max_tokens=6, seed=3))
        assert done.token_ids == wanted([ids], max_tokens=6)[0]
        cached.append(done.stats.cached_tokens)
        ids += [*done.token_ids, 3, 4, 5]
    assert cached[0] == 0
    # the last round's tokens are read again: at most a draft and its bonus
    assert all(have >= 60 + 9 * turn - 9 for turn, have in enumerate(cached[1:], 1))
    assert llm.prefix_stats.kept == 1


def test_a_conversation_whose_answer_changed_continues_from_its_prompt() -> None:
    llm = LLM(RecurrentLM(), "none")
    llm.generate(SYSTEM, SamplingParams(max_tokens=6, seed=3))
    ids = [*SYSTEM, 1, 1, 1, 1, 1, 1, 1]
    (done,) = llm.generate(ids, SamplingParams(max_tokens=6, seed=3))
    assert done.stats.cached_tokens == len(SYSTEM)
    assert done.token_ids == wanted([ids], max_tokens=6)[0]


def test_a_text_of_one_round_leaves_its_prompt() -> None:
    llm = LLM(RecurrentLM(), "none")
    llm.generate(SYSTEM, SamplingParams(max_tokens=1, seed=3))
    (done,) = llm.generate([*SYSTEM, 7], SamplingParams(max_tokens=5, seed=3))
    assert done.stats.cached_tokens == len(SYSTEM)


@pytest.mark.parametrize("keep", [0, 1, 2])
def test_evictions_change_no_text(keep: int) -> None:
    llm = LLM(RecurrentLM(), "synthetic,accept=0.7", prefix_cache_size=keep)
    prompts = [[start % 3, *SYSTEM, start] for start in range(7)]
    for ids in prompts:
        assert texts(llm, [ids], max_tokens=7) == wanted([ids], max_tokens=7)
    assert llm.prefix_stats.kept == keep


@pytest.mark.parametrize("draft", ["none", "synthetic,accept=0.7,width=2"])
def test_preempted_texts_are_read_again(draft: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(RecurrentLM(), draft)
    engine = engine_of(llm, EngineLimits(max_batch_size=4))
    prompts = [SYSTEM[:30], [*SYSTEM, 2], [7] * 9]
    sequences = [s for ids in prompts for s in request(llm, ids, max_tokens=30, seed=3)]
    engine.add(*sequences)
    for step in range(10_000):
        if engine.is_idle:
            break
        # every third step there is room for one only
        monkeypatch.setattr(SlotBudget, "num_slots", lambda self, length, most=1 if step % 3 == 2 else 9: most)
        engine.step()
        engine.check_integrity()
    assert [tuple(text(s)) for s in sequences] == wanted(prompts, max_tokens=30)


def test_cancelled_texts_leave_the_others_alone() -> None:
    model = RecurrentLM()
    llm = LLM(model, "synthetic,accept=0.7,width=2")
    prompts = [SYSTEM, [*SYSTEM, 2], [7] * 9, SYSTEM[:20]]
    sequences = [s for ids in prompts for s in request(llm, ids, max_tokens=30, seed=3)]
    llm.engine.add(*sequences)
    for number in (1, 2):
        llm.engine.step()
        llm.engine.abort(sequences[number : number + 1])
    run(llm.engine)
    found = [tuple(text(s)) for s in sequences]
    expected = wanted(prompts, max_tokens=30)
    assert (found[0], found[3]) == (expected[0], expected[3])
    assert all(found[number] == expected[number][: len(found[number])] for number in (1, 2))
    # what the cancelled ones had read is of use
    (again,) = request(llm, [*SYSTEM, 2, 9], max_tokens=5, seed=3)
    llm.engine.add(again)
    run(llm.engine)
    assert again.counts.cached_tokens >= 60
    assert tuple(text(again)) == wanted([[*SYSTEM, 2, 9]], max_tokens=5)[0]


class Failing(RecurrentLM):
    """Some passes over several sequences fail: before, or after they were computed, or when they are committed."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where, self._count = where, 0

    def _fail(self, where: str, num_slots: int) -> None:
        if where == self._where and num_slots > 1:
            self._count += 1
            if self._count % 3 == 0:
                raise RuntimeError("out of luck")

    def run(self, pass_: Pass) -> PassResult:
        self._fail("before", len(pass_.jobs))
        result = super().run(pass_)
        self._fail("after", len(pass_.jobs))
        return result

    def apply(self, edits: Sequence[Edit]) -> list[Slot]:
        if all(isinstance(edit, Commit) for edit in edits):
            self._fail("commit", len(edits))
        return super().apply(edits)


@pytest.mark.parametrize("draft", ["none", "synthetic,accept=0.7,width=2", "early-exit:1"])
@pytest.mark.parametrize("where", ["before", "after", "commit"])
def test_a_failed_pass_is_repeated_from_a_state_that_exists(where: str, draft: str) -> None:
    llm = LLM(Failing(where), draft, plan=None if draft == "none" else "fixed")
    for length in (25, 24, 9, 8):  # the end of a text may be in a failed pass
        prompts = [[length % 12, *SYSTEM], [7] * length, [5, 4, 3]]
        assert texts(llm, prompts, max_tokens=length) == wanted(prompts, max_tokens=length)


def test_prompts_are_scored() -> None:
    params = {"max_tokens": 3, "prompt_logprobs": 1}
    prompts = [SYSTEM, [*SYSTEM, 4, 4]]
    model = RecurrentLM()
    done = LLM(model, "none").generate(prompts, SamplingParams(seed=3, **params))
    plain = LLM(model.without_slots(), "none").generate(prompts, SamplingParams(seed=3, **params))
    for one, other in zip(done, plain, strict=True):
        assert one.token_ids == other.token_ids
        scores = [[entry.logprob for entry in each.prompt_logprobs[1:] if entry] for each in (one, other)]
        assert scores[0] == pytest.approx(scores[1])


def test_states_count_in_the_budget() -> None:
    model = RecurrentLM()
    parts = LLM(model, "synthetic,k=4").engine.parts
    budget = slot_budget(parts, 1_000_000)
    size = model.footprint.node
    assert budget.state_bytes == model.footprint.state == 4 * size
    logits = model.footprint.logits
    assert budget.round_bytes == 5 * (budget.round_bytes // 5)
    assert budget.round_bytes >= 5 * (size + logits)
    assert budget.slot_bytes(10) == budget.state_bytes + budget.round_bytes


def chain(slot: Slot, tokens: Sequence[int], *, settled: int = 0) -> Pass:
    return Pass([Extend(slot, tokens, range(-1, len(tokens) - 1), settled=settled)])


def test_states_are_kept_at_ends_of_chunks_only() -> None:
    """The rules of the reference itself: a wrong caller would be noticed."""
    model = RecurrentLM()
    slot = model.open()
    count = LEAST_KEPT
    for chunk in (SYSTEM[:count], SYSTEM[count : count + 3]):
        model.run(chain(slot, chunk, settled=len(chunk)))
        model.commit(slot, range(len(chunk)))
    assert [model.cut_length(slot, length) for length in (count - 1, count, count + 2, count + 3)] == [
        0, count, count, count + 3,
    ]  # fmt: skip
    with pytest.raises(AssertionError, match="is not kept"):
        model.truncate(slot, count + 1)
    from_slot = model.run(chain(slot, [4], settled=1)).logits.tensor()[0]
    assert torch.equal(from_slot, model.logits([*SYSTEM[: count + 3], 4]))
    with pytest.raises(AssertionError, match="begins with the settled"):
        model.commit(slot, ())
    assert model.cut_length(slot, slot.length) == count
    model.truncate(slot, count)
    assert torch.equal(model.run(chain(slot, [5])).logits.tensor()[0], model.logits([*SYSTEM[:count], 5]))


def test_large_states_limit_trees_rather_than_fail() -> None:
    rounds: list[RoundRecord] = []
    model = RecurrentLM()
    memory = 4 * 3 * model.footprint.node + 100
    llm = LLM(model, "synthetic,accept=1,k=16", plan="fixed", sequence_memory=memory, on_round=rounds.append)
    assert slot_budget(llm.engine.parts, memory).max_nodes == 3
    assert texts(llm, [[1, 2]], max_tokens=30) == wanted([[1, 2]], max_tokens=30)
    assert max(record.sequences[0].num_drafted for record in rounds) == 3
