"""The scripted distributions of fairseq's own tests, with its expected texts and probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from draftree.beam.params import BeamSearchParams
from draftree.beam.phrases import OrderedPhrases, PhraseState, UnorderedPhrases
from draftree.beam.result import BeamResult
from draftree.beam.search import BeamSearch
from draftree.models.table import TableLM, listed

END, A, B = 0, 1, 2
ALWAYS_ENDS = (1.0, 0.0, 0.0)
ONE = {
    (): (0.0, 0.9, 0.1),
    (A,): (1.0, 0.0, 0.0),
    (B,): (0.0, 0.9, 0.1),
    (B, A): (0.0, 0.1, 0.9),
    (B, B): (0.6, 0.2, 0.2),
}
TWO = {
    (): (0.0, 0.7, 0.3),
    (A,): (0.25, 0.35, 0.4),
    (B,): (0.0, 0.1, 0.9),
    (A, B): (0.6, 0.4, 0.0),
    (B, B): (0.01, 0.0, 0.99),
    (B, B, B): (0.1, 0.5, 0.4),
}
SHORT_ONE, LONG_ONE = ([A, END], [0.9, 1.0]), ([B, A, B, END], [0.1, 0.9, 0.9, 1.0])
SHORT_TWO, LONG_TWO = ([A, B, END], [0.7, 0.4, 0.6]), ([A, B, A, END], [0.7, 0.4, 0.4, 1.0])
Expected = tuple[list[int], list[float]]


def search(**given: Any) -> list[BeamResult]:
    """Both sentences of the scripts as one batch; the prompt's token tells them apart."""
    table = {(A, *text): row for text, row in ONE.items()} | {(B, *text): row for text, row in TWO.items()}
    params = BeamSearchParams.preset("fairseq", **{"beam_width": 2, "num_return_sequences": 2} | given)
    return BeamSearch(TableLM(listed(table, ALWAYS_ENDS)), end_ids=[END]).run([[A], [B]], [params, params])


def by_step(first: Sequence[float], second: Sequence[float], third: Sequence[float], **given: Any) -> BeamResult:
    """A search whose distributions depend on the step alone."""
    table = {(A,): first} | {(A, one): second for one in range(3)}
    table |= {(A, one, two): third for one in range(3) for two in range(3)}
    params = BeamSearchParams.preset("fairseq", **{"beam_width": 2, "num_return_sequences": 2} | given)
    return BeamSearch(TableLM(listed(table, ALWAYS_ENDS)), end_ids=[END]).run([[A]], [params])[0]


def check(result: BeamResult, expected: Sequence[Expected], *, penalty: float = 1.0) -> None:
    assert [list(found.tokens) for found in result.hypotheses] == [tokens for tokens, _ in expected]
    for found, (_, probabilities) in zip(result.hypotheses, expected, strict=True):
        logs = [math.log(probability) for probability in probabilities]
        assert found.token_logprobs == pytest.approx(logs)
        assert found.score == pytest.approx(sum(logs) / len(logs) ** penalty)


@pytest.mark.parametrize(
    ("penalty", "one", "two"),
    [
        (1.0, [SHORT_ONE, LONG_ONE], [LONG_TWO, SHORT_TWO]),
        (0.0, [SHORT_ONE, LONG_ONE], [SHORT_TWO, LONG_TWO]),
        (0.6, [SHORT_ONE, LONG_ONE], [SHORT_TWO, LONG_TWO]),
        (5.0, [LONG_ONE, SHORT_ONE], [LONG_TWO, SHORT_TWO]),
    ],
)
def test_normalised_and_penalised_scores(penalty: float, one: list[Expected], two: list[Expected]) -> None:
    results = search(length_penalty=penalty)
    check(results[0], one, penalty=penalty)
    check(results[1], two, penalty=penalty)


def test_maximum_length_forces_the_end_with_its_own_probability() -> None:
    results = search(max_new_tokens=3)
    check(results[0], [SHORT_ONE, ([B, B, END], [0.1, 0.1, 0.6])])
    check(results[1], [SHORT_TWO, ([B, B, END], [0.3, 0.9, 0.01])])


STEPS_ONE = ((0.0, 0.9, 0.1), (0.0, 0.6, 0.4), (1.0, 0.0, 0.0))
STEPS_TWO = ((0.0, 0.7, 0.3), (0.25, 0.35, 0.4), (0.9, 0.1, 0.0))


def test_diverse_groups_without_a_penalty() -> None:
    given = {"num_beam_groups": 2, "diversity_penalty": 0.0}
    check(by_step(*STEPS_ONE, **given), [([A, A, END], [0.9, 0.6, 1.0])] * 2)
    check(by_step(*STEPS_TWO, **given), [([A, B, END], [0.7, 0.4, 0.9])] * 2)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (STEPS_ONE, [([A, A, END], [0.9, 0.6, 1.0], [0, 1, 1]), ([A, B, END], [0.9, 0.4, 1.0], [0, 2, 1])]),
        (STEPS_TWO, [([A, B, END], [0.7, 0.4, 0.9], [0, 1, 1]), ([A, A, END], [0.7, 0.35, 0.9], [0, 2, 1])]),
    ],
)
def test_diverse_siblings(
    steps: tuple[Sequence[float], ...], expected: list[tuple[list[int], list[float], list[int]]]
) -> None:
    result = by_step(*steps, sibling_penalty=0.5)
    shifted = [
        (tokens, [value * math.exp(-0.5 * rank) for value, rank in zip(values, ranks, strict=True)])
        for tokens, values, ranks in expected
    ]
    check(result, shifted)


def test_sampling_from_the_likeliest_tokens() -> None:
    steps = ((0.0, 1.0, 0.0), (0.25, 0.4, 0.35), (1.0, 0.0, 0.0))
    for seed in range(20):
        low = by_step(*steps, sampling="independent", top_p=0.2, seed=seed)
        check(low, [([A, A, END], [1.0, 0.4, 1.0])] * 2)
        high = by_step(*steps, sampling="independent", top_p=0.575, seed=seed)
        for found in high.hypotheses:
            second = {(A, A, END): 0.4, (A, B, END): 0.35}[found.tokens]
            assert found.cumulative_logprob == pytest.approx(math.log(second))


MANY = [(1, 2, 3), (1, 3), (1, 4), (4, 5, 6, 7), (1,), (4, 5)]


LONG = [1, 2, 3, 1, 3, 1, 4, 4, 5, 6, 7, 1, 4, 5]
BOTH = [
    (MANY, [], 0, False),
    (MANY, [1, 2], 2, False),
    (MANY, LONG, 14, True),
    ([(1,), (2, 3)], [1, 1], 1, False),
    ([(1, 2), (1, 2)], [1, 2, 1, 2], 4, True),
    ([(1, 2), (1, 2)], [1, 2, 1, 2, 1], 4, True),
    ([(1, 2), (3, 4)], [1, 2, 3, 4, 5], 4, True),
]
UNORDERED = [
    (MANY, [1, 2, 94], 1, False),
    (MANY, [1, 3, 999, 1, 4], 4, False),
    (MANY, [1, 3, 999, 1, 4, 999], 4, False),
    (MANY, [4, 5, 6, 8], 2, False),
    (MANY, [1, 2, 3, 999, 1, 3, 1, 4, 4, 5, 6, 7, 1, 4, 5, 117], 14, True),
]
ORDERED = [
    (MANY, [1, 2, 94], 0, False),
    (MANY, [1, 3, 999, 1, 4], 0, False),
    (MANY, [1, 2, 3, 999, 999], 3, False),
    (MANY, [1, 2, 3, 77, 1, 3, 1], 6, False),
    (MANY, [1, 2, 999, *LONG[:3], 999, *LONG[3:], 117], 14, True),
]


@pytest.mark.parametrize(
    ("rule", "phrases", "text", "bank", "finished"),
    [(UnorderedPhrases, *case) for case in BOTH + UNORDERED] + [(OrderedPhrases, *case) for case in BOTH + ORDERED],
)
def test_phrases(
    rule: type[PhraseState], phrases: list[tuple[int, ...]], text: list[int], bank: int, finished: bool
) -> None:
    state = rule(tuple(phrases))
    for token in text:
        state = state.advance(token)
    assert (state.num_tokens, state.is_met) == (bank, finished)
