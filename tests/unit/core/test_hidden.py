"""Rows and layers of hidden states: views where they follow each other."""

from __future__ import annotations

import pytest
import torch

from draftree.core.tensors import layers_of, rows_of

HIDDEN = torch.arange(5 * 3 * 2).view(5, 3, 2)


@pytest.mark.parametrize(("rows", "is_view"), [([], True), ([1, 2, 3], True), ([0, 2], False), ([3, 1], False)])
def test_rows(rows: list[int], is_view: bool) -> None:
    found = rows_of(HIDDEN, rows)
    assert torch.equal(found, HIDDEN[rows])
    assert (found.untyped_storage().data_ptr() == HIDDEN.untyped_storage().data_ptr()) == is_view


@pytest.mark.parametrize(("columns", "is_view"), [([0, 1, 2], True), ([0, 1], False), ([2, 0, 1], False)])
def test_layers(columns: list[int], is_view: bool) -> None:
    found = layers_of(HIDDEN, columns)
    assert torch.equal(found, HIDDEN[:, columns])
    assert (found is HIDDEN) == is_view
