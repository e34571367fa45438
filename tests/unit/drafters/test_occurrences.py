"""The index of runs equals a search place by place, for any chunking and eviction."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.drafters.lookup.occurrences import SEPARATOR, Match, Occurrences


def match(text: list[int], place: int, tail: list[int]) -> int:
    length = 0
    while length < min(len(tail), place + 1) and text[place - length] == tail[-1 - length]:
        length += 1
    return length


def continuation(text: list[int], place: int, depth: int) -> tuple[int, ...]:
    followers = text[place + 1 : place + 1 + depth]
    return (*followers, *[SEPARATOR] * (depth - len(followers)))


def searched(
    texts: list[list[int]], tail: list[int], *, shortest: int, depth: int
) -> list[tuple[int, tuple[int, ...]]]:
    found = [(match(t, place, tail), continuation(t, place, depth)) for t in texts for place in range(len(t))]
    return sorted(entry for entry in found if entry[0] >= shortest)


def listed(matches: list[Match]) -> list[tuple[int, tuple[int, ...]]]:
    return sorted((match.length, tuple(match.followers)) for match in matches)


TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=60), min_size=1, max_size=4)


@given(texts=TEXTS, tail=st.lists(st.integers(0, 2), min_size=1, max_size=12), shortest=st.integers(1, 3))
def test_all_places_in_all_texts_are_found(texts: list[list[int]], tail: list[int], shortest: int) -> None:
    index = Occurrences((8, shortest), capacity=2000)
    for text in texts:
        index.add_text(np.array(text))
    found = index.find(np.array(tail), depth=4, limit=999)
    assert listed(found) == searched(texts, tail, shortest=shortest, depth=4)


@given(
    pieces=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=50), min_size=1, max_size=5),
    shortest=st.integers(1, 3),
    longest=st.integers(3, 12),
)
def test_a_text_that_grows_finds_itself(pieces: list[list[int]], shortest: int, longest: int) -> None:
    index, text = Occurrences((6, shortest), room=16), []
    for piece in pieces:
        index.extend(np.array(piece))
        text += piece
        found = index.find(np.array(text[-longest:]), depth=5, limit=999, is_own=True)
        expected = []
        for place in range(len(text) - 1):
            length = match(text, place, text[-longest:])
            if length >= shortest:
                # what follows an overlapping match is the text, and then the copy of itself
                copied = list(text)
                for step in range(5):
                    copied.append(copied[place + 1 + step])
                expected.append((length, tuple(copied[len(text) :])))
        assert listed(found) == sorted(expected)


def test_of_many_places_the_latest_are_taken_and_long_matches_are_not_lost() -> None:
    text = [7, 1, 2, 3, 4, 5, 6, 9, 50] + [6, 9, 51] * 100
    index = Occurrences((6, 1), capacity=2000)
    index.add_text(np.array(text))
    few = index.find(np.array([6, 9]), depth=1, limit=10)
    assert listed(few) == [(2, (51,))] * 10
    long = index.find(np.array([7, 1, 2, 3, 4, 5, 6, 9]), depth=1, limit=10)
    assert (8, (50,)) in listed(long)


@given(texts=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=30), max_size=30), capacity=st.integers(1, 60))
def test_memory_is_bounded_and_the_oldest_texts_go(texts: list[list[int]], capacity: int) -> None:
    index = Occurrences((3, 1), capacity=capacity)
    num_bytes = index.num_bytes
    for text in texts:
        index.add_text(np.array(text))
        assert len(index) <= capacity
    assert index.num_bytes == num_bytes
    for tail in ([0], [1, 2], [3, 3, 3]):
        found = listed(index.find(np.array(tail), depth=3, limit=999))
        # whole texts from the last one backwards, the oldest of them perhaps only in part where it was too long
        suffixes = [searched(texts[start:], tail, shortest=1, depth=3) for start in range(len(texts) + 1)]
        if max(map(len, texts), default=0) < 0.75 * capacity - 1:
            assert found in suffixes
        if texts and len(texts[-1]) < 0.75 * capacity - 1:
            assert set(searched(texts[-1:], tail, shortest=1, depth=3)) <= set(found)


def test_no_match_reaches_across_texts() -> None:
    index = Occurrences((4, 1), capacity=100)
    index.add_text(np.array([1, 2]))
    index.add_text(np.array([3, 4]))
    assert listed(index.find(np.array([1, 2, 3]), depth=2, limit=9)) == [(1, (4, SEPARATOR))]
    assert listed(index.find(np.array([2]), depth=2, limit=9)) == [(1, (SEPARATOR, SEPARATOR))]


def test_a_million_tokens_cost_twenty_bytes_each() -> None:
    assert Occurrences((8, 1), capacity=1_000_000).num_bytes <= 22 * 1_000_000


def test_adding_a_token_to_a_long_text_touches_little_memory() -> None:
    """A scan over all tokens would need memory for each of them; the index grows only a few times."""
    index, peaks = Occurrences((8, 1)), list[int]()
    index.extend(np.random.default_rng(0).integers(0, 1000, 500_000))
    tracemalloc.start()
    for token in range(200):
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        index.extend(np.array([token]))
        peaks.append(tracemalloc.get_traced_memory()[1] - before)
    tracemalloc.stop()
    assert sum(peak > 50_000 for peak in peaks) <= 1, "at most one growth"


@pytest.mark.parametrize("count", [1, 31, 32, 33, 200])
def test_few_and_many_tokens_are_linked_alike(count: int) -> None:
    tokens = np.random.default_rng(count).integers(0, 3, count)
    one, by_one = Occurrences((5, 2)), Occurrences((5, 2))
    one.extend(tokens)
    for token in tokens:
        by_one.extend(np.array([token]))
    tail = tokens[-9:]
    found, other = (x.find(tail, depth=3, limit=7, is_own=True) for x in (one, by_one))
    assert found == other
