"""The prediction drafter: expected text is drafted, edits are skipped, and the text never changes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree import LLM, SamplingParams
from draftree.core.errors import InvalidRequestError
from draftree.core.types import Budget
from draftree.drafters.prediction import NUM_PLACES, PredictionDrafter, find_places
from draftree.models.table import TableLM, hashed
from views import context_of, view_of

TABLE = TableLM(hashed(40, seed=3, scale=3.0), order=2)
PREDICTION = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]


class Writing:
    """A text that is written token by token together with the drafter."""

    def __init__(self, prediction: list[int] | None, **options: float) -> None:
        config = PredictionDrafter.Config(**options)  # type: ignore[arg-type]
        self.drafter = PredictionDrafter(config, context_of(40))
        self.view = view_of([1, 2, 3], vocab_size=40, temperature=0, prediction=prediction)
        self.state = self.drafter.open(self.view)

    def write(self, *tokens: int) -> list[tuple[int, ...]]:
        """Paths of the leaves of the draft after these tokens."""
        self.view.history.append(tokens)
        tree = self.tree = self.drafter.draft_one(self.state, Budget(16, 4))
        inner = set(tree.parents)
        return [tuple(tree.tokens[n] for n in tree.path(leaf)) for leaf in range(len(tree)) if leaf not in inner]


def test_the_prediction_is_drafted_from_its_beginning_to_its_end() -> None:
    writing = Writing(PREDICTION)
    assert writing.write() == [(10, 11, 12, 13)]
    assert writing.write(10, 11, 12, 13, 14) == [(15, 16, 17, 18)]
    assert writing.write(15, 16, 17) == [(18, 19)]
    assert writing.write(18, 19) == []
    assert writing.write(30) == []


@pytest.mark.parametrize(
    ("case", "written", "expected"),
    [
        ("a word is another", [10, 11, 30, 13, 14], (15, 16, 17, 18)),
        ("words are inserted", [10, 11, 30, 31, 12, 13], (14, 15, 16, 17)),
        ("words are left out", [10, 11, 15, 16], (17, 18, 19)),
        ("one token found again is enough to try", [10, 11, 30, 31, 32, 15], (16, 17, 18)),
        ("a part is repeated", [10, 11, 12, 13, 14, 15, 10, 11], (12, 13, 14, 15)),
        ("the answer begins with other words", [30, 31, 32, 10, 11], (12, 13, 14, 15)),
    ],
)
def test_it_resynchronizes_after_an_edit(case: str, written: list[int], expected: tuple[int, ...]) -> None:
    writing = Writing(PREDICTION, floor=0.08)
    drafts = [writing.write(token) for token in written]
    assert drafts[-1] == [expected], case
    assert Writing(PREDICTION, floor=0.1).write(*written) == [expected], "several tokens in one round are read alike"


def test_nothing_is_drafted_without_a_match() -> None:
    writing = Writing(PREDICTION)
    writing.write()
    assert [writing.write(token) for token in (30, 31, 32, 30)] == [[]] * 4


def test_of_places_that_match_alike_the_nearest_ahead_comes_first() -> None:
    prediction = [7, 20, 1, 7, 21, 2, 7, 22, 3, 7, 23]
    writing = Writing(prediction, floor=0.05)
    writing.write(7, 20, 30)
    paths = writing.write(7)
    assert writing.tree.tokens[0] == 21
    assert {path[0] for path in paths} > {21, 22}
    assert writing.write(22)[0] == (3, 7, 23), "the place that keeps matching is followed"


def searched(prediction: list[int], tail: list[int], ahead_of: int) -> list[tuple[int, int]]:
    found = []
    for place in range(1, len(prediction)):
        length = 0
        while length < min(len(tail), place) and prediction[place - 1 - length] == tail[-1 - length]:
            length += 1
        if length:
            found.append((place, length))
    found.sort(key=lambda pair: (-pair[1], pair[0] < ahead_of, abs(pair[0] - ahead_of)))
    return found[:NUM_PLACES]


@given(
    prediction=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    tail=st.lists(st.integers(0, 2), min_size=1, max_size=8),
    ahead_of=st.integers(0, 40),
)
def test_places_are_those_of_a_slow_search(prediction: list[int], tail: list[int], ahead_of: int) -> None:
    assert find_places(np.array(prediction), np.array(tail), ahead_of=ahead_of) == searched(prediction, tail, ahead_of)


@pytest.mark.parametrize("draft", [None, "ngram", "ngram+suffix"])
def test_a_prediction_without_a_drafter_for_it_is_refused(draft: str | None) -> None:
    llm = LLM(TABLE, draft)
    with pytest.raises(InvalidRequestError, match="use draft='prediction', alone or merged"):
        llm.generate([[1, 2, 3]], SamplingParams(prediction=[4]))


@pytest.mark.parametrize(
    ("prediction", "words"), [("some text", "no tokenizer: give token ids"), ([3, 40], "prediction names token 40")]
)
def test_a_prediction_that_cannot_be_read_is_refused(prediction: str | list[int], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        LLM(TABLE, "prediction").generate([[1, 2, 3]], SamplingParams(prediction=prediction))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("draft", ["prediction", "prediction,width=1", "prediction+ngram", "suffix+prediction"])
def test_right_half_right_and_wrong_predictions_leave_the_text_as_it_is(draft: str, temperature: float) -> None:
    prompts = [[1, 2, 3], [4, 5], [6]]
    base = {"max_tokens": 60, "temperature": temperature, "seed": 9}
    plain = LLM(TABLE, "none").generate(prompts, SamplingParams(**base))
    right = list(plain[0].token_ids)
    edited = [*plain[1].token_ids[:20], 7, 7, *plain[1].token_ids[25:]]
    params = [SamplingParams(**base, prediction=tokens) for tokens in (right, edited, right[::-1])]
    done = LLM(TABLE, draft, plan="fixed").generate(prompts, params)
    assert [d.token_ids for d in done] == [p.token_ids for p in plain]
    assert done[0].stats.rounds <= 8
    assert done[1].stats.rounds <= 25
    source = next((counts for name, counts in done[0].stats.accepted_by_source.items() if "prediction" in name), None)
    assert (done[0].stats.accepted_tokens if source is None else source) >= 50


def test_a_request_without_a_prediction_is_decoded_plainly() -> None:
    (done,) = LLM(TABLE, "prediction").generate([[1, 2, 3]], SamplingParams(max_tokens=9, seed=1))
    assert done.stats.rounds == 9
    assert done.stats.draft_tokens == 0
