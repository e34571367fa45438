from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from draftree.sampling.bans import BadWords, MinTokens, NoRepeatNgram
from draftree.sampling.history import History
from draftree.sampling.penalties import CountPenalty, LogitBias, RepetitionPenalty
from draftree.sampling.processors import NO_TOKEN, Processor, RowContext

INF = math.inf


def written(prompt: Sequence[int], output: Sequence[int] = ()) -> History:
    history = History(prompt)
    history.append(output)
    return history


def apply(processor: Processor, history: History, paths: Sequence[Sequence[int]], logits: Tensor) -> Tensor:
    return processor.apply(logits.clone(), RowContext(history, paths, "cpu"))


def forbidden(processor: Processor, history: History, *paths: Sequence[int], vocab: int = 10) -> list[list[int]]:
    logits = apply(processor, history, paths, torch.zeros(len(paths), vocab))
    assert set(logits.unique().tolist()) <= {0.0, -INF}
    return [row.isneginf().nonzero().flatten().tolist() for row in logits]


def test_logit_bias() -> None:
    found = apply(LogitBias({2: 1.5, 0: -INF}), written([1]), [[], [1]], torch.tensor([[1.0, 2, 3], [4, 5, -INF]]))
    assert found.tolist() == [[-INF, 2, 4.5], [-INF, 5, -INF]]


def test_repetition_penalty_counts_prompt_output_and_path_once() -> None:
    logits = torch.tensor([[2.0, -2, 0, 4, -INF, 8]]).repeat(2, 1)
    found = apply(RepetitionPenalty(2.0), written([0, 0, 4], [1, 2, 1]), [[], [3, 3, 0]], logits)
    assert found.tolist() == [[1, -4, 0, 4, -INF, 8], [1, -4, 0, 2, -INF, 8]]


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


def test_no_repeat_ngram() -> None:
    history = written([1, 2, 3], [1, 2, 4, 1, 2])
    assert forbidden(NoRepeatNgram(3), history, [], [5], [5, 1, 2], [3, 1, 2]) == [[3, 4], [], [3, 4, 5], [3, 4]]
    assert forbidden(NoRepeatNgram(2), history, [], [1], [9], [9, 9]) == [[3, 4], [2], [], [9]]
    assert forbidden(NoRepeatNgram(1), history, [], [6]) == [[1, 2, 3, 4], [1, 2, 3, 4, 6]]
    assert forbidden(NoRepeatNgram(9), history, []) == [[]]


def test_no_repeat_ngram_of_overlapping_runs() -> None:
    assert forbidden(NoRepeatNgram(3), written([5, 5, 5]), [], [5]) == [[5], [5]]


def test_no_repeat_ngram_of_generated_tokens_only() -> None:
    history = written([1, 2, 3, 1, 2], [3, 1, 2])
    pairs, triples = (NoRepeatNgram(size, includes_prompt=False) for size in (2, 3))
    assert forbidden(pairs, history, [], [3], [3, 1], [9, 9]) == [[], [1], [2], [9]]
    assert forbidden(triples, history, [], [3], [3, 1]) == [[], [], [2]]
    assert forbidden(NoRepeatNgram(1, includes_prompt=False), history, [], [7]) == [[1, 2, 3], [1, 2, 3, 7]]
    assert forbidden(pairs, written([4, 4, 4]), [], [4], [4, 4], [4, 5, 4]) == [[], [], [4], [5]]


def test_a_run_far_longer_than_the_text_costs_no_memory() -> None:
    assert forbidden(NoRepeatNgram(10**12), written([1, 2]), [], [1]) == [[], []]


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_a_row_shorter_than_a_run_forbids_nothing(size: int) -> None:
    assert forbidden(NoRepeatNgram(size), written([5]), [], [3, 3, 3, 3, 3, 3])[0] == []


def test_bad_words() -> None:
    words = BadWords([[7], [1, 2], [1, 2, 3], [4, 4], [9, 8, 7, 6]])
    rows = forbidden(words, written([9, 8], [7, 1]), [], [2], [4], [2, 3], [9, 8, 7])
    assert rows == [[2, 7], [3, 7], [4, 7], [7], [6, 7]]


def test_bad_words_longer_than_the_row_do_not_fit() -> None:
    assert forbidden(BadWords([[1, 2, 3, 4]]), written([2, 3]), [], [1, 2, 3]) == [[], [4]]


def test_min_tokens() -> None:
    history = written([1, 2], [3])
    assert forbidden(MinTokens(3, [0, 5]), history, [], [1], [1, 1], [1, 1, 1]) == [[0, 5], [0, 5], [], []]
    assert forbidden(MinTokens(1, [0]), history, []) == [[]]


def test_tails() -> None:
    context = RowContext(written([1, 2], [3]), [[], [4], [5, 6, 7]], "cpu")
    assert context.tails(0).shape == (3, 0)
    assert context.tails(2).tolist() == [[2, 3], [3, 4], [6, 7]]
    pad = NO_TOKEN
    assert context.tails(5).tolist() == [[pad, pad, 1, 2, 3], [pad, 1, 2, 3, 4], [2, 3, 5, 6, 7]]
    assert context.tails(6).tolist() == [[pad] * 3 + [1, 2, 3], [pad, pad, 1, 2, 3, 4], [1, 2, 3, 5, 6, 7]]
    assert context.tails(3, start=2).tolist() == [[pad, pad, 3], [pad, 3, 4], [5, 6, 7]]
    assert context.tails(2, start=3).tolist() == [[pad, pad], [pad, 4], [6, 7]]


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
LOGITS = st.one_of(st.just(-INF), st.floats(-30, 30, width=32))
PROCESSORS = st.one_of(
    st.builds(LogitBias, st.dictionaries(TOKENS, st.floats(-100, 100) | st.just(-INF), min_size=1)),
    st.builds(RepetitionPenalty, st.floats(0.1, 10)),
    st.builds(CountPenalty, st.floats(-2, 2), st.floats(-2, 2)),
    st.builds(NoRepeatNgram, st.integers(1, 5), includes_prompt=st.booleans()),
    st.builds(BadWords, st.lists(st.lists(TOKENS, min_size=1, max_size=4), min_size=1, max_size=6)),
    st.builds(MinTokens, st.integers(1, 8), st.lists(TOKENS, min_size=1, max_size=3, unique=True)),
)


@st.composite
def scenes(draw: st.DrawFn) -> tuple[History, list[list[int]], Tensor]:
    history = written(draw(st.lists(TOKENS, min_size=1, max_size=8)), draw(st.lists(TOKENS, max_size=12)))
    paths = draw(st.lists(st.lists(TOKENS, max_size=5), min_size=1, max_size=6))
    values = draw(st.lists(st.lists(LOGITS, min_size=VOCAB, max_size=VOCAB), min_size=len(paths), max_size=len(paths)))
    return history, paths, torch.tensor(values, dtype=draw(st.sampled_from([torch.float32, torch.float64])))


@given(scenes(), st.lists(PROCESSORS, min_size=1, max_size=4))
def test_a_node_gets_what_plain_decoding_gives_once_its_path_is_written(
    scene: tuple[History, list[list[int]], Tensor], processors: list[Processor]
) -> None:
    history, paths, logits = scene
    tree, context = logits.clone(), RowContext(history, paths, "cpu")
    for processor in processors:
        tree = processor.apply(tree, context)
    assert (tree.dtype, tree.shape) == (logits.dtype, logits.shape)
    assert not tree.isnan().any()
    for row, path in enumerate(paths):
        once = written(history.tokens[: history.prompt_length].tolist(), [*history.output.tolist(), *path])
        plain = logits[row : row + 1].clone()
        for processor in processors:
            plain = apply(processor, once, [[]], plain)
        assert torch.equal(tree[row], plain[0])


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
    context = RowContext(written([0, 1], output), paths, "cpu")
    for counts, base in ((context.output_counts, output), (context.all_counts, [0, 1, *output])):
        table = np.zeros((len(paths), VOCAB), dtype=np.int64)
        table[:, counts.tokens] = counts.counts
        table[counts.path_rows, counts.path_tokens] = counts.path_counts
        assert table.tolist() == [[[*base, *path].count(token) for token in range(VOCAB)] for path in paths]
