"""The suffix drafter: trees by counts as a slow reference grows them, memory across requests, unchanged texts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftree import LLM, SamplingParams
from draftree.core.errors import ConfigurationError
from draftree.core.tree import ROOT, Draw, TokenTree
from draftree.core.types import Budget
from draftree.drafters.base import SequenceView
from draftree.drafters.lookup.counting import ESCAPE, MEAN_FACTOR, MOST, RATE, VOTES, NoveltyPrior
from draftree.drafters.suffix import EARLIER_WEIGHT, SuffixDrafter
from draftree.models.table import TableLM, hashed
from views import context_of, view_of

PLENTY = Budget(99, 99)
VOCAB = 99


def build(draw: Draw = Draw.FREE, *, shares_noise: bool = True, **options: float) -> SuffixDrafter:
    return SuffixDrafter(SuffixDrafter.Config(**options), context_of(VOCAB, draw, shares_noise=shares_noise))  # type: ignore[arg-type]


def view(tokens: list[int], prompt_length: int | None = None, *, temperature: float = 0.0) -> SequenceView:
    found = view_of(tokens[:prompt_length], vocab_size=VOCAB, temperature=temperature)
    found.history.append(tokens[len(found.history) :])
    return found


def finish(drafter: SuffixDrafter, tokens: list[int], prompt_length: int = 1) -> None:
    drafter.close(drafter.open(view(tokens, prompt_length)))


def drafted(
    drafter: SuffixDrafter, tokens: list[int], budget: Budget = PLENTY, *, temperature: float = 0.0
) -> TokenTree:
    return drafter.draft_one(drafter.open(view(tokens, temperature=temperature)), budget)


def chances(tree: TokenTree) -> dict[tuple[int, ...], float]:
    return {tuple(tree.tokens[n] for n in tree.path(node)): math.exp(score) for node, score in enumerate(tree.scores)}


def reference(
    tokens: list[int], earlier: list[list[int]], *, shortest: int, longest: int, depth: int
) -> dict[tuple[int, ...], float]:
    """Survival of every path, from votes counted one by one."""
    matches = []
    for text, weight in [(tokens, 1.0), *((other, EARLIER_WEIGHT) for other in earlier)]:
        for place in range(len(text) - (text is tokens)):
            length = 0
            while length < min(longest, len(tokens), place + 1) and text[place - length] == tokens[-1 - length]:
                length += 1
            copied = list(text)
            if text is tokens:
                for step in range(depth):
                    copied.append(copied[place + 1 + step])
                copied = [*text, *copied[len(text) :]]
            if length >= shortest:
                matches.append((length, copied[place + 1 : place + 1 + depth], weight))
    paths: dict[tuple[int, ...], float] = {}

    def go_on(path: tuple[int, ...], survival: float) -> None:
        agreeing = [v for v in matches if tuple(v[1][: len(path)]) == path and len(v[1]) > len(path)]
        votes = dict.fromkeys(sorted({v[1][len(path)] for v in agreeing}), 0.0)
        for length, followers, weight in agreeing:
            votes[followers[len(path)]] += weight * VOTES[length + len(path)]
        total = sum(votes.values()) + ESCAPE
        for token, count in votes.items():
            paths[(*path, token)] = survival * count / total
            if len(path) + 1 < depth:
                go_on((*path, token), paths[(*path, token)])

    go_on((), 1.0)
    return paths


@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=30),
    earlier=st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=20), max_size=2),
    shortest=st.integers(1, 3),
    num_nodes=st.integers(1, 12),
    floor=st.sampled_from([0.0, 0.05, 0.2, 0.5]),
)
def test_trees_hold_the_likeliest_paths_of_a_slow_count(
    tokens: list[int], earlier: list[list[int]], shortest: int, num_nodes: int, floor: float
) -> None:
    drafter = build(min=shortest, max=6, k=4, nodes=num_nodes, width=3, floor=floor, memory=5000)
    for text in earlier:
        finish(drafter, text)
    found = chances(drafted(drafter, tokens))
    depth = min(4, num_nodes)
    expected = reference(tokens, earlier, shortest=shortest, longest=6, depth=depth)
    likely = sorted((chance for chance in expected.values() if chance >= floor), reverse=True)[:num_nodes]
    assert found == pytest.approx({path: expected[path] for path in found})
    assert sorted(found.values(), reverse=True) == pytest.approx(likely)


def test_counts_by_hand() -> None:
    """5 was followed by 6 twice and by 7 once; matches of one token count 1 each, 2.5 are for the unseen."""
    tree = drafted(build(floor=0.1, k=1), [5, 6, 1, 5, 7, 2, 5, 6, 3, 5])
    assert chances(tree) == pytest.approx({(6,): 2 / 5.5, (7,): 1 / 5.5})
    assert tree.parents == (ROOT, ROOT)


def test_long_matches_outvote_short_ones() -> None:
    tree = drafted(build(k=1), [1, 2, 3, 4, 50, 9, 4, 60, 9, 4, 60, 1, 2, 3, 4])
    assert tree.tokens[0] == 50


def test_repetition_goes_on_repeating() -> None:
    tree = drafted(build(width=1), [8, 1, 2, 3, 1, 2, 3, 1, 2, 3])
    assert tree.tokens[:6] == (1, 2, 3, 1, 2, 3)


def test_nothing_grows_below_a_node_under_the_confidence() -> None:
    tokens = [5, 6, 1, 5, 7, 2, 5]
    assert max(len(p) for p in chances(drafted(build(floor=0), tokens))) > 1
    assert all(len(p) == 1 for p in chances(drafted(build(floor=0), tokens, Budget(9, 9, min_confidence=0.9))))


def test_a_finished_answer_is_remembered_with_the_end_of_its_prompt_only() -> None:
    drafter = build(floor=0.01, max=2)
    finish(drafter, [10, 11, 12, 13, 20, 21, 22], prompt_length=4)
    assert drafted(drafter, [98, 12, 13]).tokens[:3] == (20, 21, 22)
    assert not len(drafted(drafter, [98, 10, 11])), "the prompt itself is not remembered"


def test_an_open_sequence_is_not_in_memory_yet() -> None:
    drafter = build(floor=0.01)
    state = drafter.open(view([1, 2, 3, 4, 5], 1))
    assert not len(drafted(drafter, [1, 2]))
    drafter.close(state)
    assert drafted(drafter, [1, 2]).tokens[0] == 3


def test_forgetting_and_having_no_memory_are_the_same() -> None:
    forgetful, without = build(floor=0.01), build(floor=0.01, memory=0)
    for drafter in (forgetful, without):
        finish(drafter, [1, 2, 3, 4, 5])
    forgetful.forget()
    assert not len(drafted(forgetful, [1, 2]))
    assert not len(drafted(without, [1, 2]))
    finish(forgetful, [1, 2, 3])
    assert len(drafted(forgetful, [1, 2]))


def test_the_oldest_answers_leave_a_small_memory() -> None:
    drafter = build(floor=0.01, memory=100)
    for first in range(0, 90, 10):
        finish(drafter, [first, *range(first + 1, first + 9)] * 3)
    assert not len(drafted(drafter, [0]))
    assert drafted(drafter, [80]).tokens[0] == 81


def test_the_noise_that_will_choose_ranks_the_candidates() -> None:
    """Both followers are as frequent; whichever the noise favours is the likelier pick."""
    tokens = [5, 6, 1, 5, 7, 2, 5]
    seen = view(tokens, temperature=1.0)
    factors = [math.exp(seen.controls.noise.gumbel(len(tokens), torch.tensor([token])).item()) for token in (6, 7)]
    total = sum(factors) + ESCAPE * MEAN_FACTOR
    found = chances(drafted(build(floor=0, k=1), tokens, temperature=1.0))
    assert found == pytest.approx({(6,): factors[0] / total, (7,): factors[1] / total}, rel=1e-5)
    unknowing = chances(drafted(build(shares_noise=False, floor=0, k=1), tokens, temperature=1.0))
    assert unknowing == pytest.approx({(6,): 1 / 4.5, (7,): 1 / 4.5})


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_memory_makes_the_second_text_cheap_and_leaves_it_as_it_is(temperature: float) -> None:
    params = SamplingParams(max_tokens=120, temperature=temperature, seed=3)
    table = TableLM(hashed(40, seed=3, scale=3.0), order=2)
    plain = LLM(table, "none").generate([[1, 2, 3]], params)[0]
    llm = LLM(table, "suffix", plan="fixed")
    first, second = (llm.generate([[1, 2, 3]], params)[0] for _ in range(2))
    llm.forget()
    third = llm.generate([[1, 2, 3]], params)[0]
    assert first.token_ids == second.token_ids == third.token_ids == plain.token_ids
    assert second.stats.rounds < 0.7 * first.stats.rounds
    assert third.stats.rounds == first.stats.rounds


def test_a_chain_of_it_serves_rules_that_read_draft_distributions() -> None:
    table = TableLM(hashed(9, seed=3, scale=3.0), order=2)
    done = LLM(table, "suffix,width=1", verify="token").generate([[1, 2] * 9], SamplingParams(max_tokens=60, seed=3))
    assert done[0].stats.accepted_tokens > 0
    with pytest.raises(ConfigurationError, match="use verifier 'coupled'"):
        LLM(table, "suffix", verify="token")


def test_a_text_that_goes_on_as_guessed_is_trusted_further_and_one_that_does_not_less() -> None:
    tree = TokenTree((5, 6, 7), (ROOT, 0, ROOT), (math.log(0.6), math.log(0.3), math.log(0.2)))
    start = [1, 2, 3]
    right, half, wrong, other = NoveltyPrior(), NoveltyPrior(), NoveltyPrior(), NoveltyPrior()
    for trust, written in ((right, [5, 6]), (half, [5, 9]), (wrong, [9]), (other, [7, 4])):
        trust.remember(tree, len(start))
        trust.learn(np.array(start + written))
    # by hand: children of the root had 0.8 together, the node after 5 had 0.3 / 0.6
    expected = [0.8 - 1 + 0.5 - 1, 0.8 - 1 + 0.5, 0.8, 0.8 - 1]
    errors = [math.log(trust.unseen / ESCAPE) / RATE for trust in (right, half, wrong, other)]
    assert errors == pytest.approx(expected)


def test_a_draft_teaches_once_and_trust_has_bounds() -> None:
    tree, trust = TokenTree((5,), (ROOT,), (math.log(0.9),)), NoveltyPrior()
    trust.remember(tree, 0)
    trust.learn(np.array([9]))
    learned = trust.unseen
    trust.learn(np.array([9, 9]))
    assert trust.unseen == learned > ESCAPE
    for _ in range(1000):
        trust.remember(tree, 0)
        trust.learn(np.array([9]))
    assert trust.unseen == MOST


def test_a_copy_is_drafted_longer_the_longer_it_lasts() -> None:
    text = list(range(1, 91))
    options = {"k": 60, "nodes": 60, "width": 1, "floor": 0.3, "max": 4}
    drafter = build(**options)
    state = drafter.open(view([*text, 1], 90))
    for token in text[1:12]:
        drafter.draft_one(state, PLENTY)
        state.view.history.append([token])
    fresh = drafted(build(**options), state.view.history.tokens.tolist())
    assert len(drafter.draft_one(state, PLENTY)) > len(fresh) > 0
