"""Forward passes of fixed shapes over slots, which a CUDA graph can replay."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from draftree.core.errors import ConfigurationError
from draftree.core.tensors import to_device
from draftree.core.tree import ancestor_bits
from draftree.models.kv.slots import KVMemory, KVSlot
from draftree.models.torch.attention import LayerCall, additive, announced, attend

WORD_BITS = 64  # number of tentative nodes per integer of visibility bits


@dataclass(frozen=True, slots=True)
class Shapes:
    # maximum number of new and of tentative tokens of a slot in a static pass; other passes, such as prompt chunks,
    # are dynamic
    max_nodes: int = 64
    max_cells: int = 4096  # maximum of slots times nodes
    shortest: int = 128  # minimum number of keys that attention reads
    max_graphs: int = 64  # maximum number of captured shapes, and of other shapes that are tracked
    max_graph_bytes: int = 1 << 30  # maximum bytes of logits of captured graphs
    # minimum number of passes between evictions of a captured shape; limits the share of time spent on captures if
    # more shapes alternate than fit
    passes_per_exchange: int = 64
    eager_uses: int = 1  # passes of a shape that run operator by operator before it is captured
    captures: bool = True  # whether shapes are captured if the device supports it

    def __post_init__(self) -> None:
        sizes = ("max_nodes", "max_cells", "shortest", "max_graphs", "max_graph_bytes", "passes_per_exchange")
        for name in (*sizes, "eager_uses"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} of static shapes is {getattr(self, name)}: it must be at least 1")


@dataclass(frozen=True, slots=True)
class Bucket:
    """The shape of a pass.

    The rows of all jobs form one dimension, which is rounded up, so linear layers have little padding. Attention
    runs over a rectangle of cells: a range of neighbouring slots, an equal number of nodes for each, and a rounded
    number of keys.
    """

    first_slot: int  # first slot of the range
    num_slots: int  # number of slots in the range, with or without a job
    nodes: int  # number of cells per slot
    rows: int
    length: int  # number of keys per cell
    words: int  # number of integers of a cell's visibility bits

    @property
    def tree_size(self) -> int:
        return self.words * WORD_BITS


def rounded(count: int) -> int:
    """Round up to 1, 2, 4, 8, 16, 32, 48, 64, 96, 128, …: powers of two, with midpoints from 32 on."""
    power = 1
    while power < count:
        power *= 2
    middle = power * 3 // 4
    return middle if power > 32 and middle >= count else power


def slot_range(indices: Sequence[int]) -> tuple[int, int]:
    """Return first slot and size of the smallest aligned range, of a power of two, that contains these slots."""
    low = min(indices)
    high = max(indices)
    size = 1
    while low // size != high // size:
        size *= 2
    return low // size * size, size


def bucket_of(
    slots: Sequence[KVSlot], counts: Sequence[int], *, shapes: Shapes, num_slots: int, length: int, min_rows: int
) -> Bucket | None:
    """Return the shape of a pass; None if it exceeds the limits."""
    tentative = max(slot.num_tentative for slot in slots)
    if max(*counts, tentative) > shapes.max_nodes:
        return None
    first, size = slot_range([slot.index for slot in slots])
    keys = max(slot.length + slot.num_tentative for slot in slots)
    found = Bucket(
        first_slot=first,
        num_slots=min(size, num_slots - first),
        nodes=rounded(max(counts)),
        rows=rounded(max(sum(counts), min_rows)),
        length=min(rounded(max(keys, shapes.shortest)), length),
        words=rounded(-(-tentative // WORD_BITS)),
    )
    return found if found.num_slots * found.nodes <= shapes.max_cells else None


Array = TypeVar("Array", np.ndarray, Tensor)


@dataclass(frozen=True, slots=True)
class Inputs(Generic[Array]):
    tokens: Array  # token of each row; 0 for padding
    positions: Array  # position of each row
    slots: Array  # slot of each row's keys; for padding the first slot of the range
    places: Array  # index of each row's keys in its slot; for padding the scratch index after all others
    cell_of_row: Array  # cell in which each row attends; for padding the cell of the first row
    requested: Array  # rows whose logits are requested, then zeros
    row_of_cell: Array  # row whose query each cell has, shape (slots, nodes); the first row for empty cells
    prefixes: Array  # committed tokens of each slot, 0 without a job
    cell_positions: Array  # position of each cell, shape (slots, nodes)
    tree_positions: Array  # positions of each slot's tentative nodes, shape (slots, tree size)
    seen: Array  # bits of the tentative nodes that are visible to each cell, shape (slots, nodes, words); at least one


def inputs_size(bucket: Bucket) -> int:
    return sum(int(np.prod(shape)) for shape in _shapes(bucket))


def inputs_of(array: Array, bucket: Bucket) -> Inputs[Array]:
    views, start = [], 0
    for shape in _shapes(bucket):
        end = start + int(np.prod(shape))
        views.append(array[start:end].reshape(shape))
        start = end
    return Inputs(*views)


def _shapes(bucket: Bucket) -> list[tuple[int, ...]]:
    cells = (bucket.num_slots, bucket.nodes)
    trees = (bucket.num_slots, bucket.tree_size)
    return [*[(bucket.rows,)] * 6, cells, (bucket.num_slots,), cells, trees, (*cells, bucket.words)]


def pack_inputs(
    bucket: Bucket,
    slots: Sequence[KVSlot],
    tokens: Sequence[Sequence[int]],
    nodes: Sequence[Sequence[int]],
    *,
    requested: Sequence[int],
    scratch: int,
) -> np.ndarray:
    """Return the integers of one pass; `scratch` is an index that is never read."""
    array = np.zeros(inputs_size(bucket), dtype=np.int64)
    into = inputs_of(array, bucket)
    into.slots[:] = bucket.first_slot
    into.places[:] = scratch
    into.requested[: len(requested)] = requested
    into.seen[:, :, 0] = 1  # softmax over no visible key gives NaN
    row = 0
    for slot, own_tokens, own in zip(slots, tokens, nodes, strict=True):
        line = slot.index - bucket.first_slot
        count = len(own)
        chosen = list(own)
        rows = slice(row, row + count)
        positions = np.array(slot.depths) + (slot.length - 1)
        into.tokens[rows] = own_tokens
        into.positions[rows] = into.cell_positions[line, :count] = positions[chosen]
        into.slots[rows] = slot.index
        into.places[rows] = np.array(chosen) + slot.length
        into.cell_of_row[rows] = np.arange(count) + line * bucket.nodes
        into.row_of_cell[line, :count] = np.arange(row, row + count)
        into.prefixes[line] = slot.length
        into.tree_positions[line, : len(positions)] = positions
        bits = ancestor_bits(slot.parents, num_bytes=bucket.words * WORD_BITS // 8)
        into.seen[line, :count] = bits.view("<i8")[chosen]
        row += count
    into.cell_of_row[row:] = into.cell_of_row[0]
    return array


class StaticAttention:
    """Handler of the attention calls of one static pass.

    Keys and values are written by index and read in place, as a slice of slots and positions; a mask hides
    invisible keys. Nothing depends on a value, so nothing waits for the device.
    """

    def __init__(self, memory: KVMemory, bucket: Bucket, inputs: Inputs[Tensor]) -> None:
        self._memory = memory
        self._bucket = bucket
        self._inputs = inputs
        self._masks: dict[tuple[int | None, int, torch.dtype], Tensor] = {}

    def note_mask(self, window: int | None) -> None:
        """Do nothing: each call has its window."""

    def attend(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        bucket, inputs = self._bucket, self._inputs
        keys, values = self._memory.keys[call.layer], self._memory.values[call.layer]
        keys[inputs.slots, :, inputs.places] = key[0].transpose(0, 1)
        values[inputs.slots, :, inputs.places] = value[0].transpose(0, 1)
        line = slice(bucket.first_slot, bucket.first_slot + bucket.num_slots)
        cells = query[0].index_select(1, inputs.row_of_cell.flatten())
        cells = cells.unflatten(1, (bucket.num_slots, bucket.nodes)).transpose(0, 1)
        mask = self._mask(call.window, query.shape[1] // keys.shape[1], query.dtype)
        mixed = attend(cells, keys[line, :, : bucket.length], values[line, :, : bucket.length], call=call, mask=mask)
        return mixed.transpose(1, 2).flatten(0, 1).index_select(0, inputs.cell_of_row).unsqueeze(0)

    def _mask(self, window: int | None, group: int, dtype: torch.dtype) -> Tensor:
        """Return the additive mask of shape (slots, 1, group * nodes, length), built once per pass and window."""
        key = (window, group, dtype)
        if key not in self._masks:
            self._masks[key] = additive(self._visible(window), dtype).repeat(1, group, 1).unsqueeze(1)
        return self._masks[key]

    def _visible(self, window: int | None) -> Tensor:
        """Return which keys are visible to each cell, bool of shape (slots, nodes, length): prefix and ancestors."""
        inputs, bucket = self._inputs, self._bucket
        place = torch.arange(bucket.length, device=inputs.prefixes.device)
        offset = place - inputs.prefixes[:, None]
        node = offset.clamp(0, bucket.tree_size - 1)
        word = (node // WORD_BITS)[:, None, :].expand(-1, bucket.nodes, -1)
        bits = inputs.seen if bucket.words == 1 else inputs.seen.gather(2, word)
        is_ancestor = ((bits >> (node % WORD_BITS)[:, None, :]) & 1).bool() & (offset < bucket.tree_size)[:, None, :]
        visible = (offset < 0)[:, None, :] | is_ancestor
        if window is None:
            return visible
        # windows go by depth: siblings share a position
        position = torch.where(offset < 0, place, inputs.tree_positions.gather(1, node))
        return visible & (inputs.cell_positions[:, :, None] - position[:, None, :] < window)


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


@dataclass(frozen=True, slots=True)
class Captured:
    # runs the graph on the current stream; returns the same tensor each time, with new values
    replay: Callable[[], Tensor]
    num_bytes: int  # size of that tensor, which occupies the pool while the graph is kept


class Graphs:
    """Graphs of one model, with their pool and the stream on which they are recorded.

    Every model has its own memory pool. Graphs of one pool may share addresses of intermediate results, which is
    safe only if they are replayed one after another on one stream. This holds for the passes of one model, not for
    those of a target and its drafter. Never timed on a GPU.
    """

    def __init__(self, api: Any) -> None:
        self._api = api
        self._pool: Any = None
        self._side: Any = None

    def capture(self, work: Callable[[], Tensor]) -> Captured:
        """Run the work once on a side stream, then record it there."""
        api = self._api
        with api.on_device():
            if self._side is None:
                self._pool, self._side = api.new_pool(), api.new_stream()
            side, before = self._side, api.current_stream()
            graph = api.new_graph()
            try:
                api.wait(side, before)
                with api.on_stream(side):
                    work()
                api.wait(before, side)
                with api.recording(graph, pool=self._pool, stream=side):
                    output = work()
            except Exception as error:  # torch and its libraries raise many types
                raise CaptureError(str(error).strip().split("\n")[0] or type(error).__name__) from error
            finally:
                api.set_stream(before)  # a failed capture leaves its own stream current

        def replay() -> Tensor:
            graph.replay()
            return output

        return Captured(replay, output.nbytes)


def graphs_of(device: torch.device) -> Graphs | None:
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return Graphs(CudaApi(device))


logger = logging.getLogger(__name__)

Forward = Callable[[Tensor, Tensor], Tensor]  # tokens and positions, both (1, rows), to logits (rows, vocab)


@dataclass(slots=True)
class Prepared:
    buffer: Tensor  # integers of a pass, at a fixed address
    run: Callable[[], Tensor]  # the pass; its logits are overwritten by the next pass
    uses: int = 0  # number of passes so far
    is_captured: bool = False  # whether `run` replays a graph
    num_bytes: int = 0  # size of the graph's logits


class StaticPasses:
    """Passes of static shapes.

    Mutates the memory of slots. On a GPU a repeated shape is captured as a CUDA graph. On a CPU, with models that
    graphs do not support, and for shapes without room, the same work runs operator by operator. A captured shape is
    evicted for another one only rarely, because a capture costs more than a few passes.
    """

    def __init__(
        self,
        forward: Forward,
        memory: KVMemory,
        *,
        device: torch.device,
        shapes: Shapes,
        min_rows: int,
        row_bytes: int,
    ) -> None:
        assert memory.num_scratch, "padding rows need a scratch index"
        self._forward = forward
        self._memory = memory
        self._device = device
        self.shapes = shapes
        self._min_rows = min_rows
        self._row_bytes = row_bytes
        self._num_passes = 0
        self._last_exchange = 0  # number of the pass in which a captured shape was last evicted
        self._prepared: OrderedDict[Bucket, Prepared] = OrderedDict()
        self._version = memory.version
        self._graphs: Graphs | None = graphs_of(device) if shapes.captures else None
        self.why_eager = f"there are no graphs on {device.type}" if self._graphs is None else None
        if not shapes.captures:
            self.why_eager = "capturing was turned off"

    @property
    def num_captured(self) -> int:
        return sum(prepared.is_captured for prepared in self._prepared.values())

    @property
    def num_bytes(self) -> int:
        return sum(prepared.num_bytes for prepared in self._prepared.values())

    @property
    def most_bytes(self) -> int:
        """Maximum size of the logits of captured graphs in bytes; 0 if nothing is captured."""
        if self.why_eager is not None:
            return 0
        return min(self.shapes.max_graph_bytes, self.shapes.max_graphs * self.shapes.max_cells * self._row_bytes)

    @property
    def num_warm_ups(self) -> int:
        """Number of slower first passes of a shape: operator by operator, then the capture."""
        return self.shapes.eager_uses + (self.why_eager is None)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Known shapes, least recently used first."""
        return tuple(self._prepared)

    def bucket(self, slots: Sequence[KVSlot], nodes: Sequence[Sequence[int]]) -> Bucket | None:
        """Return the shape of a pass over these tentative nodes; None if it must be dynamic."""
        return bucket_of(
            slots,
            list(map(len, nodes)),
            shapes=self.shapes,
            num_slots=self._memory.num_slots,
            length=self._memory.length,
            min_rows=self._min_rows,
        )

    def run(
        self,
        bucket: Bucket,
        slots: Sequence[KVSlot],
        *,
        tokens: Sequence[Sequence[int]],
        nodes: Sequence[Sequence[int]],
        requested: Sequence[int],
    ) -> Tensor:
        """Run one pass; returns logits of the requested rows, shape (rows, vocab), in new memory."""
        prepared = self._ready(bucket)
        packed = pack_inputs(bucket, slots, tokens, nodes, requested=requested, scratch=self._memory.length)
        prepared.buffer.copy_(to_device(packed, self._device))
        if self._graphs is not None and not prepared.is_captured and prepared.uses >= self.shapes.eager_uses:
            self._capture(bucket, prepared, self._graphs)
        prepared.uses += 1
        self._num_passes += 1
        rows = inputs_of(prepared.buffer, bucket).requested[: len(requested)]
        return prepared.run().index_select(0, rows)

    def drop(self) -> None:
        self._prepared.clear()

    def _ready(self, bucket: Bucket) -> Prepared:
        if self._version != self._memory.version:
            self.drop()  # graphs contain addresses of freed memory
            self._version = self._memory.version
        if bucket not in self._prepared:
            waiting = [known for known, prepared in self._prepared.items() if not prepared.is_captured]
            for known in waiting[: max(0, len(waiting) + 1 - self.shapes.max_graphs)]:
                del self._prepared[known]
            self._prepared[bucket] = self._prepare(bucket)
        self._prepared.move_to_end(bucket)
        return self._prepared[bucket]

    def _prepare(self, bucket: Bucket) -> Prepared:
        buffer = torch.zeros(inputs_size(bucket), dtype=torch.int64, device=self._device)
        inputs = inputs_of(buffer, bucket)

        def work() -> Tensor:
            with announced(StaticAttention(self._memory, bucket, inputs)):
                return self._forward(inputs.tokens.unsqueeze(0), inputs.positions.unsqueeze(0))

        return Prepared(buffer, work)

    def _capture(self, bucket: Bucket, prepared: Prepared, graphs: Graphs) -> None:
        if self.why_eager is not None or not self._make_room(bucket.rows * self._row_bytes):
            return
        try:
            captured = graphs.capture(prepared.run)
        except CaptureError as error:
            self.why_eager = f"a pass could not be captured: {error}"
            logger.warning("passes run operator by operator from now on, since %s", self.why_eager)
            return
        prepared.run = captured.replay
        prepared.num_bytes = captured.num_bytes
        prepared.is_captured = True
        logger.info("captured a graph of %s", bucket)

    def _make_room(self, num_bytes: int) -> bool:
        """Return whether one more graph may be kept; evicts the least recently used ones, but rarely."""
        shapes = self.shapes
        if num_bytes > shapes.max_graph_bytes:
            return False
        captured = [(bucket, prepared) for bucket, prepared in self._prepared.items() if prepared.is_captured]
        free_bytes = shapes.max_graph_bytes - sum(prepared.num_bytes for _, prepared in captured)
        if len(captured) < shapes.max_graphs and num_bytes <= free_bytes:
            return True
        if self._num_passes - self._last_exchange < shapes.passes_per_exchange:
            return False
        self._last_exchange = self._num_passes
        count = len(captured)
        for bucket, prepared in captured:
            if count < shapes.max_graphs and num_bytes <= free_bytes:
                break
            del self._prepared[bucket]
            count, free_bytes = count - 1, free_bytes + prepared.num_bytes
        return True
