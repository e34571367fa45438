"""Layouts that passes in C read: keys and values of sources, and score biases by distance."""

from __future__ import annotations

import ctypes

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftree.models.native.score_biases import FIRST_DISTANCES, PADDING, ScoreBiases
from draftree.models.native.seq2seq.encoder import SourceEncoder
from draftree.models.native.structures import CLayer, CPass
from draftree.models.source import TokenSource

HEADS, DIM = 3, 16


def encoder(layers: int) -> SourceEncoder:
    torch.manual_seed(1)
    products = [(nn.Linear(20, HEADS * DIM), nn.Linear(20, HEADS * DIM, bias=False)) for _ in range(layers)]
    return SourceEncoder(nn.Identity(), products, HEADS, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("length", [1, 16, 37])
def test_keys_are_stored_by_dimension_in_groups_of_16(length: int) -> None:
    made, hidden = encoder(2), torch.randn(1, length, 20)
    source = made.keys_values(TokenSource((1,)), hidden)
    padded = -(-length // 16) * 16
    assert source.memory.shape == (2, 2, HEADS, padded, DIM)
    assert source.length == length
    for layer, (keys, values) in enumerate(made.products):
        wanted = F.linear(hidden[0], keys.weight, keys.bias).view(length, HEADS, DIM)
        groups = source.memory[layer, 0].reshape(HEADS, padded // 16, DIM, 16)
        for position in range(length):
            assert torch.equal(groups[:, position // 16, :, position % 16], wanted[position])
        stored = source.memory[layer, 1, :, :length].transpose(0, 1)
        assert torch.equal(stored.reshape(length, -1), F.linear(hidden[0], values.weight))
    assert not source.memory[:, 1, :, length:].any()
    last = F.linear(hidden[0], made.products[-1][0].weight, made.products[-1][0].bias)
    assert torch.equal(source.last_keys().transpose(0, 1).reshape(length, -1), last)


def table_at(address: int, length: int) -> Tensor:
    numbers = (ctypes.c_float * (HEADS * (length + PADDING))).from_address(address)
    return torch.tensor(list(numbers)).view(HEADS, length + PADDING)


def test_biases_begin_with_the_most_distant_key_and_grow() -> None:
    tables = [torch.randn(HEADS, 5), torch.randn(HEADS, 9)]
    biases, layers, run = ScoreBiases(tables, [0, None, 1]), (CLayer * 3)(), CPass()
    for longest, length in ((3, FIRST_DISTANCES), (FIRST_DISTANCES, FIRST_DISTANCES), (700, 700), (701, 1400)):
        biases.point(run, layers, longest=longest)
        assert run.bias_length == length
        assert layers[1].score_bias is None
        for layer, table in ((0, tables[0]), (2, tables[1])):
            found = table_at(layers[layer].score_bias, length)
            for distance in (0, 1, 4, 8, 9, length - 1):
                wanted = table[:, min(distance, table.shape[1] - 1)]
                assert torch.equal(found[:, length - 1 - distance], wanted)
            assert not found[:, length:].any()


def test_without_biases_nothing_is_set() -> None:
    run, layers = CPass(), (CLayer * 1)()
    ScoreBiases([], [None]).point(run, layers, longest=900)
    assert (run.bias_length, layers[0].score_bias) == (0, None)
