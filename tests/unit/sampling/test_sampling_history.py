"""Histories, and their index of n-grams, which finds what a search of the whole text finds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.sampling.history import History, NgramIndex

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


@given(TOKENS.filter(bool), st.lists(TOKENS, max_size=8), st.integers(0, 100))
def test_is_a_list_with_a_prompt_length(prompt: list[int], pieces: list[list[int]], capacity: int) -> None:
    history = History(prompt, capacity=capacity)
    written: list[int] = []
    for piece in pieces:
        history.append(piece)
        written += piece
        assert history.tokens.tolist() == prompt + written
        assert history.output.tolist() == written
        assert (len(history), history.num_output_tokens) == (len(prompt + written), len(written))
    assert history.tokens.dtype == np.int64
    assert history.prompt_length == len(prompt)


def test_tokens_since_a_place_are_a_list_of_their_own() -> None:
    history = History([1, 2, 3])
    history.append(range(4, 40))  # the array grows
    since = history.since(2)
    history.append([0])
    assert since == list(range(3, 40))
    assert history.since(len(history)) == []


def searched(tokens: list[int], context: list[int]) -> list[int]:
    """Every follower of the context, as often as it follows."""
    last = len(context)
    return sorted(tokens[end] for end in range(last, len(tokens)) if tokens[end - last : end] == context)


def found(index: NgramIndex, tokens: np.ndarray, contexts: list[list[int]]) -> list[list[int]]:
    rows, followers = index.followers(tokens, np.array(contexts))
    return [sorted(followers[rows == row].tolist()) for row in range(len(contexts))]


@given(
    st.lists(st.integers(0, 3), max_size=60),
    st.lists(st.integers(1, 40), max_size=6),
    st.integers(2, 12),
    st.sampled_from([0, 1, 2**63, 0x9E3779B97F4A7C15]),
)
def test_followers_equal_a_search_as_the_text_grows(
    tokens: list[int], steps: list[int], size: int, multiplier: int
) -> None:
    # multiplier 0 hashes the newest token only, so that most contexts collide
    index = NgramIndex(size, multiplier=multiplier)
    ends = [end for end in np.cumsum([0, *steps]) if end <= len(tokens)]
    for end in [*ends, len(tokens)]:
        written = np.array(tokens[:end], dtype=np.int64)
        index.extend(written)
        contexts = [tokens[start : start + size - 1] for start in range(end - size + 2)]
        contexts.append([3] * (size - 1))
        assert found(index, written, contexts) == [searched(tokens[:end], context) for context in contexts]


@pytest.mark.parametrize("chunk", [1, 7, 128, 129, 1000])
def test_long_texts_are_sorted_in_parts(chunk: int) -> None:
    tokens = np.random.default_rng(0).integers(0, 6, 1000)
    index = NgramIndex(4)
    for end in [*range(chunk, len(tokens), chunk), len(tokens)]:
        index.extend(tokens[:end])
    contexts = tokens[np.arange(0, 900, 50)[:, None] + np.arange(3)].tolist()
    assert found(index, tokens, contexts) == [searched(tokens.tolist(), context) for context in contexts]
    assert sum(map(len, found(index, tokens, contexts))) > len(contexts)


def test_a_history_keeps_an_index_for_each_size_and_start() -> None:
    history = History([1, 2, 1])
    pairs, generated = history.ngrams(2), history.ngrams(2, start=3)
    history.append([2, 1, 2])
    assert history.ngrams(2) is pairs
    assert history.ngrams(2, start=3) is generated
    assert history.ngrams(3) is not pairs
    assert found(pairs, history.tokens, [[1], [2]]) == [[2, 2, 2], [1, 1]]
    assert found(generated, history.output, [[1], [2]]) == [[2], [1]]
