"""Sequences whose trees come from clients: one round for each tree, parked ones, and passes that wait for trees."""

from __future__ import annotations

import random
from typing import Any

import pytest

from draftree import LLM, SamplingParams
from draftree.core.tree import EMPTY, TokenTree
from draftree.engine.client_drafts import longest_wait
from draftree.engine.sequence import ClientDrafts, WritingSequence
from draftree.lab.fleet.simulation import Fleet, FleetSettings, RoundOutcome, SimulatedRequest
from serving import tiny_llm

PROMPTS = [[40 + place, 50, 60, 41, 50, 60] * (1 + 3 * place) for place in range(5)]
PARAMS = [SamplingParams(max_tokens=14, temperature=0.9 * (place % 2), seed=place) for place in range(5)]


def given_sequences(llm: LLM) -> list[WritingSequence]:
    found = []
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        (sequence,) = llm.requests.sequences(prompt, params, draft="none")
        sequence.client_drafts = ClientDrafts()
        found.append(sequence)
    return found


def work(llm: LLM) -> None:
    """Step until only clients can go on."""
    for _ in range(200):
        if not llm.engine.has_work:
            return
        llm.engine.step()
        llm.engine.check_integrity()
    raise AssertionError("the engine ends its work")


def tree_for(sequence: WritingSequence, text: list[int], chooser: random.Random) -> TokenTree:
    """Some right tokens and some wrong ones, on two branches."""
    done = sequence.history.num_output_tokens
    depth = min(chooser.randint(0, 4), sequence.room - 1)
    right = text[done : done + depth]
    if not right:
        return EMPTY
    wrong = [(token + 1) % 90 for token in right]
    return TokenTree((*right, *wrong), (*range(-1, len(right) - 1), -1, *range(len(right), 2 * len(right) - 1)))


def run(batch: int, **options: Any) -> None:
    expected = [list(one.token_ids) for one in tiny_llm(None).generate(PROMPTS, PARAMS)]
    llm, chooser = tiny_llm(max_batch_size=batch, **options), random.Random(batch)
    sequences = given_sequences(llm)
    llm.engine.add(*sequences)
    work(llm)
    assert all(sequence.history.num_output_tokens == 0 for sequence in sequences), "they wait"
    while open_ones := [one for one in sequences if not one.is_finished]:
        chosen = [one for one in open_ones if chooser.random() < 0.5]
        lengths = {id(one): len(one.history) for one in open_ones}
        for one in chosen:
            llm.engine.paused.give(one, tree_for(one, expected[sequences.index(one)], chooser))
        if chooser.random() < 0.2:
            llm.engine.paused.park(chooser.choice(open_ones))
        work(llm)
        for one in open_ones:
            assert (len(one.history) > lengths[id(one)]) == (one in chosen), "one round for each tree"
    assert [one.history.output.tolist() for one in sequences] == expected
    assert llm.engine.is_idle
    assert sum(one.counts.accepted_tokens for one in sequences) > 0


def test_each_tree_is_one_round() -> None:
    run(8)


def test_more_sequences_than_places() -> None:
    run(2)
    run(1, prefix_cache_size=0)


def test_they_share_passes_with_other_requests() -> None:
    llm = tiny_llm("ngram", plan="fixed")
    sequences = given_sequences(llm)
    llm.engine.add(*sequences)
    params = SamplingParams(max_tokens=20, temperature=0)
    assert llm.generate("the dog", params)[0].token_ids == tiny_llm(None).generate("the dog", params)[0].token_ids
    assert all(sequence.history.num_output_tokens == 0 for sequence in sequences)
    llm.engine.abort(sequences)
    llm.engine.check_integrity()
    assert llm.engine.is_idle


def test_parked_sequences_can_be_aborted() -> None:
    llm = tiny_llm(None, max_batch_size=1)
    sequences = given_sequences(llm)
    llm.engine.add(*sequences)
    work(llm)
    llm.engine.abort(sequences[:3])
    work(llm)
    llm.engine.paused.give(sequences[0], EMPTY)
    llm.engine.abort(sequences)
    work(llm)
    assert llm.engine.is_idle
    assert not llm.engine.running
    assert not llm.engine.waiting


@pytest.mark.parametrize(
    ("due", "seconds", "until"),
    [
        (
            5.0,
            7.0,
            6.0,
        ),  # near clients: up to 0.9 of a pass after the first tree, and a tenth of a pass longer than due
        (8.5, 7.0, 9.0),
        (9.5, 7.0, None),
        (2.0, 9.0, 2.5),  # far clients: up to a quarter of a pass
        (3.0, 9.0, None),
        (-5.0, 9.0, -4.0),  # overdue: the wait is over
        (None, None, None),
        (5.0, None, None),
    ],
)
def test_the_longest_wait(due: float | None, seconds: float | None, until: float | None) -> None:
    assert longest_wait(0.0, 0.0, due, seconds, 10.0) == until


def test_a_pass_that_could_begin_later_waits_longer_for_near_clients() -> None:
    assert longest_wait(0.0, 3.0, 11.0, 7.0, 10.0) == 12.0
    assert longest_wait(0.0, 3.0, 4.0, 9.0, 10.0) is None


def test_a_pass_waits_for_the_other_tree_and_not_for_clients_that_stay_away() -> None:
    llm, now = tiny_llm(None), [0.0]
    paused = llm.engine.paused
    paused.batcher.clock = lambda: now[0]
    first, second, *others = given_sequences(llm)
    llm.engine.add(first, second)
    work(llm)
    for one in (first, second):
        paused.give(one, EMPTY)
    assert paused.patience == 0.0, "the time of a pass is unknown"
    paused.batcher.fixed = 10.0
    work(llm)  # both verdicts are sent at 0
    paused.give(first, EMPTY, arrived=4.0)
    now[0] = 4.0
    assert paused.patience == 0.0, "it is not known when the second tree comes"
    paused.give(second, EMPTY, arrived=5.0)
    assert paused.patience == 0.0, "all are here"
    now[0] = 20.0
    work(llm)  # verdicts at 20; they were away for 4 and 5 seconds
    paused.give(first, EMPTY, arrived=23.0)
    now[0] = 23.0
    assert paused.patience == pytest.approx(3.0), "due at 25, and a tenth of a pass"
    now[0] = 26.5
    assert paused.patience == 0.0, "it does not come"
    now[0] = 24.0
    llm.engine.add(others[0])
    assert paused.patience == 0.0, "a text that waits for its place is not delayed"
    llm.engine.step()
    (plain,) = llm.requests.sequences([5, 6, 7], SamplingParams(max_tokens=9), draft="none")
    llm.engine.add(plain)
    llm.engine.step()
    paused.give(first, EMPTY, arrived=24.0)
    assert not plain.is_finished
    assert paused.patience == 0.0, "another text could go on"
    llm.engine.abort([first, second, others[0], plain])
    llm.engine.check_integrity()


class Flat:
    """A pass that always takes ten seconds."""

    def seconds(self, batch: int, rows: int, prefix: float, *, prompt_rows: int = 0) -> float:
        return 10.0


def test_simulated_clients_share_passes_if_steps_wait() -> None:
    """Two clients, the second 5 seconds later; both are away for 7 seconds between their trees."""
    requests = [SimulatedRequest(start, 1, 4, (RoundOutcome(0, 1, 4.0),)) for start in (0.0, 5.0)]
    away = {"round_trip": 3.0}
    apart = Fleet(Flat(), FleetSettings(**away)).run(requests)
    together = Fleet(Flat(), FleetSettings(**away, gathers=True)).run(requests)
    assert (apart.steps, apart.seconds) == (8, 80.0), "in turn: the server has no pause"
    # when the second returns for the first time is not known at 20; at 30 it is, and they share the other passes
    assert (together.steps, together.seconds) == (6, 30 + 3 * (7 + 10))
