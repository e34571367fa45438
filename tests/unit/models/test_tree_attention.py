"""The Triton kernels of tree attention equal a plain reference, with the same bits in every batch, and grow trees.

Without a GPU the kernels run in Triton's interpreter, which `conftest.py` selects.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from draftree.core.tensors import runs_triton
from draftree.core.tree import Draw, depths
from draftree.core.types import Budget
from draftree.drafters.tree_builder.builder import TreeBuilder, parse_shape
from draftree.drafters.tree_builder.head_stepper import HeadStepper
from draftree.heads.passes import TorchPasses
from draftree.models.kv.slots import KVSlot
from draftree.models.torch import growth, static
from draftree.models.torch import tree_attention as tree_attention_module
from draftree.models.torch.static import Bucket, Inputs, Rows, Shapes, inputs_of, pack_inputs
from draftree.models.torch.tree_attention import (
    TileConfig,
    nodes_by_depth,
    rows_per_tile,
    store_rows,
    tile_config,
    tree_attention,
)
from draftree.sampling.params import SamplingParams
from head_samples import head_config, random_head, random_parts
from head_texts import HeadText

pytest.importorskip("triton")
HAS_GPU = os.environ["TRITON_INTERPRET"] != "1"
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")

CONFIG = TileConfig(rows=16, keys=32, split=64)
LENGTH = 300
PROMPTS = ([3, 1, 4], [2, 7], [9, 8])


@pytest.fixture(autouse=not HAS_GPU)
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton_interpreter import repair

    repair(monkeypatch.setattr)


@dataclass(frozen=True)
class Job:
    slot: int
    prefix: int
    parents: Sequence[int]  # tree of the slot
    nodes: Sequence[int]  # nodes that are rows of the pass

    def rows(self) -> Rows:
        slot = KVSlot(self.slot)
        slot.length = self.prefix
        slot.append(self.parents)
        return Rows(slot, [0] * len(self.nodes), self.nodes)


@dataclass(frozen=True)
class Options:
    kv_heads: int = 1
    group: int = 2
    key_dim: int = 64
    value_dim: int = 64
    dtype: torch.dtype = torch.float32
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    words: int = 1
    length: int = LENGTH
    has_order: bool = False


def random_tree(rng: np.random.Generator, count: int) -> list[int]:
    return [int(rng.integers(-1, node)) for node in range(count)]


class Sample:
    """Pool of one layer, and queries by slot and node, so that a row has the same values in every pass."""

    def __init__(self, options: Options, num_slots: int = 4) -> None:
        self.options = options
        draw = torch.Generator().manual_seed(5)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw).to(options.dtype).to(DEVICE)

        # a layer's pool is a view of a store with several layers
        self.keys = normal(num_slots, 3, options.kv_heads, options.length, options.key_dim)[:, 1]
        self.values = normal(num_slots, 3, options.kv_heads, options.length, options.value_dim)[:, 1]
        heads = options.kv_heads * options.group
        # rows are not contiguous, as in a model
        self.queries = normal(num_slots, heads, 128, options.key_dim).transpose(1, 2)
        self.sinks = normal(heads) if options.has_sinks else None

    def inputs(self, jobs: Sequence[Job], *, padding: int = 0, config: TileConfig = CONFIG) -> tuple[Tensor, Tensor]:
        """Return the queries and the packed integers of a pass."""
        options = self.options
        count = sum(len(job.nodes) for job in jobs)
        packed = pack_inputs(
            Bucket(count + padding, options.words, None),
            [job.rows() for job in jobs],
            requested=(),
            scratch=options.length - 1,
            per_tile=rows_per_tile(options.group, config),
            has_chains=options.has_order,
        )
        query = torch.cat(
            [*(self.queries[job.slot, list(job.nodes)] for job in jobs), self.queries[0, 64 : 64 + padding]]
        )
        return query, torch.from_numpy(packed).to(DEVICE)

    def attend_inputs(self, query: Tensor, packed: Tensor, config: TileConfig = CONFIG) -> Tensor:
        options = self.options
        inputs: Inputs[Tensor] = inputs_of(packed, Bucket(len(query), options.words, None))
        return tree_attention(
            query,
            self.keys,
            self.values,
            slot_of_row=inputs.slots,
            prefix_of_row=inputs.prefixes,
            seen=inputs.seen,
            position_of_row=inputs.reach,
            first_row_of_tile=inputs.tiles,
            num_rows_of_tile=inputs.tile_rows,
            config=config,
            scale=0.11,
            window=options.window,
            softcap=options.softcap,
            sinks=self.sinks,
            order=nodes_by_depth(inputs.seen) if options.has_order else None,
        )

    def attend(self, jobs: Sequence[Job], *, padding: int = 0, config: TileConfig = CONFIG) -> Tensor:
        return self.attend_inputs(*self.inputs(jobs, padding=padding, config=config), config)

    def reference(self, jobs: Sequence[Job]) -> Tensor:
        return torch.stack([self._row(job, node) for job in jobs for node in job.nodes])

    def _row(self, job: Job, node: int) -> Tensor:
        options = self.options
        depth = depths(job.parents)
        positions = [*range(job.prefix), *(job.prefix - 1 + rows for rows in depth)]
        visible, at = set(range(job.prefix)), node
        while at >= 0:
            visible.add(job.prefix + at)
            at = job.parents[at]
        if options.window is not None:
            visible = {index for index in visible if positions[job.prefix + node] - positions[index] < options.window}
        index = torch.tensor(sorted(visible), device=DEVICE)
        keys, values = (
            store[job.slot, :, index].double().repeat_interleave(options.group, 0) for store in (self.keys, self.values)
        )
        scores = (keys @ self.queries[job.slot, node].double()[:, :, None])[:, :, 0] * 0.11
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        if self.sinks is None:
            return (torch.softmax(scores, dim=1)[:, None] @ values)[:, 0]
        weights = torch.softmax(torch.cat([scores, self.sinks.double()[:, None]], dim=1), dim=1)[:, :-1]
        return (weights[:, None] @ values)[:, 0]


def some_jobs(seed: int = 0) -> list[Job]:
    """Return a tree of which all nodes are rows, a single token, the later nodes of a tree, and a first token."""
    rng = np.random.default_rng(seed)
    tree, longer = random_tree(rng, 9), random_tree(rng, 21)
    return [
        Job(2, 70, tree, range(9)),
        Job(1, 140, [-1], [0]),
        Job(0, 120, longer, [3, 20]),
        Job(3, 0, [-1], [0]),
    ]


TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def assert_close(actual: Tensor, expected: Tensor) -> None:
    error = float((actual.double() - expected).abs().max())
    assert error < TOLERANCE[actual.dtype], error


@pytest.mark.essential
@pytest.mark.parametrize(
    "changes",
    [
        {"kv_heads": 2},
        {"key_dim": 80, "value_dim": 80, "dtype": torch.float16},
        {"key_dim": 96, "value_dim": 64},
        {"key_dim": 128, "value_dim": 128, "dtype": torch.bfloat16},
        {"key_dim": 256, "value_dim": 256, "group": 1},
        {"group": 3},
        {"group": 20},  # more heads than a tile has rows
        {"window": 12},
        {"window": 50, "words": 3},
        {"window": 75},
        {"softcap": 2.0},
        {"has_sinks": True},
        {"window": 30, "softcap": 3.0, "has_sinks": True, "dtype": torch.float16},
        {"has_order": True, "kv_heads": 2},
        {"has_order": True, "window": 3, "words": 3, "dtype": torch.bfloat16},  # nodes see some ancestors only
        {"has_order": True, "window": 50, "softcap": 2.0, "has_sinks": True},
    ],
    ids=str,
)
def test_rows_equal_the_reference(changes: dict[str, Any]) -> None:
    options = Options(**changes)
    sample, jobs = Sample(options), some_jobs()
    if options.group > 3:
        jobs = jobs[1:]
    mixed = sample.attend(jobs, padding=1)
    assert_close(mixed[:-1], sample.reference(jobs))
    assert mixed[-1].isfinite().all()


def test_trees_of_several_words() -> None:
    rng = np.random.default_rng(3)
    sample = Sample(Options(words=3))
    chain = list(range(-1, 127))
    jobs = [Job(0, 61, random_tree(rng, 128), [0, 31, 32, 63, 64, 127]), Job(1, 40, chain, range(125, 128))]
    assert_close(sample.attend(jobs), sample.reference(jobs))


def test_prefixes_at_the_bounds_of_blocks_and_splits() -> None:
    prefixes = [0, 1, 31, 32, 33, 63, 64, 65, 127, 128]
    sample = Sample(Options(window=40, group=1), num_slots=len(prefixes))
    jobs = [Job(slot, prefix, [-1, 0, 0], [2]) for slot, prefix in enumerate(prefixes)]
    assert_close(sample.attend(jobs), sample.reference(jobs))


@pytest.mark.essential
@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, None), (torch.bfloat16, 50)], ids=str)
def test_bits_of_a_row_depend_on_nothing_else(dtype: torch.dtype, window: int | None) -> None:
    options = Options(dtype=dtype, window=window)
    sample = Sample(options)
    jobs = some_jobs()
    together = sample.attend(jobs, padding=1)
    # rows of the first and of the second tile of a tree, and of other jobs
    rows = {0: (0, 0), 3: (0, 3), 8: (0, 8), 9: (1, 0), 11: (2, 20)}
    for row, (job, node) in rows.items():
        assert torch.equal(sample.attend([replace(jobs[job], nodes=[node])])[0], together[row])
    assert torch.equal(sample.attend([jobs[2], jobs[0]]), torch.cat([together[10:12], together[:9]]))
    # a longer pool, of more splits, has the same prefix
    longer = Sample(replace(options, length=2 * LENGTH))
    longer.keys[:, :, :LENGTH], longer.values[:, :, :LENGTH] = sample.keys, sample.values
    longer.queries = sample.queries
    assert torch.equal(longer.attend(jobs[2:]), together[10:13])


def test_bits_of_a_chain_are_those_of_plain_decoding() -> None:
    sample = Sample(Options())
    chain = sample.attend([Job(0, 60, list(range(-1, 9)), range(10))])
    sample.queries = sample.queries[:, 9:10].expand(-1, 10, -1, -1)
    assert torch.equal(sample.attend([Job(0, 69, [-1], [0])]), chain[9:])


@pytest.mark.essential
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 40])
def test_bits_of_a_row_do_not_depend_on_its_tree(dtype: torch.dtype, window: int | None) -> None:
    prefix, depth = 70, 9
    options = Options(dtype=dtype, window=window, has_order=True, words=2)
    tree = Sample(options, num_slots=2)
    path = [0, 3, 4, 11, 30, 33, 63, 64, 100]  # nodes between them are siblings
    parents = [-1] * 101
    for parent, node in pairwise(path):
        parents[node] = parent
    wanted = tree.attend([Job(1, prefix, parents, path), Job(0, 40, [-1], [0])])[:depth]
    # the same keys where a chain has them, in chunks, and where plain decoding has them
    chain = Sample(options, num_slots=2)
    places = [prefix + node for node in path]
    for part, other in ((chain.keys, tree.keys), (chain.values, tree.values)):
        part[1, :, prefix : prefix + depth] = other[1, :, places]
    chain.queries[1, :depth] = tree.queries[1, path]
    rows = chain.attend([Job(1, prefix, range(-1, depth - 1), range(depth))])
    assert torch.equal(rows, wanted)
    late = [Job(1, prefix, range(-1, depth - 1), range(3, depth))]
    assert torch.equal(chain.attend(late), wanted[3:])
    chain.queries[1, 0] = tree.queries[1, path[-1]]
    assert torch.equal(chain.attend([Job(1, prefix + depth - 1, [-1], [0])])[0], wanted[-1])


def test_some_heads_follow_after_others(monkeypatch: pytest.MonkeyPatch) -> None:
    sample, jobs = Sample(Options(kv_heads=5, has_sinks=True)), some_jobs()
    together = sample.attend(jobs)
    monkeypatch.setattr(tree_attention_module, "MAX_PARTIAL", 2 * 2 * 64 * len(together) * -(-LENGTH // CONFIG.split))
    assert torch.equal(sample.attend(jobs), together)


def test_cells_that_are_not_seen_may_be_nan() -> None:
    sample = Sample(Options(window=90))
    jobs = [Job(0, 70, [-1, -1, 0, 1, 2], [2, 4]), Job(1, 200, [-1], [0])]
    before = sample.attend(jobs)
    for store in (sample.keys, sample.values):
        store[0, :, [71, 73]] = float("nan")  # siblings of the ancestors
        store[0, :, 75:] = float("nan")
        store[1, :, 201:] = float("nan")
        store[2:] = float("nan")
    assert torch.equal(sample.attend(jobs), before)


@pytest.mark.parametrize("config", [TileConfig(rows=32, keys=16, split=32), tile_config(torch.bfloat16, 64)])
def test_other_configurations(config: TileConfig) -> None:
    sample = Sample(Options(window=100, group=4))
    jobs = some_jobs(1)
    assert_close(sample.attend(jobs, config=config), sample.reference(jobs))


def test_rows_without_a_tile_are_zero_if_they_see_nothing() -> None:
    sample = Sample(Options())
    zeros = torch.zeros(2, dtype=torch.long, device=DEVICE)
    mixed = tree_attention(
        sample.queries[0, :2],
        sample.keys,
        sample.values,
        slot_of_row=zeros,
        prefix_of_row=zeros,
        seen=zeros[:, None],
        position_of_row=zeros,
        first_row_of_tile=zeros,
        num_rows_of_tile=zeros,
        config=CONFIG,
        scale=1.0,
    )
    assert not mixed.any()


@pytest.mark.parametrize("dims", [(64, 64), (24, 16)])
def test_rows_are_stored_at_their_places(dims: tuple[int, int]) -> None:
    slots, places = torch.tensor([[2, 0, 2, 1], [7, 3, 9, 3]], device=DEVICE)
    # views, as of a pool with several layers and of a projection to queries, keys and values
    keys, values = (torch.zeros(3, 2, 2, 12, dim, device=DEVICE)[:, 1] for dim in dims)
    key, value = (torch.randn(4, 3, 2, dim, device=DEVICE)[:, 1] for dim in dims)
    expected = [part.clone() for part in (keys, values)]
    expected[0][slots, :, places], expected[1][slots, :, places] = key, value
    store_rows(key, value, keys, values, slots=slots, places=places)
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])


def test_tiles_are_runs_of_rows_of_one_job() -> None:
    jobs = [Job(slot, 9, [-1] * count, range(count)) for slot, count in enumerate((5, 1, 2))]
    bucket = Bucket(11, 1, None)
    packed = pack_inputs(bucket, [job.rows() for job in jobs], requested=(), scratch=99, per_tile=2)
    inputs = inputs_of(packed, bucket)
    assert inputs.tiles.tolist() == [0, 2, 4, 5, 6, 8, 10, 0, 0, 0, 0]
    assert inputs.tile_rows.tolist() == [2, 2, 1, 1, 2, 2, 1, 0, 0, 0, 0]


def test_the_kernel_is_for_gpus() -> None:
    assert not runs_triton(torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
def test_a_graph_replays_other_trees_and_lengths() -> None:
    sample = Sample(Options(dtype=torch.bfloat16, window=90))
    inputs = sample.inputs(some_jobs(), padding=2)
    sample.attend_inputs(*inputs)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = sample.attend_inputs(*inputs)
    others = [Job(3, 190, random_tree(np.random.default_rng(1), 20), range(12)), Job(1, 3, [-1, -1], [1])]
    for jobs in (others, some_jobs()):
        for target, source in zip(inputs, sample.inputs(jobs, padding=2), strict=True):
            target.copy_(source)
        graph.replay()
        assert_close(output[:-2], sample.reference(jobs))


@pytest.mark.skipif(HAS_GPU, reason="tests/gpu has trees on a card")
@pytest.mark.parametrize(("shape", "count"), [("chain", 3), ("best-5", 3), ("best-5", 1), ("2-1-2", 1)])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_trees_that_grow_by_kernels_are_those_of_torch(
    shape: str, count: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=temperature, seed=1)

    def trees() -> list[Any]:
        head = random_head(head_config("eagle3", hidden=32, target_hidden=32, head_dim=16), scale=0.4).float()
        head.bind(random_parts(hidden=32))
        stepper = HeadStepper(TorchPasses(head, torch.device("cpu"), Shapes()))
        builder = TreeBuilder(stepper, shape=parse_shape(shape, 3), draw=Draw.FREE, shares_noise=True)
        texts = [HeadText(stepper, head, list(tokens), params=params).read() for tokens in PROMPTS[:count]]
        return [
            (tree.tokens, tree.parents) for tree in builder.grow([text.state for text in texts], [Budget(5, 3)] * count)
        ]

    wanted = trees()
    for module in (static, growth):
        monkeypatch.setattr(module, "runs_triton", lambda device: True)
    launched = []
    attend = tree_attention_module.tree_attention
    monkeypatch.setattr(tree_attention_module, "tree_attention", lambda *a, **k: launched.append(1) or attend(*a, **k))
    assert trees() == wanted
    assert launched
