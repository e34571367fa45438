"""The first difference of texts and the gap there, on a model with known logits."""

from __future__ import annotations

import pytest
import torch

from draftree.core.noise import Noise
from draftree.lab.bench.benchmark import CHUNK_ROWS, explain, first_difference, last_logits
from draftree.lab.bench.records import Divergence
from draftree.lab.bench.writers import RunParams
from draftree.models.table import TableLM, hashed, listed

DISTRIBUTIONS = {(1, 2): [0.5, 0.25, 0.125, 0.125], (1, 2, 0): [0.4, 0.3, 0.2, 0.1]}
MODEL = TableLM(listed(DISTRIBUTIONS, [0.25] * 4))


@pytest.mark.parametrize(
    ("plain", "other", "place"),
    [((1, 2), (1, 2), None), ((1, 2), (1, 3), 1), ((1, 2), (1, 2, 3), 2), ((1,), (), 0), ((), (), None)],
)
def test_first_difference(plain, other, place):
    assert first_difference(plain, other) == place


def test_equal_texts_have_nothing_to_explain():
    assert explain(MODEL, RunParams(4), [1, 2], [0, 1], [0, 1]) is None


def test_the_gap_is_of_the_two_best_and_the_difference_of_the_two_written():
    found = explain(MODEL, RunParams(4), [1, 2], [0, 1, 3], [0, 2, 3])
    assert found is not None
    assert found.index == 1
    assert found.gap == pytest.approx(torch.tensor(0.4 / 0.3).log().item())
    assert found.between == pytest.approx(torch.tensor(0.3 / 0.2).log().item())


def test_a_text_that_ends_where_the_other_goes_on_has_no_gap():
    assert explain(MODEL, RunParams(4), [1, 2], [0, 1], [0]) == Divergence(1, None, None)


def test_with_a_temperature_scores_have_the_requests_noise():
    found = explain(MODEL, RunParams(4, temperature=2.0, seed=5), [1, 2], [0, 3], [1, 3])
    noise = Noise(5).gumbel(2, torch.arange(4)).double()
    scores = torch.tensor(DISTRIBUTIONS[1, 2], dtype=torch.float64).log() / 2 + noise
    assert found is not None
    assert found.between == pytest.approx(float(scores[0] - scores[1]), rel=1e-5)
    best = scores.topk(2).values
    assert found.gap == pytest.approx(float(best[0] - best[1]), rel=1e-5)


def test_long_prefixes_are_read_in_chunks_and_the_slot_is_given_back():
    model = TableLM(hashed(8, 3), order=3)
    tokens = [place % 8 for place in range(2 * CHUNK_ROWS + 5)]
    for count in (1, CHUNK_ROWS, CHUNK_ROWS + 1, len(tokens)):
        assert torch.equal(last_logits(model, tokens[:count]), hashed(8, 3)(tuple(tokens[:count][-3:])))
