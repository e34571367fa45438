"""Properties of every search, for random parameters on random tables."""

from __future__ import annotations

import random
from typing import Any

import pytest

from beam_oracles import rescored
from draftree.beam.params import BeamSearchParams
from draftree.beam.search import BeamSearch
from draftree.models.table import TableLM, hashed

VOCAB, END = 9, 0


def drawn(seed: int) -> BeamSearchParams:
    """Return random parameters that fit together."""
    chance = random.Random(seed)
    width = chance.choice([2, 3, 4, 8, 16])
    given: dict[str, Any] = {
        "beam_width": width,
        "num_return_sequences": width,
        "max_new_tokens": chance.choice([5, 8, 12]),
        "min_new_tokens": chance.choice([0, 0, 3]),
        "length_penalty": chance.choice([-1.0, 0.0, 0.6, 2.0]),
        "early_stopping": chance.choice([True, False, "never", "fcfs"]),
        "eos_rule": chance.choice(["top_k", "walk", "any"]),
        "no_repeat_ngram_size": chance.choice([0, 0, 2, 3]),
        "ngram_scope": chance.choice(["all", "generated"]),
        "suppress_tokens": chance.choice([(), (4, 7)]),
        "force_eos": chance.choice(["none", "none", "model_score", "zero_score"]),
    }
    given |= chance.choice(
        [
            {},
            {"force_words_ids": [[3, 5], [6]]},
            {"force_words_ids": [[3], [5, 3]], "ordered": True},
            {"sibling_penalty": 0.7},
            {"num_beam_groups": width if width % 2 else 2, "diversity_penalty": 0.5},
        ]
    )
    return BeamSearchParams(**given)


def run(seed: int, order: list[int]) -> list[Any]:
    prompts = [[1, 3], [2], [8, 8, 1, 2]]
    params = [drawn(10 * seed + place) for place in range(3)]
    search = BeamSearch(TableLM(hashed(VOCAB, seed, scale=1.5)), end_ids=[END])
    results = search.run([prompts[place] for place in order], [params[place] for place in order])
    return [(params[place], prompts[place], result) for place, result in zip(order, results, strict=True)]


def has_repeat(tokens: list[int], size: int) -> bool:
    runs = [tuple(tokens[start : start + size]) for start in range(len(tokens) - size + 1)]
    return len(set(runs)) < len(runs)


def contains(tokens: tuple[int, ...], phrases: list[list[int]], *, ordered: bool) -> bool:
    start = 0
    for phrase in phrases:
        places = [place for place in range(start, len(tokens)) if list(tokens[place : place + len(phrase)]) == phrase]
        if not places:
            return False
        start = places[0] + len(phrase) if ordered else 0
    return True


@pytest.mark.parametrize("seed", range(25))
def test_every_search_keeps_its_rules(seed: int) -> None:
    for params, prompt, result in run(seed, [0, 1, 2]):
        found = result.hypotheses
        assert len(found) <= params.num_return_sequences
        met = [one.score for one in found if one.constraints_met]
        assert met == sorted(met, reverse=True)
        assert [one.constraints_met for one in found] == sorted((one.constraints_met for one in found), reverse=True)
        if params.num_beam_groups == 1:
            assert len({one.tokens for one in found}) == len(found), "texts differ"
        for one in found:
            before_end = one.tokens[:-1] if one.tokens[-1] == END else one.tokens
            assert END not in before_end
            assert len(one.tokens) <= params.max_new_tokens
            assert one.finish_reason != "stop" or len(before_end) >= params.min_new_tokens
            assert not set(one.tokens) & set(params.suppress_tokens)
            size, whole = params.no_repeat_ngram_size, params.ngram_scope == "all"
            # a forced end is written whatever it repeats
            if size and not has_repeat(prompt, size):
                assert not has_repeat([*(prompt if whole else ()), *before_end], size)
            if params.force_words_ids:
                phrases = [list(phrase) for phrase in params.force_words_ids]
                assert one.constraints_met <= contains(one.tokens, phrases, ordered=params.ordered)
            assert sum(one.token_logprobs) == pytest.approx(one.cumulative_logprob, abs=1e-4)
            assert one.score == pytest.approx(one.cumulative_logprob / len(one.tokens) ** params.length_penalty)
            plain = not params.sibling_penalty and not params.diversity_penalty and params.force_eos != "zero_score"
            if plain:
                assert one.cumulative_logprob == pytest.approx(
                    rescored(hashed(VOCAB, seed, scale=1.5), prompt, one.tokens)
                )


@pytest.mark.parametrize("seed", range(8))
def test_the_order_of_prompts_does_not_matter(seed: int) -> None:
    first = {tuple(prompt): result for _, prompt, result in run(seed, [0, 1, 2])}
    again = {tuple(prompt): result for _, prompt, result in run(seed, [2, 0, 1])}
    for prompt, result in first.items():
        assert again[prompt].hypotheses == result.hypotheses
