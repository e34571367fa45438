"""Strategies: groups, siblings, samplings, phrases, tries and functions."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import pytest

from beam_oracles import logprobs, rescored, search
from draftree.beam.phrases import UnorderedPhrases
from draftree.beam.trie import TokenTrie
from draftree.core.errors import GenerationError, InvalidRequestError
from draftree.models.table import TableLM, hashed, listed

PROMPT = [1, 3]
TABLE = hashed(9, 8, scale=1.0)
COMMON = {"beam_width": 4, "num_return_sequences": 4, "max_new_tokens": 8}


def tokens(table: object, **given: object) -> list[tuple[int, ...]]:
    result = search(TableLM(table), PROMPT, ends=[0], **{**COMMON, **given})  # type: ignore[arg-type]
    return [found.tokens for found in result.hypotheses]


def test_groups_without_a_penalty_are_equal_searches() -> None:
    found = tokens(TABLE, num_beam_groups=2, diversity_penalty=0.0)
    assert [count for _, count in Counter(found).items()] == [2, 2]
    assert found[::2] == tokens(TABLE, beam_width=2, num_return_sequences=2)


def test_penalised_groups_of_one_beam_by_plain_loops() -> None:
    """Hamming diversity with groups of one beam: greedy texts one after another."""
    strength, expected, texts = 1.5, [], [[], [], []]
    totals = [0.0] * 3
    for _ in range(6):
        chosen: list[int] = []
        for group, text in enumerate(texts):
            row = logprobs(TABLE, (*PROMPT, *text))
            row = [value - strength * chosen.count(token) for token, value in enumerate(row)]
            token = max(range(len(row)), key=row.__getitem__)
            totals[group] += row[token]
            chosen.append(token)
        for text, token in zip(texts, chosen, strict=True):
            text.append(token)
    expected = sorted(zip(map(tuple, texts), totals, strict=True), key=lambda pair: -pair[1])
    result = search(
        TableLM(TABLE),
        PROMPT,
        beam_width=3,
        num_return_sequences=3,
        num_beam_groups=3,
        diversity_penalty=strength,
        max_new_tokens=6,
    )
    assert [found.tokens for found in result.hypotheses] == [text for text, _ in expected]
    assert [found.cumulative_logprob for found in result.hypotheses] == pytest.approx([total for _, total in expected])


def test_discounted_diversity_parts_groups_earlier_texts() -> None:
    plain = tokens(TABLE, num_beam_groups=2, diversity_penalty=0.05)
    strong = tokens(TABLE, num_beam_groups=2, diversity_penalty=0.05, diversity_discount=1.0)
    assert plain != strong


def test_siblings_without_effect_and_with() -> None:
    assert tokens(TABLE, sibling_penalty=1e-12) == tokens(TABLE)
    peaked = listed({}, [0.05, 0.5, 0.4, 0.05])
    result = search(TableLM(peaked), [1], beam_width=2, num_return_sequences=2, max_new_tokens=2, sibling_penalty=3.0)
    # the second step takes the best of each beam, with rank 1
    assert [found.tokens for found in result.hypotheses] == [(1, 1), (2, 1)]
    assert result.best.token_logprobs[1] == pytest.approx(logprobs(peaked, ())[1] - 3.0)


def test_independent_samples_are_ranked_and_reproducible() -> None:
    first = tokens(TABLE, sampling="independent", seed=3)
    assert first == tokens(TABLE, sampling="independent", seed=3)
    assert first != tokens(TABLE, sampling="independent", seed=4)
    result = search(TableLM(TABLE), PROMPT, ends=[0], sampling="independent", top_k=2, **COMMON)
    for found in result.hypotheses:
        assert found.cumulative_logprob == pytest.approx(rescored(TABLE, PROMPT, found.tokens))
        for place, token in enumerate(found.tokens):
            row = logprobs(TABLE, (*PROMPT, *found.tokens[:place]))
            assert row[token] >= sorted(row)[-2]


def test_independent_samples_follow_the_distribution() -> None:
    table = listed({}, [0.1, 0.2, 0.7])
    result = search(
        TableLM(table), [1], beam_width=4000, num_return_sequences=4000, max_new_tokens=1, sampling="independent"
    )
    counts = Counter(found.tokens[0] for found in result.hypotheses)
    assert [counts[token] / 4000 for token in range(3)] == pytest.approx([0.1, 0.2, 0.7], abs=0.03)


def occurs(phrase: Sequence[int], text: Sequence[int]) -> int:
    return sum(tuple(text[i : i + len(phrase)]) == tuple(phrase) for i in range(len(text)))


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_all_texts_contain_the_phrases(ordered: bool, seed: int) -> None:
    phrases = [(5, 6), (7,), (5, 6), (2, 3, 4)]
    result = search(
        TableLM(hashed(9, seed)),
        PROMPT,
        ends=[0],
        beam_width=10,
        num_return_sequences=3,
        max_new_tokens=14,
        force_words_ids=phrases,
        ordered=ordered,
        strict=True,
    )
    for found in result.hypotheses:
        assert found.constraints_met
        for phrase, count in Counter(phrases).items():
            assert occurs(phrase, found.tokens) >= count
        if ordered:
            text, start = list(found.tokens), 0
            for phrase in phrases:
                start = next(i for i in range(start, len(text)) if tuple(text[i : i + len(phrase)]) == phrase)
                start += len(phrase)
        assert found.cumulative_logprob == pytest.approx(rescored(hashed(9, seed), PROMPT, found.tokens))


def test_a_wide_search_finds_the_best_text_with_a_phrase() -> None:
    table = hashed(4, 2)
    phrase = (2, 3)
    allowed = [
        text for text in itertools.product(range(4), repeat=4) if 0 not in text[:-1] and occurs(phrase, text)
    ] + [
        text
        for size in (3,)
        for text in itertools.product(range(4), repeat=size)
        if text[-1] == 0 and 0 not in text[:-1] and occurs(phrase, text)
    ]
    best = max(allowed, key=lambda text: rescored(table, [1], text))
    result = search(
        TableLM(table),
        [1],
        ends=[0],
        beam_width=100,
        max_new_tokens=4,
        length_penalty=0.0,
        early_stopping="never",
        force_words_ids=[phrase],
    )
    assert result.best.tokens == best


def test_phrases_that_do_not_fit() -> None:
    given = {"beam_width": 3, "num_return_sequences": 3, "max_new_tokens": 3, "force_words_ids": [(5, 6, 7, 8)]}
    result = search(TableLM(TABLE), PROMPT, ends=[0], **given)
    assert result.hypotheses
    assert not any(found.constraints_met for found in result.hypotheses)
    forced = search(TableLM(TABLE), PROMPT, ends=[0], force_eos="model_score", **given)
    assert all(found.tokens[-1] == 0 and not found.constraints_met for found in forced.hypotheses)
    with pytest.raises(GenerationError, match="force_words_ids"):
        search(TableLM(TABLE), PROMPT, ends=[0], strict=True, **given)


def met_after(state: UnorderedPhrases, text: Sequence[int]) -> int:
    """Number of tokens after which all phrases are in the text."""
    for count, token in enumerate(text, 1):
        state = state.advance(token)
        if state.is_met:
            return count
    raise AssertionError("they never are")


def test_a_phrase_that_begins_another() -> None:
    root = UnorderedPhrases([(1,), (1, 2, 3)])
    for text in ([1, 2, 3, 1], [1, 9, 1, 2, 3], [1, 2, 9, 1, 2, 3]):
        assert met_after(root, text) == len(text)


@pytest.mark.parametrize("seed", range(3))
def test_trie_returns_its_best_sequences(seed: int) -> None:
    table = hashed(9, seed)
    sequences = [(a, b, 0) if (a + b) % 2 else (a, b, (a * b) % 9) for a in range(1, 9) for b in range(1, 9)]
    ranked = sorted(sequences, key=lambda text: -rescored(table, PROMPT, text))
    given = {"beam_width": 64, "num_return_sequences": 5, "length_penalty": 0.0, "early_stopping": "never"}
    result = search(TableLM(table), PROMPT, ends=[0], allowed_trie=TokenTrie(sequences), **given)
    assert [found.tokens for found in result.hypotheses] == ranked[:5]
    assert all(found.finish_reason == "stop" for found in result.hypotheses)


@pytest.mark.parametrize("ends", [[0], [0, 8]])
def test_sequences_that_begin_others_are_found(ends: list[int]) -> None:
    sequences = [(1,), (1, 2), (1, 2, 3, 4), (5,), (6, 7)]
    wanted = {
        text: max(rescored(TABLE, PROMPT, (*text, end)) for end in ends) if text in {(1,), (1, 2)} else
        rescored(TABLE, PROMPT, text) for text in sequences
    }  # fmt: skip
    given = {"beam_width": 8, "num_return_sequences": 8, "length_penalty": 0.0, "early_stopping": "never"}
    result = search(TableLM(TABLE), PROMPT, ends=ends, allowed_trie=TokenTrie(sequences), **given)
    found = [tuple(token for token in one.tokens if token not in ends) for one in result.hypotheses]
    assert found == sorted(wanted, key=lambda text: -wanted[text])
    assert [one.score for one in result.hypotheses] == pytest.approx(sorted(wanted.values(), reverse=True))
    assert all(one.finish_reason == "stop" for one in result.hypotheses)


def test_a_sequence_that_begins_another_needs_an_end_token() -> None:
    with pytest.raises(InvalidRequestError, match="begins another"):
        search(TableLM(TABLE), PROMPT, allowed_trie=TokenTrie([[1], [1, 2]]))


def test_trie_equals_a_function() -> None:
    sequences = [(a, b, c, 0) for a in (2, 5) for b in range(2, 9) for c in (1, 7) if (a + b + c) % 3]
    trie = TokenTrie(sequences)

    def allowed(index: int, ids: Sequence[int]) -> list[int]:
        assert index == 0
        text = tuple(ids[len(PROMPT) :])
        return sorted({found[len(text)] for found in sequences if found[: len(text)] == text})

    assert tokens(TABLE, allowed_trie=trie) == tokens(TABLE, prefix_allowed_tokens_fn=allowed)


def test_a_function_that_allows_nothing_ends_the_text() -> None:
    result = search(
        TableLM(TABLE),
        PROMPT,
        ends=[0],
        beam_width=2,
        prefix_allowed_tokens_fn=lambda _, ids: [4, 5] if len(ids) < 5 else [],
    )
    assert result.best.finish_reason == "exhausted"
    assert len(result.best.tokens) == 3
