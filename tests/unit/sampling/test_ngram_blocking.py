"""N-gram blocking on tensors bans the tokens that a search of each row bans, in place, and changes nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from draftree.sampling.logits_processors import ban_ngrams_of_source, ban_repeated_ngrams

VOCAB = 5
ROWS = st.lists(st.tuples(st.lists(st.integers(0, VOCAB + 1), max_size=12), st.integers(0, 3)), min_size=1, max_size=6)
"""Texts, some of whose tokens are beyond the scores' width, and tokens before them that do not count."""


def searched(text: list[int], newest: list[int], size: int) -> set[int]:
    """Tokens that follow the last size - 1 tokens of `newest` somewhere in `text`."""
    if len(newest) < size - 1:
        return set()
    context = newest[len(newest) - size + 1 :]
    return {text[end] for end in range(size - 1, len(text)) if text[end - size + 1 : end] == context}


def padded(rows: list[tuple[list[int], int]], junk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows as a tensor with tokens before and after each text, their starts and their lengths."""
    width = max(len(text) + before for text, before in rows) + 2
    tokens = torch.full((len(rows), width), junk)
    for row, (text, before) in enumerate(rows):
        tokens[row, before : before + len(text)] = torch.tensor(text, dtype=torch.int64)
    starts = torch.tensor([before for _, before in rows])
    return tokens, starts, starts + torch.tensor([len(text) for text, _ in rows])


def expected(scores: Tensor, banned: list[set[int]]) -> Tensor:
    wanted = scores.clone()
    for row, ids in enumerate(banned):
        for token in ids:
            if token < wanted.shape[1]:
                wanted[row, token] = -math.inf
    return wanted


@pytest.mark.parametrize("waits", [True, False])
@given(ROWS, st.integers(1, 5), st.sampled_from([-1, 0, 1]), st.sampled_from([torch.float32, torch.bfloat16]))
def test_repeated_ngrams(
    waits: bool, rows: list[tuple[list[int], int]], size: int, junk: int, dtype: torch.dtype
) -> None:
    tokens, starts, lengths = padded(rows, junk)
    scores = torch.randn(len(rows), VOCAB).to(dtype)
    wanted = expected(scores, [searched(text, text, size) for text, _ in rows])
    found = ban_repeated_ngrams(scores, tokens, size=size, lengths=lengths, starts=starts, waits=waits)
    assert found is scores
    assert torch.equal(scores, wanted)


@pytest.mark.parametrize("waits", [True, False])
@given(ROWS, ROWS, st.integers(1, 4), st.sampled_from([-1, 0, 1]))
def test_ngrams_of_a_source(
    waits: bool, rows: list[tuple[list[int], int]], sources: list[tuple[list[int], int]], size: int, junk: int
) -> None:
    members = 2
    rows = (rows * members * len(sources))[: members * len(sources)]
    tokens, starts, lengths = padded(rows, junk)
    source, source_starts, source_lengths = padded(sources, junk)
    scores = torch.randn(len(rows), VOCAB)
    banned = [searched(sources[row // members][0], text, size) for row, (text, _) in enumerate(rows)]
    wanted = expected(scores, banned)
    ban_ngrams_of_source(
        scores, tokens, source, size=size, lengths=lengths, starts=starts,
        source_lengths=source_lengths, source_starts=source_starts, waits=waits,
    )  # fmt: skip
    assert torch.equal(scores, wanted)


@pytest.mark.parametrize("waits", [None, True, False])
def test_whole_rows_and_a_view_of_wider_scores(waits: bool | None) -> None:
    tokens = torch.tensor([[1, 2, 1], [3, 3, 3], [1, 2, 3]], dtype=torch.int32)
    wide = torch.zeros(3, 8)
    ban_repeated_ngrams(wide[:, 2:7], tokens, size=2, waits=waits)
    assert wide.isneginf().nonzero().tolist() == [[0, 4], [1, 5]]


@pytest.mark.parametrize("waits", [True, False])
def test_texts_without_tokens_ban_nothing(waits: bool) -> None:
    scores = torch.zeros(2, 4)
    for size in (1, 2, 3):
        ban_repeated_ngrams(scores, torch.empty(2, 0, dtype=torch.int64), size=size, waits=waits)
        ban_ngrams_of_source(
            scores, torch.empty(2, 0, dtype=torch.int64), torch.tensor([[1, 2, 3]]), size=size + 1, waits=waits
        )
        ban_ngrams_of_source(scores, torch.tensor([[1], [2]]), torch.empty(1, 0).long(), size=size, waits=waits)
    assert not scores.isinf().any()


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        ban_repeated_ngrams(torch.zeros(1, 4), torch.zeros(1, 2).long(), size=0)
    with pytest.raises(ValueError, match="3 rows cannot be divided among 2 sources"):
        ban_ngrams_of_source(torch.zeros(3, 4), torch.zeros(3, 2).long(), torch.zeros(2, 2).long(), size=2)
