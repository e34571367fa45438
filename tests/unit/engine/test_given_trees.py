"""Sequences whose trees come from clients: one round for each tree, more sequences than places, parked ones."""

from __future__ import annotations

import random
from typing import Any

from draftree import LLM, SamplingParams
from draftree.core.tree import EMPTY, TokenTree
from draftree.engine.given import GivenTrees
from draftree.engine.sequence import WritingSequence
from serving import tiny_llm

PROMPTS = [[40 + place, 50, 60, 41, 50, 60] * (1 + 3 * place) for place in range(5)]
PARAMS = [SamplingParams(max_tokens=14, temperature=0.9 * (place % 2), seed=place) for place in range(5)]


def given_sequences(llm: LLM) -> list[WritingSequence]:
    found = []
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        (sequence,) = llm.requests.sequences(prompt, params, draft="none")
        sequence.given = GivenTrees()
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
            llm.engine.held.give(one, tree_for(one, expected[sequences.index(one)], chooser))
        if chooser.random() < 0.2:
            llm.engine.held.park(chooser.choice(open_ones))
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
    llm.engine.held.give(sequences[0], EMPTY)
    llm.engine.abort(sequences)
    work(llm)
    assert llm.engine.is_idle
    assert not llm.engine.running
    assert not llm.engine.waiting
