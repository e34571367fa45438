"""Hidden states on the way: sizes, rounding, rows that do not depend on each other, and refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftree.core.errors import GenerationError
from draftree.remote.errors import FrameError
from draftree.remote.split.states import StateFormat

KINDS = ("float32", "bfloat16", "int8")
STEPS = {"float32": 0.0, "bfloat16": 2**-8, "int8": 0.5 / 127}
"""Largest error of a value, relative to the value for bfloat16 and to the largest of its row for int8."""


def states(rows: int, hidden: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, hidden, generator=generator) * torch.logspace(-2, 3, rows)[:, None]


@pytest.mark.parametrize(("kind", "size"), [("float32", 40), ("bfloat16", 20), ("int8", 62)])
def test_sizes(kind: str, size: int) -> None:
    form = StateFormat(kind, 10)
    assert form.row_bytes == size
    assert form.pack(states(3, 10, 1)).shape == (3, size)
    assert form.pack(torch.empty(0, 10)).shape == (0, size)
    assert form.unpack(b"", 0).shape == (0, 10)


@given(st.integers(1, 6), st.integers(1, 40), st.integers(0, 99), st.sampled_from(KINDS))
def test_values_are_near_and_rounding_again_changes_nothing(rows: int, hidden: int, seed: int, kind: str) -> None:
    form, given_states = StateFormat(kind, hidden), states(rows, hidden, seed)
    found = form.unpack(form.pack(given_states).tobytes(), rows)
    size = given_states.abs() if kind == "bfloat16" else given_states.abs().amax(dim=1, keepdim=True)
    assert bool(((found - given_states).abs() <= STEPS[kind] * size * (1 + 1e-5)).all())
    if kind != "int8":
        assert form.keeps(found)
    assert form.keeps(given_states) == (kind == "float32" or torch.equal(found, given_states))


@given(st.integers(1, 8), st.integers(0, 99), st.sampled_from(KINDS))
def test_a_row_does_not_depend_on_others(rows: int, seed: int, kind: str) -> None:
    form, given_states = StateFormat(kind, 12), states(rows, 12, seed)
    together = form.pack(given_states)
    for row in range(rows):
        assert np.array_equal(form.pack(given_states[row : row + 1])[0], together[row])


def test_the_largest_values_of_an_int8_row_are_kept() -> None:
    form, values = StateFormat("int8", 40), states(3, 40, 5)
    values[:, [3, 17]] *= 1e4
    found = form.unpack(form.pack(values).tobytes(), 3)
    assert torch.equal(found[:, [3, 17]], values[:, [3, 17]])
    others = [place for place in range(40) if place not in (3, 17)]
    assert float((found - values)[:, others].abs().max()) <= 0.004 * float(values[:, others].abs().max())


def test_places_beyond_a_row_are_refused() -> None:
    form = StateFormat("int8", 9)
    data = bytearray(form.pack(torch.ones(1, 9)).tobytes())
    data[36] = 9
    with pytest.raises(FrameError, match="beyond its 9 values"):
        form.unpack(bytes(data), 1)


def test_zeros_stay_zeros() -> None:
    form = StateFormat("int8", 5)
    assert not form.unpack(form.pack(torch.zeros(2, 5)).tobytes(), 2).any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused_on_both_sides(kind: str, value: float) -> None:
    form, bad = StateFormat(kind, 4), torch.tensor([[1.0, value, 2.0, 3.0]])
    with pytest.raises(GenerationError, match="not finite"):
        form.pack(bad)
    if kind == "int8":
        good = form.pack(torch.ones(1, 4))[0].tobytes()
        data = np.float32(value).tobytes() + good[4:]
        with pytest.raises(FrameError, match="not finite"):
            form.unpack(good[:4] + np.float32(value).tobytes() + good[8:], 1)
    else:
        data = bad.numpy().tobytes() if kind == "float32" else bad.bfloat16().view(torch.int16).numpy().tobytes()
    with pytest.raises(FrameError, match="not finite"):
        form.unpack(data, 1)


def test_other_sizes_are_refused() -> None:
    form = StateFormat("bfloat16", 4)
    for data, rows in ((b"x" * 7, 1), (b"x" * 8, 2), (b"", 1), (b"x" * 16, 1)):
        with pytest.raises(FrameError, match="bytes"):
            form.unpack(data, rows)
