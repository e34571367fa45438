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
WIDTHS = st.integers(0, 12)


def texts(count: int, width: int) -> st.SearchStrategy[list[list[int]]]:
    """Texts of one width, some of whose tokens are beyond the scores' width."""
    text = st.lists(st.integers(0, VOCAB + 1), min_size=width, max_size=width)
    return st.lists(text, min_size=count, max_size=count)


def searched(text: list[int], newest: list[int], size: int) -> set[int]:
    """Tokens that follow the last size - 1 tokens of `newest` somewhere in `text`."""
    if len(newest) < size - 1:
        return set()
    context = newest[len(newest) - size + 1 :]
    return {text[end] for end in range(size - 1, len(text)) if text[end - size + 1 : end] == context}


def expected(scores: Tensor, banned: list[set[int]]) -> Tensor:
    wanted = scores.clone()
    for row, ids in enumerate(banned):
        for token in ids:
            if token < wanted.shape[1]:
                wanted[row, token] = -math.inf
    return wanted


@pytest.mark.parametrize("waits", [True, False])
@given(st.data(), st.integers(1, 5), st.sampled_from([torch.float32, torch.bfloat16]))
def test_repeated_ngrams(waits: bool, data: st.DataObject, size: int, dtype: torch.dtype) -> None:
    rows = data.draw(texts(data.draw(st.integers(1, 6)), data.draw(WIDTHS)))
    scores = torch.randn(len(rows), VOCAB).to(dtype)
    wanted = expected(scores, [searched(text, text, size) for text in rows])
    found = ban_repeated_ngrams(scores, torch.tensor(rows, dtype=torch.int64), size=size, waits=waits)
    assert found is scores
    assert torch.equal(scores, wanted)


@pytest.mark.parametrize("waits", [True, False])
@given(st.data(), st.integers(1, 4))
def test_ngrams_of_a_source(waits: bool, data: st.DataObject, size: int) -> None:
    members = 2
    sources = data.draw(texts(data.draw(st.integers(1, 3)), data.draw(WIDTHS)))
    rows = data.draw(texts(members * len(sources), data.draw(WIDTHS)))
    scores = torch.randn(len(rows), VOCAB)
    wanted = expected(scores, [searched(sources[row // members], text, size) for row, text in enumerate(rows)])
    tokens, source = (torch.tensor(entries, dtype=torch.int64) for entries in (rows, sources))
    ban_ngrams_of_source(scores, tokens, source, size=size, waits=waits)
    assert torch.equal(scores, wanted)


@pytest.mark.parametrize("waits", [None, True, False])
def test_whole_rows_and_a_view_of_wider_scores(waits: bool | None) -> None:
    tokens = torch.tensor([[1, 2, 1], [3, 3, 3], [1, 2, 3]], dtype=torch.int32)
    wide = torch.zeros(3, 8)
    ban_repeated_ngrams(wide[:, 2:7], tokens, size=2, waits=waits)
    assert wide.isneginf().nonzero().tolist() == [[0, 4], [1, 5]]


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 token"):
        ban_repeated_ngrams(torch.zeros(1, 4), torch.zeros(1, 2).long(), size=0)
    with pytest.raises(ValueError, match="3 rows cannot be divided among 2 sources"):
        ban_ngrams_of_source(torch.zeros(3, 4), torch.zeros(3, 2).long(), torch.zeros(2, 2).long(), size=2)
