"""Passes of fixed shapes: inputs are copied into static buffers, and the same kernels run in the same order.

On a card a shape that comes back is captured as a CUDA graph; on a CPU, and where a model does what a graph cannot
hold, the same work runs operator by operator. So does a shape for which there is no room: a captured one is given up
for it only once in a while, since a capture costs more than the passes that it would save.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftree.core.transfer import to_device
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
    """One shape, ready to run.

    Attributes:
        buffer: the integers of a pass, at a fixed address.
        run: the pass; its logits lie where the next pass writes.
        uses: passes so far.
        is_captured: whether `run` replays a graph.
        num_bytes: of the logits that the graph keeps.
    """

    buffer: Tensor
    run: Callable[[], Tensor]
    uses: int = 0
    is_captured: bool = False
    num_bytes: int = 0


class StaticPasses:
    """Runs passes in a few shapes. Mutates the memory of slots.

    Args:
        forward: the whole model.
        memory: of keys and values, with a place behind each slot's that is never read.
        device: of both.
        shapes: which there are.
        min_rows: rows of a pass at least.
        row_bytes: of the logits of one row.
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
        assert memory.num_scratch, "padding rows need a place to write to"
        self._forward = forward
        self._memory = memory
        self._device = device
        self.shapes = shapes
        self._min_rows = min_rows
        self._row_bytes = row_bytes
        self._num_passes = 0
        self._last_exchange = 0
        """The pass in which a captured shape was given up for another one."""
        self._prepared: OrderedDict[Bucket, Prepared] = OrderedDict()
        self._version = memory.version
        self._graphs: Graphs | None = graphs_of(device) if shapes.captures else None
        self.why_eager = _why_eager(device, shapes, self._graphs)

    @property
    def num_captured(self) -> int:
        """Graphs that are held."""
        return sum(prepared.is_captured for prepared in self._prepared.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of logits that captured graphs keep now."""
        return sum(prepared.num_bytes for prepared in self._prepared.values())

    @property
    def most_bytes(self) -> int:
        """Bytes of logits that captured graphs keep at most; 0 where nothing is captured."""
        if self.why_eager is not None:
            return 0
        return min(self.shapes.max_graph_bytes, self.shapes.max_graphs * self.shapes.max_cells * self._row_bytes)

    @property
    def num_warm_ups(self) -> int:
        """Passes of a shape before one takes as long as all later ones: operator by operator, then the capture."""
        return self.shapes.eager_uses + (self.why_eager is None)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Shapes that are held, the one that was used last at the end."""
        return tuple(self._prepared)

    def bucket(self, slots: Sequence[KVSlot], nodes: Sequence[Sequence[int]]) -> Bucket | None:
        """The shape of a pass over these tentative nodes; None if it must run as a dynamic one."""
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
        asked: Sequence[int],
    ) -> Tensor:
        """One pass.

        Args:
            bucket: its shape.
            slots: a slot a job.
            tokens: of each job.
            nodes: the tentative nodes that they are.
            asked: rows whose logits are wanted; rows stand job after job.

        Returns:
            Their logits, shape (asked rows, vocab), in memory of their own.
        """
        prepared = self._ready(bucket)
        packed = pack_inputs(bucket, slots, tokens, nodes, asked=asked, scratch=self._memory.length)
        prepared.buffer.copy_(to_device(packed, self._device))
        if self._graphs is not None and not prepared.is_captured and prepared.uses >= self.shapes.eager_uses:
            self._capture(bucket, prepared, self._graphs)
        prepared.uses += 1
        self._num_passes += 1
        rows = inputs_of(prepared.buffer, bucket).asked[: len(asked)]
        return prepared.run().index_select(0, rows)

    def drop(self) -> None:
        """Forget all shapes."""
        self._prepared.clear()

    def _ready(self, bucket: Bucket) -> Prepared:
        if self._version != self._memory.version:
            self.drop()  # graphs hold addresses of memory that is gone
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
        """Whether one more graph may be kept; gives up those that were used least recently, but not in every pass."""
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
