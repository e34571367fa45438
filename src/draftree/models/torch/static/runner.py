"""Passes of fixed shapes: inputs are copied into static buffers, and the same kernels run in the same order.

On a GPU a repeated shape is captured as a CUDA graph. On a CPU, with models that graphs do not support, and for shapes
without room, the same work runs operator by operator. A captured shape is evicted for another one only rarely, because
a capture costs more than a few passes.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftree.core.tensors import to_device
from draftree.models.kv.slots import KVMemory, KVSlot
from draftree.models.torch.attention import announced
from draftree.models.torch.static.attention import StaticAttention
from draftree.models.torch.static.buckets import Bucket, Shapes, bucket_of
from draftree.models.torch.static.graphs import CaptureError, Graphs, graphs_of
from draftree.models.torch.static.inputs import inputs_of, inputs_size, pack_inputs

logger = logging.getLogger(__name__)

Forward = Callable[[Tensor, Tensor], Tensor]
"""Tokens and positions, both (1, rows), to logits (rows, vocab)."""


@dataclass(slots=True)
class Prepared:
    """Static buffer and pass of one shape.

    Attributes:
        buffer: integers of a pass, at a fixed address.
        run: the pass; its logits are overwritten by the next pass.
        uses: number of passes so far.
        is_captured: whether `run` replays a graph.
        num_bytes: size of the graph's logits.
    """

    buffer: Tensor
    run: Callable[[], Tensor]
    uses: int = 0
    is_captured: bool = False
    num_bytes: int = 0


class StaticPasses:
    """Passes of static shapes. Mutates the memory of slots.

    Args:
        forward: forward pass of the whole model.
        memory: keys and values, with an index after each slot's end that is never read.
        device: device of both.
        shapes: limits of shapes.
        min_rows: minimum number of rows.
        row_bytes: size of the logits of one row.
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
        self._last_exchange = 0
        """Number of the pass in which a captured shape was last evicted."""
        self._prepared: OrderedDict[Bucket, Prepared] = OrderedDict()
        self._version = memory.version
        self._graphs: Graphs | None = graphs_of(device) if shapes.captures else None
        self.why_eager = _why_eager(device, shapes, self._graphs)

    @property
    def num_captured(self) -> int:
        """Number of captured graphs."""
        return sum(prepared.is_captured for prepared in self._prepared.values())

    @property
    def num_bytes(self) -> int:
        """Size of the logits of captured graphs in bytes."""
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
        """Run one pass.

        Args:
            bucket: shape of the pass.
            slots: slot of each job.
            tokens: tokens of each job.
            nodes: tentative nodes of each job's tokens.
            requested: rows whose logits are requested; rows are in the order of the jobs.

        Returns:
            Logits of shape (requested rows, vocab), in new memory.
        """
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
        """Drop all shapes."""
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
        prepared.run, prepared.num_bytes, prepared.is_captured = captured.replay, captured.num_bytes, True
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


def _why_eager(device: torch.device, shapes: Shapes, graphs: Graphs | None) -> str | None:
    if not shapes.captures:
        return "capturing was turned off"
    return f"there are no graphs on {device.type}" if graphs is None else None
