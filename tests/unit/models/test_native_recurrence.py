"""Recurrent states of the native kernels: values, and the same bits in every tree and every split of a text."""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from draftree.models.native.blueprint import RECURRENCES, filled_up
from draftree.models.native.structures import CRecurrence
from native_builds import EACH_BUILD, OWN, built

DELTA, MAMBA2 = RECURRENCES["GATED_DELTA"], RECURRENCES["MAMBA2"]
ROOT = -1
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Shape:
    kind: int
    heads: int
    groups: int
    key_dim: int
    value_dim: int
    decays: int = 1
    norm_groups: int = 1
    is_norm_first: bool = False
    is_tiled: bool = False
    has_norm: bool = True
    has_skip: bool = False
    limits: tuple[float, float] = (0.0, math.inf)

    @property
    def channels(self) -> int:
        return 2 * self.groups * self.key_dim + self.heads * self.value_dim

    @property
    def times_at(self) -> int:
        return self.channels if self.kind == MAMBA2 else self.channels + filled_up(self.heads)

    @property
    def width(self) -> int:
        return self.channels + filled_up(self.heads) + filled_up(self.heads * self.decays)

    @property
    def state(self) -> int:
        return self.heads * filled_up(self.value_dim, 32) * self.key_dim


SHAPES = {
    "delta": Shape(DELTA, 4, 2, 64, 64, norm_groups=4, is_norm_first=True),
    "delta by channel": Shape(DELTA, 3, 3, 32, 32, decays=32, norm_groups=3, is_norm_first=True),
    "tiled delta": Shape(DELTA, 6, 3, 32, 32, norm_groups=6, is_norm_first=True, is_tiled=True),
    "narrow delta": Shape(DELTA, 2, 1, 16, 48, norm_groups=2, is_norm_first=True),
    "mamba2": Shape(MAMBA2, 4, 2, 32, 32, norm_groups=2, has_skip=True),
    "narrow mamba2": Shape(MAMBA2, 5, 1, 16, 16, has_skip=True, has_norm=False, limits=(0.01, 0.5)),
}


def _silu(x: Array) -> Array:
    result: Array = x / (1 + np.exp(-x))
    return result


class Layer:
    """Weights and tokens of a recurrent layer. A token's numbers are those after its convolution."""

    def __init__(self, shape: Shape, num_tokens: int) -> None:
        self.shape = shape
        rng = np.random.default_rng(7)
        self.num_decays = shape.heads * shape.decays
        self.decay = -np.exp(rng.uniform(-2, 1, filled_up(self.num_decays))).astype(np.float32)
        self.step_bias = rng.uniform(-3, 1, filled_up(self.num_decays)).astype(np.float32)
        self.skip = rng.normal(size=filled_up(shape.heads)).astype(np.float32)
        self.norm = rng.uniform(0.5, 1.5, shape.heads * shape.value_dim).astype(np.float32)
        self.numbers = rng.normal(size=(num_tokens, shape.width)).astype(np.float32)
        self.gates = rng.normal(size=(num_tokens, shape.heads * shape.value_dim)).astype(np.float32)

    def structure(self) -> CRecurrence:
        shape = self.shape
        return CRecurrence(
            kind=shape.kind,
            channels=shape.channels,
            heads=shape.heads,
            groups=shape.groups,
            heads_of_group=shape.heads // shape.groups,
            all_results=shape.heads * shape.value_dim,
            key_dim=shape.key_dim,
            value_dim=shape.value_dim,
            decays=shape.decays,
            is_norm_first=shape.is_norm_first,
            is_tiled=shape.is_tiled,
            norm_groups=shape.norm_groups,
            decay_rate=self.decay.ctypes.data,
            step_bias=self.step_bias.ctypes.data,
            skip=self.skip.ctypes.data if shape.has_skip else None,
            norm=self.norm.ctypes.data if shape.has_norm else None,
            least_step=shape.limits[0],
            most_step=shape.limits[1],
            factor_scale=2.0 if shape.kind == DELTA else 1.0,
            norm_epsilon=1e-6,
        )

    def reference(self, parents: Sequence[int]) -> Array:
        """Return the results of the tokens in a tree, in float64."""
        shape = self.shape
        states: list[Array] = []
        results = []
        for token, parent in enumerate(parents):
            before = states[parent] if parent != ROOT else np.zeros((shape.heads, shape.key_dim, shape.value_dim))
            state, result = self._token(self.numbers[token].astype(np.float64), before)
            states.append(state)
            results.append(self._gated(result, self.gates[token].astype(np.float64)))
        return np.array(results)

    def _token(self, numbers: Array, state: Array) -> tuple[Array, Array]:
        shape = self.shape
        keys, values = shape.groups * shape.key_dim, shape.heads * shape.value_dim
        repeats = shape.heads // shape.groups
        numbers = np.concatenate([_silu(numbers[: shape.channels]), numbers[shape.channels :]])
        factors, times = numbers[shape.channels :][: shape.heads], numbers[shape.times_at :][: self.num_decays]

        def per_head(numbers: Array, size: int, repeats: int = 1) -> Array:
            parts = numbers.reshape(-1, size)
            return np.tile(parts, (repeats, 1)) if shape.is_tiled else np.repeat(parts, repeats, axis=0)

        steps = np.clip(np.log1p(np.exp(times + self.step_bias[: self.num_decays])), *shape.limits)
        decay = np.exp(self.decay[: self.num_decays] * steps).reshape(shape.heads, -1, 1)
        if shape.kind == MAMBA2:
            value, key, query = np.split(numbers[: shape.channels], [values, values + keys])
            key, query = per_head(key, shape.key_dim, repeats), per_head(query, shape.key_dim, repeats)
            value = per_head(value, shape.value_dim)
            delta = steps[:, None] * value
        else:
            query, key, value = np.split(numbers[: shape.channels], [keys, 2 * keys])
            key, query = (
                part / np.sqrt((part**2).sum(-1, keepdims=True) + 1e-6)
                for part in (per_head(key, shape.key_dim, repeats), per_head(query, shape.key_dim, repeats))
            )
            query = query / math.sqrt(shape.key_dim)
            value = per_head(value, shape.value_dim)
            beta = 2 / (1 + np.exp(-factors))
            delta = beta[:, None] * (value - np.einsum("hkv,hk->hv", decay * state, key))
        state = decay * state + key[:, :, None] * delta[:, None]
        result = np.einsum("hkv,hk->hv", state, query)
        return state, (result + self.skip[: shape.heads, None] * value if shape.has_skip else result).flatten()

    def _gated(self, result: Array, gates: Array) -> Array:
        shape = self.shape
        silu = _silu(gates)
        if not shape.has_norm:
            return result * silu
        parts = (result if shape.is_norm_first else result * silu).reshape(shape.norm_groups, -1)
        normed = (parts / np.sqrt((parts**2).mean(-1, keepdims=True) + 1e-6)).flatten() * self.norm
        return normed * silu if shape.is_norm_first else normed


def depth_first(parents: Sequence[int], settled: int) -> tuple[list[int], list[int], list[int]]:
    """Return the nodes of a tree depth first, and levels of the parent's state and of its own for each of them."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    order, sources, targets = [], [], []
    pending = [(node, 0, 0) for node in reversed(children.get(ROOT, []))]
    while pending:
        node, source, _ = pending.pop()
        is_last = children[parents[node]][-1] == node
        target = source if node < settled or is_last else source + 1
        order.append(node)
        sources.append(source)
        targets.append(target)
        pending += [(child, target, 0) for child in reversed(children.get(node, []))]
    return order, sources, targets


class Slot:
    """State of one sequence, which moves on over settled tokens."""

    def __init__(self, layer: Layer, variant: str = OWN.name) -> None:
        self.layer = layer
        self._run = built(variant)._library.draftree_recur
        memory = np.zeros(layer.shape.state + 16, dtype=np.float32)
        start = -memory.ctypes.data % 64 // 4
        self.state = memory[start : start + layer.shape.state]

    def copy(self) -> Slot:
        other = Slot(self.layer)
        other._run = self._run
        other.state[:] = self.state
        return other

    def run(self, tokens: Sequence[int], parents: Sequence[int], *, settled: int, keeps: bool = True) -> Array:
        """Run tokens of the layer as nodes of a tree, and return their results."""
        order, sources, targets = depth_first(parents, settled)
        places = {node: place for place, node in enumerate(order)}
        width = self.layer.shape.heads * self.layer.shape.value_dim
        numbers_of_step = [places.get(parents[node], ROOT) for node in order]
        columns = array("q", [*order, *[-1] * len(order), *numbers_of_step, *sources, *targets])
        numbers = self.layer.numbers[[tokens[node] for node in order]].copy()
        gates = self.layer.gates[list(tokens)].copy()
        results = np.zeros((len(tokens), width), dtype=np.float32)
        shape = self.layer.structure()
        counts = [ctypes.c_int64(count) for count in (len(order), settled, max(targets) + 1)]
        addresses = [ctypes.c_void_p(memory.ctypes.data) for memory in (self.state, numbers, gates, results)]
        place = ctypes.c_void_p(columns.buffer_info()[0])
        failed = self._run(ctypes.byref(shape), place, *counts, int(keeps), *addresses, ctypes.c_int64(len(tokens)))
        assert not failed
        return results


def chain(count: int) -> list[int]:
    return list(range(-1, count - 1))


def random_tree(rng: np.random.Generator, count: int) -> list[int]:
    return [int(rng.integers(-1, node)) if node else ROOT for node in range(count)]


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    path = []
    while node != ROOT:
        path.append(node)
        node = parents[node]
    return path[::-1]


@pytest.mark.parametrize("variant", EACH_BUILD)
@pytest.mark.parametrize("name", SHAPES)
def test_results_are_those_of_the_recurrence(name: str, variant: str) -> None:
    layer, parents = Layer(SHAPES[name], 40), random_tree(np.random.default_rng(3), 40)
    for tree in (chain(40), parents):
        found, wanted = Slot(layer, variant).run(range(40), tree, settled=0), layer.reference(tree)
        assert np.abs(found - wanted).max() < 2e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("variant", EACH_BUILD)
@pytest.mark.parametrize("name", SHAPES)
def test_every_node_of_a_tree_has_the_bits_of_its_path_alone(name: str, variant: str) -> None:
    layer, rng = Layer(SHAPES[name], 30), np.random.default_rng(5)
    start = Slot(layer, variant)
    start.run(range(10), chain(10), settled=10)
    for count in (3, 8, 20):
        parents = random_tree(rng, count)
        found = start.copy().run(range(10, 10 + count), parents, settled=0)
        for node in range(count):
            path = path_to(node, parents)
            alone = start.copy()
            for place in path:
                result = alone.run([10 + place], [ROOT], settled=1)
            assert np.array_equal(result[0], found[node])


@pytest.mark.parametrize("variant", EACH_BUILD)
@pytest.mark.parametrize("name", SHAPES)
def test_every_split_of_a_text_gives_the_same_bits(name: str, variant: str) -> None:
    layer, rng = Layer(SHAPES[name], 24), np.random.default_rng(11)
    whole = Slot(layer, variant)
    wanted = whole.run(range(24), chain(24), settled=24)
    for _ in range(5):
        slot, done = Slot(layer, variant), 0
        while done < 24:
            size = int(rng.integers(1, 25 - done))
            settled = int(rng.integers(1, size + 1))
            found = slot.run(range(done, done + size), chain(size), settled=settled)
            assert np.array_equal(found, wanted[done : done + size])
            done += settled
        assert np.array_equal(slot.state, whole.state)


def test_a_pass_that_keeps_nothing_leaves_the_state_as_it_was() -> None:
    layer = Layer(SHAPES["delta"], 12)
    slot = Slot(layer)
    slot.run(range(4), chain(4), settled=4)
    before = slot.state.copy()
    found = slot.run(range(4, 12), chain(8), settled=8, keeps=False)
    assert np.array_equal(slot.state, before)
    assert np.array_equal(found, slot.run(range(4, 12), chain(8), settled=8))
    assert not np.array_equal(slot.state, before)


def test_extreme_gates_leave_finite_numbers() -> None:
    shape = replace(SHAPES["mamba2"], limits=(0.0, math.inf))
    layer = Layer(shape, 6)
    times = layer.numbers[:, shape.times_at : shape.times_at + shape.heads]
    times[:] = np.array([-120.0, -30.0, 0.0, 15.0, 40.0, 90.0])[:, None]
    found, wanted = Slot(layer).run(range(6), chain(6), settled=6), layer.reference(chain(6))
    assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max()
