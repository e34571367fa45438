from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftree.core.errors import ConfigurationError, ModelLoadError
from draftree.heads.vocabulary import DraftVocabulary


@given(st.sets(st.integers(0, 99), min_size=1))
def test_offsets_and_mask_describe_the_ids(ids: set[int]) -> None:
    vocabulary = DraftVocabulary(torch.tensor(sorted(ids)), 100)
    assert DraftVocabulary.from_offsets(vocabulary.offsets(), 100) == vocabulary
    assert vocabulary.mask().nonzero()[:, 0].tolist() == vocabulary.ids.tolist() == sorted(ids)
    assert vocabulary.is_full == (len(ids) == 100)
    tokens = torch.arange(100)
    places = vocabulary.places(tokens)
    assert [vocabulary.ids[place].item() for place in places if place >= 0] == sorted(ids)
    assert (places >= 0).tolist() == vocabulary.mask().tolist()


def test_the_most_frequent_tokens_are_chosen() -> None:
    counts = torch.tensor([5, 0, 9, 5, 1])
    assert DraftVocabulary.from_counts(counts, 2).ids.tolist() == [0, 2]
    assert DraftVocabulary.from_counts(counts, 2, always=[1]).ids.tolist() == [1, 2]
    assert DraftVocabulary.from_counts(counts, 6, vocab_size=8).ids.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(("size", "always"), [(0, ()), (6, ()), (1, (1, 2)), (2, (5,)), (2, (-1,))])
def test_sizes_out_of_range_are_refused(size: int, always: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError):
        DraftVocabulary.from_counts(torch.ones(5), size, always=always)


@pytest.mark.parametrize("ids", [[], [1, 1], [2, 1], [-1, 2], [0, 10], [[1, 2]]])
def test_damaged_ids_are_refused(ids: list[int]) -> None:
    with pytest.raises(ModelLoadError):
        DraftVocabulary(torch.tensor(ids, dtype=torch.int64), 10)


def test_damaged_offsets_are_refused() -> None:
    with pytest.raises(ModelLoadError, match="integers"):
        DraftVocabulary.from_offsets(torch.zeros(3), 10)
    with pytest.raises(ModelLoadError, match="ascend"):
        DraftVocabulary.from_offsets(torch.tensor([3, 0, 0]), 10)
