"""Forward passes of fixed shapes over slots, which a CUDA graph can replay.

The shape of a pass is its number of rows, rounded up. Slots, places, positions and ancestors are data in one buffer of
integers, so that a few dozen shapes serve every batch, tree and length.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from draftree.core.errors import ConfigurationError
from draftree.core.tensors import fill, runs_triton, to_device
from draftree.core.tree import ancestor_bits
from draftree.models.kv.slots import KVMemory, KVSlot
from draftree.models.torch.attention import LayerCall, additive, attend

MAX_CELLS = 1 << 22  # maximum number of rows times keys of a slot: attention keeps partial results of all
MAX_COPIED = 1 << 17  # the same without the kernel: keys and values are copied for every row
WORD_BITS = 64  # number of tentative nodes per integer of visibility bits


@dataclass(frozen=True, slots=True)
class Shapes:
    max_rows: int = 1024  # maximum number of rows of a static pass; others, such as chunks of prompts, are dynamic
    max_nodes: int = 512  # maximum number of tentative tokens of a slot
    captures: bool = True  # whether passes are captured if the device supports it
    exact: bool = False  # whether rows have the same bits in every pass; for GPUs with Triton

    def __post_init__(self) -> None:
        for name in ("max_rows", "max_nodes"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} of static shapes is {getattr(self, name)}: it must be at least 1")


@dataclass(frozen=True, slots=True)
class Bucket:
    """The shape of a pass, and what else its operations depend on."""

    rows: int
    words: int  # number of integers of a row's visibility bits
    kind: Hashable  # argument of the forward function
    extra: int = 0  # number of further integers


def rounded(count: int) -> int:
    """Round up to 1, 2, 4, 8, 16, 32, 48, 64, 96, 128, …: powers of two, with midpoints from 32 on."""
    power = 1
    while power < count:
        power *= 2
    middle = power * 3 // 4
    return middle if power > 32 and middle >= count else power


Array = TypeVar("Array", np.ndarray, Tensor)


@dataclass(frozen=True, slots=True)
class Inputs(Generic[Array]):
    """The integers of a pass. Rows of padding come last; they see one key of the first slot and are not kept."""

    tokens: Array  # token of each row; 0 for padding
    positions: Array  # position of each row
    slots: Array  # slot of each row's keys
    places: Array  # index of each row's keys in its slot; for padding the scratch index after all others
    prefixes: Array  # committed tokens of each row's slot; 0 for padding
    reach: Array  # index that each row would have as part of the prefix: windows go by depth
    requested: Array  # rows whose logits are requested, then zeros
    seen: Array  # bits of the tentative nodes that each row sees, shape (rows, words)
    tiles: Array  # first row of neighbouring rows of one slot that attend together; as many as rows, then zeros
    tile_rows: Array  # number of rows of each tile
    extra: Array  # further integers of the forward function


def _shapes(bucket: Bucket) -> list[tuple[int, ...]]:
    return [*[(bucket.rows,)] * 7, (bucket.rows, bucket.words), *[(bucket.rows,)] * 2, (bucket.extra,)]


def inputs_size(bucket: Bucket) -> int:
    return sum(math.prod(shape) for shape in _shapes(bucket))


def inputs_of(array: Array, bucket: Bucket) -> Inputs[Array]:
    views, start = [], 0
    for shape in _shapes(bucket):
        end = start + math.prod(shape)
        views.append(array[start:end].reshape(shape))
        start = end
    return Inputs(*views)


@dataclass(frozen=True, slots=True)
class Rows:
    """New rows of one slot in a pass."""

    slot: KVSlot
    tokens: Sequence[int]
    nodes: Sequence[int]  # their tentative nodes
    positions: Sequence[int] | None = None  # positions of the tokens; None for those of the slot


def pack_inputs(
    bucket: Bucket,
    jobs: Sequence[Rows],
    *,
    requested: Sequence[int],
    scratch: int,
    per_tile: int,
    has_chains: bool = False,
) -> np.ndarray:
    """Return the integers of one pass.

    `scratch`: an index that is never read. `has_chains`: whether the rows of a tile must be a chain.
    """
    array = np.zeros(inputs_size(bucket), dtype=np.int64)
    into = inputs_of(array, bucket)
    into.slots[:] = jobs[0].slot.index
    into.places[:] = scratch
    into.requested[: len(requested)] = requested
    into.seen[:, 0] = 1  # softmax over no visible key gives NaN
    first = 0
    starts: list[int] = []
    for job in jobs:
        slot = job.slot
        chosen = list(job.nodes)
        end = first + len(chosen)
        rows = slice(first, end)
        reach = np.array(slot.depths)[chosen] + (slot.length - 1)
        into.tokens[rows] = job.tokens
        into.positions[rows] = reach + slot.offset if job.positions is None else job.positions
        into.reach[rows] = reach
        into.slots[rows] = slot.index
        into.places[rows] = np.array(chosen) + slot.length
        into.prefixes[rows] = slot.length
        bits = ancestor_bits(slot.parents, num_bytes=bucket.words * WORD_BITS // 8)
        into.seen[rows] = bits.view("<i8")[chosen]
        breaks: list[int] = []
        if has_chains:
            breaks = (np.flatnonzero(np.array(slot.parents)[chosen[1:]] != chosen[:-1]) + first + 1).tolist()
        for begin, stop in pairwise((first, *breaks, end)):
            starts += range(begin, stop, per_tile)
        first = end
    starts += range(first, bucket.rows, per_tile)
    into.tiles[: len(starts)] = starts
    into.tile_rows[: len(starts)] = np.diff([*starts, bucket.rows])
    return array


class StaticAttention:
    """Handler of the attention calls of one static pass.

    Keys and values are written by index; a row reads those of its slot's prefix and of its ancestors. Nothing depends
    on a value, so nothing waits for the device.
    """

    def __init__(self, memory: KVMemory, inputs: Inputs[Tensor], *, has_kernel: bool, is_exact: bool = False) -> None:
        self._memory = memory
        self._inputs = inputs
        self._has_kernel = has_kernel
        self._order: Tensor | None = None
        if is_exact:
            from draftree.models.torch.tree_attention import nodes_by_depth

            self._order = nodes_by_depth(inputs.seen)
        self._masks: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def over(self, inputs: Inputs[Tensor]) -> StaticAttention:
        """Return the attention of other rows, which are a draft's and need not be exact."""
        return StaticAttention(self._memory, inputs, has_kernel=self._has_kernel)

    def note_mask(self, window: int | None) -> None:
        """Do nothing: each call has its window."""

    def attend(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = (part[0].transpose(0, 1) for part in (query, key, value))
        return self.attend_rows(call, *rows).unsqueeze(0)

    def attend_rows(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend; arguments and result have shape (rows, heads, head_dim)."""
        inputs = self._inputs
        keys, values = self._memory.keys[call.layer], self._memory.values[call.layer]
        if self._has_kernel:
            from draftree.models.torch.tree_attention import store_rows, tile_config, tree_attention

            store_rows(key, value, keys, values, slots=inputs.slots, places=inputs.places)
            return tree_attention(
                query,
                keys,
                values,
                slot_of_row=inputs.slots,
                prefix_of_row=inputs.prefixes,
                seen=inputs.seen,
                position_of_row=inputs.reach,
                first_row_of_tile=inputs.tiles,
                num_rows_of_tile=inputs.tile_rows,
                config=tile_config(query.dtype, max(query.shape[2], value.shape[2])),
                scale=call.scaling,
                window=call.window,
                softcap=call.softcap,
                sinks=call.sinks,
                order=self._order,
            )
        keys[inputs.slots, :, inputs.places] = key
        values[inputs.slots, :, inputs.places] = value
        mask = self._mask(call.window, query.dtype)
        # weight 0 times NaN is NaN: keys and values of dropped nodes may be anything
        hidden = mask[:, 0, 0, :, None].isinf()[:, None]
        row_keys, row_values = (part[inputs.slots].masked_fill(hidden, 0) for part in (keys, values))
        return attend(query.unsqueeze(2), row_keys, row_values, call=call, mask=mask).squeeze(2)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return the additive mask of shape (rows, 1, 1, length), built once per pass and window."""
        key = (window, dtype)
        if key not in self._masks:
            inputs = self._inputs
            place = torch.arange(self._memory.length + self._memory.num_scratch, device=inputs.seen.device)
            node = place - inputs.prefixes[:, None]
            size = inputs.seen.shape[1] * WORD_BITS
            bits = inputs.seen.gather(1, node.clamp(0, size - 1) // WORD_BITS)
            is_ancestor = ((bits >> (node % WORD_BITS)) & 1).bool() & (node >= 0) & (node < size)
            near = node < 0
            if window is not None:
                near = near & (inputs.reach[:, None] - place < window)
            self._masks[key] = additive(near | is_ancestor, dtype)[:, None, None]
        return self._masks[key]


class CaptureError(Exception):
    """The work cannot be captured; the message is the reason."""


class CudaApi:
    """What capture uses of the CUDA runtime of torch, for one GPU. Tests record the order of its calls."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.new_pool: Callable[[], Any] = torch.cuda.graph_pool_handle
        self.new_graph: Callable[[], Any] = torch.cuda.CUDAGraph
        self.set_stream: Callable[[Any], None] = torch.cuda.set_stream
        self.on_stream: Callable[[Any], AbstractContextManager[Any]] = torch.cuda.stream

    def new_stream(self) -> Any:
        return torch.cuda.Stream(self._device)

    def current_stream(self) -> Any:
        return torch.cuda.current_stream(self._device)

    def wait(self, stream: Any, other: Any) -> None:
        """Make later work on `stream` wait for the work queued on `other`."""
        stream.wait_stream(other)

    def on_device(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self._device)

    def recording(self, graph: Any, *, pool: Any, stream: Any) -> AbstractContextManager[Any]:
        """Record in thread-local mode: other threads may allocate meanwhile."""
        return torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")

    def generator(self) -> Any:
        """Return a copy of the state of the device's random numbers."""
        index = self._device.index or 0
        return torch.cuda.default_generators[index].clone_state()

    def restore(self, generator: Any) -> None:
        """Set a copied state: a failed capture leaves one that only a capture may use."""
        torch.cuda.default_generators[self._device.index or 0].graphsafe_set_state(generator)


Outputs = tuple[Tensor, ...]


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keep the garbage collector from freeing graphs, which fails every capture of the process, inside."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class Graphs:
    """Graphs of one model, with their pool and the stream on which they are recorded.

    Every model has its own memory pool. Graphs of one pool may share addresses of intermediate results, which is
    safe only if they are replayed one after another on one stream. This holds for the passes of one model, not for
    those of a target and its drafter.
    """

    def __init__(self, api: Any) -> None:
        self._api = api
        self._pool: Any = None
        self._side: Any = None

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run the work once on a side stream, record it there, and return what replays it on the current stream.

        Raises CaptureError, after which the device can be used as before.
        """
        api = self._api
        with api.on_device():
            if self._side is None:
                self._pool, self._side = api.new_pool(), api.new_stream()
            side = self._side
            before = api.current_stream()
            generator = api.generator()
            graph = api.new_graph()
            try:
                api.wait(side, before)
                with api.on_stream(side):
                    work()
                api.wait(before, side)
                with _uncollected(), api.recording(graph, pool=self._pool, stream=side):
                    work()
            except Exception as error:  # torch and its libraries raise many types
                api.restore(generator)
                self._pool = self._side = None  # the pool still waits for the end of this capture
                raise CaptureError(str(error).strip().split("\n")[0] or type(error).__name__) from error
            finally:
                api.set_stream(before)  # a failed capture leaves its own stream current
        return graph.replay


def graphs_of(device: torch.device) -> Graphs | None:
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return Graphs(CudaApi(device))


logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Prepared:
    """The pass of one shape, whose inputs have fixed addresses."""

    integers: Tensor
    floats: Tensor | None  # inputs that are computed, shape (rows, …)
    run: Callable[[], Outputs]  # outputs are overwritten by the next pass if `is_captured`
    is_captured: bool = False


class StaticPasses:
    """Passes of static shapes.

    Mutates the memory of slots. On a GPU every shape is captured as a CUDA graph when it is first used. On a CPU, and
    with models that graphs do not support, the same work runs operator by operator. All graphs write their outputs to
    the same memory: a pass is read before the next one starts.

    `forward`: computes the outputs, each of shape (rows, …), from the inputs of a pass, its attention, computed inputs
    (rows, …) or None, and the kind of the pass. `row_bytes`: size of the outputs of one row. `min_rows`: a pass has at
    least so many rows. `group`: largest number of query heads per key head. `window`: smallest sliding window of a
    layer; None for none.
    """

    def __init__(
        self,
        forward: Callable[[Inputs[Tensor], StaticAttention, Tensor | None, Any], Outputs],
        memory: KVMemory,
        *,
        device: torch.device,
        shapes: Shapes,
        min_rows: int,
        row_bytes: int,
        group: int,
        window: int | None = None,
    ) -> None:
        assert memory.num_scratch, "padding rows need a scratch index"
        self._forward = forward
        self._memory = memory
        self._device = device
        self.shapes = shapes
        self._min_rows = min_rows
        self._row_bytes = row_bytes
        self._window = window
        self._has_kernel = runs_triton(device)
        self.per_tile = 1  # maximum number of rows of a tile of attention
        if self._has_kernel:
            from draftree.models.torch.tree_attention import rows_per_tile, tile_config

            self.per_tile = rows_per_tile(group, tile_config(memory.dtype, memory.largest_dim))
        self._prepared: dict[Bucket, Prepared] = {}
        self._outputs: dict[tuple[int, torch.Size, torch.dtype], Tensor] = {}
        self._version = memory.version
        self._graphs: Graphs | None = graphs_of(device) if shapes.captures else None
        self.why_eager = f"there are no graphs on {device.type}" if self._graphs is None else None
        if not shapes.captures:
            self.why_eager = "capturing was turned off"

    @property
    def num_captured(self) -> int:
        return sum(prepared.is_captured for prepared in self._prepared.values())

    @property
    def most_bytes(self) -> int:
        """Size of the outputs of captured graphs in bytes; 0 if nothing is captured."""
        return 0 if self.why_eager is not None else rounded(self.shapes.max_rows) * self._row_bytes

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Known shapes, in the order of their first use."""
        return tuple(self._prepared)

    def fits(self, rows: int, *, tentative: int, deepest: int) -> bool:
        """Return whether a pass can be static, with at most so many tentative nodes and levels of a slot."""
        most_cells = MAX_CELLS if self._has_kernel else MAX_COPIED
        return (
            rows <= self.shapes.max_rows
            and tentative <= self.shapes.max_nodes
            and rounded(max(rows, self._min_rows)) * self._memory.length <= most_cells
            # only exact passes hide nodes from later ones of their branch
            and (self._window is None or deepest <= self._window or self.shapes.exact)
        )

    def run(
        self,
        kind: Hashable,
        jobs: Sequence[Rows],
        *,
        requested: Sequence[int],
        floats: Tensor | None = None,
        extra: np.ndarray | None = None,
    ) -> tuple[Outputs, Tensor] | None:
        """Run one pass; None if it must be dynamic.

        Returns outputs, each of shape (rows, …) and valid until the next pass, and the requested rows on the device.

        `extra`: further integers, of one number for each kind, of passes that are known to fit.
        """
        count = sum(len(job.nodes) for job in jobs)
        tentative = max(job.slot.num_tentative for job in jobs)
        deepest = max(max(job.slot.depths, default=0) for job in jobs)
        if extra is None and not self.fits(count, tentative=tentative, deepest=deepest):
            return None
        rows, words = rounded(max(count, self._min_rows)), rounded(-(-tentative // WORD_BITS))
        bucket = Bucket(rows, words, kind, 0 if extra is None else len(extra))
        if self._version != self._memory.version:
            self.drop()  # graphs contain addresses of freed memory
            self._version = self._memory.version
        prepared = self._prepared.get(bucket)
        if prepared is None:
            prepared = self._prepared[bucket] = self._prepare(bucket, floats)
        packed = self._packed(bucket, jobs, requested)
        if extra is not None:
            inputs_of(packed, bucket).extra[:] = extra
        fill(prepared.integers, packed)
        if floats is not None:
            assert prepared.floats is not None, "every pass of a kind has computed inputs"
            prepared.floats[:count] = floats
        if self._graphs is not None and self.why_eager is None and not prepared.is_captured:
            self._capture(bucket, prepared, self._graphs)
        outputs = tuple(output[:count] for output in prepared.run())
        return outputs, inputs_of(prepared.integers, bucket).requested[: len(requested)]

    def attention(self, jobs: Sequence[Rows]) -> StaticAttention:
        """Return the attention of a pass of any shape."""
        tentative = max(job.slot.num_tentative for job in jobs)
        bucket = Bucket(sum(len(job.nodes) for job in jobs), -(-tentative // WORD_BITS), None)
        return self._attention(inputs_of(to_device(self._packed(bucket, jobs, ()), self._device), bucket))

    def _attention(self, inputs: Inputs[Tensor]) -> StaticAttention:
        return StaticAttention(self._memory, inputs, has_kernel=self._has_kernel, is_exact=self.shapes.exact)

    def _packed(self, bucket: Bucket, jobs: Sequence[Rows], requested: Sequence[int]) -> np.ndarray:
        return pack_inputs(
            bucket,
            jobs,
            requested=requested,
            scratch=self._memory.length,
            per_tile=self.per_tile,
            has_chains=self.shapes.exact,
        )

    def drop(self) -> None:
        self._prepared.clear()

    def _prepare(self, bucket: Bucket, floats: Tensor | None) -> Prepared:
        integers = torch.zeros(inputs_size(bucket), dtype=torch.int64, device=self._device)
        float_inputs = None if floats is None else floats.new_zeros(bucket.rows, *floats.shape[1:])
        inputs = inputs_of(integers, bucket)

        def work() -> Outputs:
            return self._forward(inputs, self._attention(inputs), float_inputs, bucket.kind)

        return Prepared(integers, float_inputs, work)

    def _capture(self, bucket: Bucket, prepared: Prepared, graphs: Graphs) -> None:
        work = prepared.run
        outputs: list[Tensor] = []

        def writing() -> None:
            outputs.clear()
            for place, made in enumerate(work()):
                key = (place, made.shape[1:], made.dtype)
                if key not in self._outputs:
                    most = max(rounded(self.shapes.max_rows), bucket.rows)
                    self._outputs[key] = made.new_zeros(most, *made.shape[1:])
                self._outputs[key][: len(made)] = made
                outputs.append(self._outputs[key][: len(made)])

        try:
            replay = graphs.capture(writing)
        except CaptureError as error:
            if "out of memory" in str(error).lower():
                logger.warning("no memory for a graph of %d rows: this pass runs operator by operator", bucket.rows)
                return
            self.why_eager = f"a pass could not be captured: {error}"
            logger.warning("passes run operator by operator from now on, since %s", self.why_eager)
            return

        def replayed() -> Outputs:
            replay()
            return tuple(outputs)

        prepared.run = replayed
        prepared.is_captured = True
        logger.info("captured a graph of %s", bucket)
