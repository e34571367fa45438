"""Decoding of heads that draft level by level: slots with keys and values of rows, and batched passes over them.

The slots are those of models (`models/kv`): rows with the target's own hidden states become prefix, rows of drafted
nodes are tentative. A slot also keeps the state before every row of its prefix, so that a row can be run again with
another token where two texts part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from draftree.core.threads import single_threaded
from draftree.heads.passes import STATES, HeadPasses, RowJob, RowResult
from draftree.models.base import Commit, Extend
from draftree.models.kv.pool import SlotPool
from draftree.models.kv.slots import KVSlot, LayerShape
from draftree.models.memory import LOGIT_BYTES, Footprint
from draftree.sampling.logits import Logits
from draftree.sampling.tree_search import FoundTree, TreeSearch, TreeWidths


@final
class HeadDecoder:
    """Slots of a head, and passes over them. All methods run without gradients.

    Args:
        passes: passes of the head.
    """

    def __init__(self, passes: HeadPasses) -> None:
        self._passes = passes
        config = passes.head.config
        shape = LayerShape(config.num_kv_heads, config.head_dim, config.head_dim)
        shapes = {STATES: LayerShape(1, config.hidden, 0), **dict.fromkeys(range(config.num_layers), shape)}
        self.pool = SlotPool(shapes, dtype=passes.dtype, device=passes.device, leftovers=passes.leftovers)

    @property
    def footprint(self) -> Footprint:
        """Memory of weights, of a row in a slot, and of activations in bytes."""
        config = self._passes.head.config
        return Footprint(
            weights=self._passes.weight_bytes,
            token=self.pool.memory.token_bytes,
            logits=config.vocab_size * LOGIT_BYTES,
            row=(8 * config.hidden + 3 * config.intermediate) * self._passes.dtype.itemsize,
        )

    def project(self, features: Tensor) -> Tensor:
        """Return the states before the tokens that follow, shape (rows, hidden), from hidden states of the target."""
        return self._passes.project(features)

    def logits(self, states: Tensor) -> Logits:
        """Return logits of states, as wide as the target's vocabulary."""
        return self._passes.logits(states)

    def recycle(self, states: Tensor) -> Tensor:
        """Return the states before the children of rows."""
        return self._passes.recycle(states)

    def read(self, jobs: Sequence[RowJob]) -> RowResult:
        """Append rows with states from the target to prefixes.

        Args:
            jobs: one at most for each slot, without tentative rows; each row follows the one before.
        """
        found = self.extend(jobs)
        memory, row = self.pool.memory, 0
        with torch.inference_mode(), single_threaded():
            for job in jobs:
                slot, count = job.slot, len(job.tokens)
                memory.keys[STATES][slot.index, 0, slot.length : slot.length + count] = found.before[row : row + count]
                row += count
        self.pool.commit([Commit(job.slot, range(len(job.tokens))) for job in jobs])
        return found

    @property
    def most_children(self) -> int:
        """Maximum number of children of a node in `read_and_grow`; 0 if there is no `read_and_grow`."""
        return self._passes.most_children

    def read_and_grow(
        self, jobs: Sequence[RowJob], shape: TreeWidths, searches: Sequence[TreeSearch]
    ) -> list[FoundTree]:
        """Append rows as `read` does, and return trees after the last row of each job, whose rows are not kept."""
        slots = [job.slot for job in jobs]
        # rows of the trees need room: they are appended and dropped
        lengths = [len(job.tokens) + shape.sizes(search).read for job, search in zip(jobs, searches, strict=True)]
        self.pool.append(slots, [Extend(slot, (), range(-1, n - 1)) for slot, n in zip(slots, lengths, strict=True)])
        nodes = [range(len(job.tokens)) for job in jobs]
        found = self._passes.trees(self.pool.memory, slots, nodes, jobs, shape, searches)
        self.pool.commit([Commit(slot, rows) for slot, rows in zip(slots, nodes, strict=True)])
        return found

    def extend(self, jobs: Sequence[RowJob]) -> RowResult:
        """Append tentative rows."""
        slots = [job.slot for job in jobs]
        nodes = self.pool.append(slots, [Extend(job.slot, job.tokens, job.parents) for job in jobs])
        return self._passes.run(self.pool.memory, slots, nodes, jobs)

    def before(self, slot: KVSlot, row: int) -> Tensor:
        """Return the state before a row of a prefix, shape (1, hidden)."""
        return self.pool.memory.keys[STATES][slot.index, 0, row : row + 1].clone()
