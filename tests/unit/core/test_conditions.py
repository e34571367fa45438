"""What a draft adds to the drafts of others."""

from __future__ import annotations

import math

import pytest

from draftree.core.tree import EMPTY, TokenTree, chain
from draftree.core.types import DraftCondition


def sure(*survivals: float) -> TokenTree:
    return chain(range(len(survivals)), scores=[math.log(value) for value in survivals])


@pytest.mark.parametrize(
    ("trees", "gain"),
    [
        ([], 0.9),
        ([EMPTY], 0.9),
        ([sure(0.5)], 0.6),
        ([sure(0.5, 0.5)], 0.45),
        ([sure(0.5), sure(1.0)], 0.3),
        ([sure(1.0, 1.0, 1.0)], 0.0),
        ([chain([1, 2])], 0.9),
    ],
)
def test_tokens_that_others_draft_are_no_gain(trees: list[TokenTree], gain: float) -> None:
    assert DraftCondition((0.6, 0.3), gain - 1e-9).is_met(trees)
    assert not DraftCondition((0.6, 0.3), gain + 1e-9).is_met(trees)


def test_of_siblings_the_likeliest_counts_and_scores_are_corrected_by_the_trust() -> None:
    tree = TokenTree((1, 2), (-1, -1), (math.log(0.2), math.log(0.8)))
    assert DraftCondition((1.0,), 0.2 - 1e-9).is_met([tree])
    assert not DraftCondition((1.0,), 0.2 + 1e-9).is_met([tree])
    assert DraftCondition((1.0,), 0.6 - 1e-9, trust=0.5).is_met([tree])
    assert not DraftCondition((1.0,), 0.6 + 1e-9, trust=0.5).is_met([tree])
