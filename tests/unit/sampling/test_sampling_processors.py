from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from draftree.sampling.history import History
from draftree.sampling.logits_processors import (
    BadWords,
    CountPenalty,
    LogitBias,
    MinTokens,
    NoRepeatNgram,
    Processor,
    RepetitionPenalty,
    RowContext,
)

INF = math.inf


def written(prompt: Sequence[int], output: Sequence[int] = ()) -> History:
    history = History(prompt)
    history.append(output)
    return history


def apply(processor: Processor, history: History, paths: Sequence[Sequence[int]], logits: Tensor) -> Tensor:
    return processor.apply(logits.clone(), RowContext(history, paths))


def forbidden(processor: Processor, history: History, *paths: Sequence[int], vocab: int = 10) -> list[list[int]]:
    logits = apply(processor, history, paths, torch.zeros(len(paths), vocab))
    assert set(logits.unique().tolist()) <= {0.0, -INF}
    return [row.isneginf().nonzero().flatten().tolist() for row in logits]


def test_logit_bias() -> None:
    found = apply(LogitBias({2: 1.5, 0: -INF}), written([1]), [[], [1]], torch.tensor([[1.0, 2, 3], [4, 5, -INF]]))
    assert found.tolist() == [[-INF, 2, 4.5], [-INF, 5, -INF]]


def test_count_penalty_counts_output_and_path_but_not_the_prompt() -> None:
    logits = torch.tensor([[1.0, 2, 3, 4, -INF]]).repeat(3, 1)
    found = apply(CountPenalty(0.5, 0.25), written([0, 0, 3], [1, 4, 1]), [[], [1, 2], [2, 2, 0]], logits)
    assert found.tolist() == [
        [1, 1.0, 3, 4, -INF],
        [1, 0.75, 2.25, 4, -INF],
        [0.25, 1.0, 2.0, 4, -INF],
    ]


def test_count_penalty_without_any_output() -> None:
    logits = torch.arange(4.0)[None].repeat(2, 1)
    assert apply(CountPenalty(1.0, 1.0), written([0, 1]), [[], [3]], logits).tolist() == [[0, 1, 2, 3], [0, 1, 2, 1]]


def test_no_repeat_ngram_of_generated_tokens_only() -> None:
    history = written([1, 2, 3, 1, 2], [3, 1, 2])
    pairs, triples = (NoRepeatNgram(size, includes_prompt=False) for size in (2, 3))
    assert forbidden(pairs, history, [], [3], [3, 1], [9, 9]) == [[], [1], [2], [9]]
    assert forbidden(triples, history, [], [3], [3, 1]) == [[], [], [2]]
    assert forbidden(NoRepeatNgram(1, includes_prompt=False), history, [], [7]) == [[1, 2, 3], [1, 2, 3, 7]]
    assert forbidden(pairs, written([4, 4, 4]), [], [4], [4, 4], [4, 5, 4]) == [[], [], [4], [5]]


def test_a_run_far_longer_than_the_text_costs_no_memory() -> None:
    assert forbidden(NoRepeatNgram(10**12), written([1, 2]), [], [1]) == [[], []]


TOKENS_WIDER_THAN_THE_LOGITS = [
    LogitBias({1: 1.0, 8: 1.0}),
    RepetitionPenalty(2.0),
    CountPenalty(1.0, 1.0),
    NoRepeatNgram(1),
    NoRepeatNgram(2),
    BadWords([[1], [8], [6, 8]]),
    MinTokens(9, [1, 8]),
]


@pytest.mark.parametrize("processor", TOKENS_WIDER_THAN_THE_LOGITS, ids=lambda value: type(value).__name__)
def test_tokens_beyond_the_logits_width_are_ignored(processor: Processor) -> None:
    # a drafter's logits may be less wide than the target's, where both pad one vocabulary differently
    history, paths = written([1, 8], [9, 1, 8, 7, 6]), [[], [9, 1, 8], [8, 2, 8]]
    logits = torch.arange(30.0).reshape(3, 10) - 7
    narrow = apply(processor, history, paths, logits[:, :4])
    assert torch.equal(narrow, apply(processor, history, paths, logits)[:, :4])


VOCAB = 8
TOKENS = st.integers(0, VOCAB - 1)


def slow_ngrams(tokens: list[int], size: int) -> set[int]:
    if len(tokens) < size:
        return set()
    newest = tokens[len(tokens) - size + 1 :]
    runs = [tokens[start : start + size] for start in range(len(tokens) - size + 1)]
    return {run[-1] for run in runs if run[:-1] == newest}


def slow_bad_words(tokens: list[int], words: list[list[int]]) -> set[int]:
    return {word[-1] for word in words if tokens[len(tokens) - len(word) + 1 :] == word[:-1] or len(word) == 1}


@given(st.lists(TOKENS, min_size=1, max_size=30), st.lists(TOKENS, max_size=4), st.integers(1, 5))
def test_no_repeat_ngram_equals_a_plain_search(tokens: list[int], path: list[int], size: int) -> None:
    found = forbidden(NoRepeatNgram(size), written(tokens), path, [], vocab=VOCAB)
    assert found == [sorted(slow_ngrams(tokens + path, size)), sorted(slow_ngrams(tokens, size))]


@given(st.lists(TOKENS, min_size=1, max_size=9), st.lists(TOKENS, max_size=30), st.lists(TOKENS, max_size=4))
def test_no_repeat_ngram_of_generated_tokens_equals_a_plain_search(
    prompt: list[int], output: list[int], path: list[int]
) -> None:
    for size in range(1, 6):
        found = forbidden(NoRepeatNgram(size, includes_prompt=False), written(prompt, output), path, [], vocab=VOCAB)
        assert found == [sorted(slow_ngrams(output + path, size)), sorted(slow_ngrams(output, size))]


@given(
    st.lists(TOKENS, min_size=1, max_size=6),
    st.lists(TOKENS, max_size=4),
    st.lists(st.lists(TOKENS, min_size=1, max_size=3), min_size=1, max_size=8),
)
def test_bad_words_equal_a_plain_search(tokens: list[int], path: list[int], words: list[list[int]]) -> None:
    found = forbidden(BadWords(words), written(tokens), path, vocab=VOCAB)
    assert found == [sorted(slow_bad_words(tokens + path, words))]


@given(st.lists(TOKENS, max_size=20), st.lists(st.lists(TOKENS, max_size=4), min_size=1, max_size=4))
def test_counts_equal_a_plain_count(output: list[int], paths: list[list[int]]) -> None:
    context = RowContext(written([0, 1], output), paths)
    for counts, base in ((context.output_counts, output), (context.all_counts, [0, 1, *output])):
        table = np.zeros((len(paths), VOCAB), dtype=np.int64)
        table[:, counts.tokens] = counts.counts
        table[counts.path_rows, counts.path_tokens] = counts.path_counts
        assert table.tolist() == [[[*base, *path].count(token) for token in range(VOCAB)] for path in paths]
