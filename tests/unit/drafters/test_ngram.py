"""Prompt lookup: the longest match wins, among equal ones the latest, and the fast search equals a slow one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree import LLM, SamplingParams
from draftree.core.tree import Draw
from draftree.core.types import Budget
from draftree.drafters.ngram import NgramDrafter, find_continuation, run_before, scores_of
from draftree.models.table import TableLM, hashed
from views import context_of, view_of


def searched(tokens: list[int], *, longest: int, shortest: int) -> int | None:
    """Place by place, longest run first, from the end."""
    for length in range(longest, shortest - 1, -1):
        tail = tokens[-length:]
        for start in range(len(tokens) - length - 1, -1, -1):
            if len(tail) == length and tokens[start : start + length] == tail:
                return start + length
    return None


PLENTY = Budget(9, 9)


def drafted(tokens: list[int], **options: int) -> list[int]:
    drafter = NgramDrafter(NgramDrafter.Config(**options), context_of(99, Draw.POINT))
    (tree,) = drafter.draft([drafter.open(view_of(tokens, vocab_size=99))], [PLENTY])
    return list(tree.tokens)


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([1, 2, 3, 4, 1, 2], [3, 4, 1, 2]),
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2]),
        ([7, 1, 2, 3, 9, 1, 2, 4, 7, 1, 2], [3, 9, 1, 2, 4, 7, 1, 2]),
        ([1, 2, 3, 4], []),
        ([5], []),
        ([5, 5], []),
        ([5, 5, 5], [5]),
        ([5, 5, 5, 5, 5], [5]),
        ([1, 2, 1, 2, 1, 2], [1, 2]),
        ([3, 1, 9, 2, 1], []),
    ],
)
def test_lookups_by_hand(tokens: list[int], found: list[int]) -> None:
    assert drafted(tokens) == found


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"min": 1, "max": 1}, [7, 2, 3]),
        ({"min": 1, "max": 2}, [6, 9, 3, 7, 2, 3]),
        ({"min": 1, "max": 4}, [6, 9, 3, 7, 2, 3]),
        ({"min": 3, "max": 4}, []),
        ({"min": 2, "max": 4, "k": 2}, [6, 9]),
    ],
)
def test_options_say_how_much_must_match(options: dict[str, int], found: list[int]) -> None:
    assert drafted([2, 3, 5, 2, 3, 6, 9, 3, 7, 2, 3], **options) == found


@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    shortest=st.integers(1, 4),
    more=st.integers(0, 4),
)
def test_the_search_finds_what_a_slow_one_finds(tokens: list[int], shortest: int, more: int) -> None:
    longest = shortest + more
    found = find_continuation(np.array(tokens), longest=longest, shortest=shortest)
    assert found == searched(tokens, longest=longest, shortest=shortest)


def test_a_text_that_repeats_is_written_in_few_rounds() -> None:
    def table(context: tuple[int, ...]) -> object:
        logits = hashed(9, seed=1)(()).clone()
        logits[(context[-1] + 1) % 9 if context else 0] += 20.0
        return logits

    llm = LLM(TableLM(table), "ngram", plan="fixed")  # type: ignore[arg-type]
    (done,) = llm.generate([0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1], SamplingParams(max_tokens=40, temperature=0))
    assert list(done.token_ids) == [(2 + i) % 9 for i in range(40)]
    assert done.stats.rounds <= 5
    assert done.stats.accepted_tokens == done.stats.draft_tokens >= 35


def test_scores_go_by_the_length_of_the_match() -> None:
    tokens = np.array([7, 1, 2, 3, 4, 9, 1, 2, 3])
    assert run_before(tokens, 4) == 3
    assert run_before(np.array([5, 5, 5, 5]), 3) == 3
    assert run_before(np.array([1, 2]), 1) == 0
    short, long = scores_of(2, 3), scores_of(8, 3)
    assert short == sorted(short, reverse=True)
    assert all(a < b < 0 for a, b in zip(short, long, strict=True))
