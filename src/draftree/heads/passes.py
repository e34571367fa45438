"""Decoding with heads that draft level by level: forward passes over rows in slots, and their PyTorch implementation.

The slots are those of models (`models/kv`): rows with the target's own hidden states become prefix, rows of drafted
nodes are tentative. A slot also keeps the state before every row of its prefix, so that a row can be run again with
another token where two sequences part.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from draftree.core.host import single_threaded
from draftree.core.tensors import joined, rows_of, to_device
from draftree.heads.base import FeatureHead
from draftree.models.base import Commit, Extend
from draftree.models.kv.slots import KVMemory, KVSlot, LayerShape, Leftovers, SlotPool
from draftree.models.memory import LOGIT_BYTES, Footprint
from draftree.models.torch.attention import LayerCall, plan_pass
from draftree.models.torch.growth import Growth, TreeGrowth, found_trees, pack_wanted
from draftree.models.torch.static import Inputs, Outputs, Rows, Shapes, StaticAttention, StaticPasses
from draftree.sampling.logits import Logits, SubsetLogits, TensorLogits, TokenSubset
from draftree.sampling.tree_search import FoundTree, TreeSearch, TreeWidths

STATES = -1
"""Key of the states before the rows in the memory of the slots, beside the layers."""


@dataclass(frozen=True, slots=True)
class RowJob:
    """New rows of one sequence.

    Attributes:
        positions: positions of the tokens in the sequence.
        parents: for each row the tentative row that it follows, or -1 for the end of the prefix.
        before: states before the tokens, shape (rows, hidden), or hidden states of the target that are projected to
            them, shape (rows, layers, target hidden); of one kind in all jobs of a pass.
        logits_at: rows whose logits are computed, ascending.
    """

    slot: KVSlot
    tokens: Sequence[int]
    positions: Sequence[int]
    parents: Sequence[int]
    before: Tensor
    logits_at: Sequence[int] = ()

    @property
    def is_projected(self) -> bool:
        """Whether the states before the tokens are made from hidden states of the target."""
        return self.before.dim() == 3


@dataclass(frozen=True, slots=True, eq=False)
class RowResult:
    """Result of a pass, rows in the order of the jobs.

    Attributes:
        before: states before the tokens, shape (rows, hidden).
        states: states of the rows, shape (rows, hidden).
        requested: rows whose logits were requested, counted over all jobs.
    """

    before: Tensor
    states: Tensor
    requested: Sequence[int]
    logits: Logits


class HeadPasses(ABC):
    """Slots of a head that is bound to its target, and forward passes over them, without gradients.

    `tokens` is the draft vocabulary as columns of the logits; None if it has all tokens. `leftovers` is what passes
    read at positions whose keys and values are not kept.
    """

    def __init__(self, head: FeatureHead, device: torch.device, leftovers: Leftovers, *, num_scratch: int = 0) -> None:
        self.head = head
        self.device = device
        self.dtype = next(head.parameters()).dtype
        vocabulary = head.vocabulary
        config = head.config
        self.tokens = None if vocabulary.is_full else TokenSubset(vocabulary.ids, vocabulary.vocab_size)
        shape = LayerShape(config.num_kv_heads, config.head_dim, config.head_dim)
        shapes = {STATES: LayerShape(1, config.hidden, 0), **dict.fromkeys(range(config.num_layers), shape)}
        self.pool = SlotPool(shapes, dtype=self.dtype, device=device, leftovers=leftovers, num_scratch=num_scratch)

    @property
    def weight_bytes(self) -> int:
        """Size of all weights of its own in bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.head.state_dict().values())

    @property
    def footprint(self) -> Footprint:
        """Memory of weights, of a row in a slot, and of activations in bytes."""
        config = self.head.config
        return Footprint(
            weights=self.weight_bytes,
            token=self.pool.memory.token_bytes,
            logits=config.vocab_size * LOGIT_BYTES,
            row=(8 * config.hidden + 3 * config.intermediate) * self.dtype.itemsize,
        )

    @abstractmethod
    def project(self, features: Tensor) -> Tensor:
        """Return the states before the tokens that follow, shape (rows, hidden), from hidden states of the target."""

    @abstractmethod
    def recycle(self, states: Tensor) -> Tensor:
        """Return the states before the children of rows, from the states of the rows."""

    @abstractmethod
    def run(self, slots: Sequence[KVSlot], nodes: Sequence[Sequence[int]], jobs: Sequence[RowJob]) -> RowResult:
        """Run a pass over new rows; their keys and values are stored.

        Args:
            nodes: for each job the tentative rows that are read.
            jobs: the rows, at least one.
        """

    def grows(self, counts: Sequence[int], shape: TreeWidths, searches: Sequence[TreeSearch]) -> bool:
        """Return whether `trees` grows such trees after so many new rows of each sequence."""
        return False

    def trees(
        self,
        slots: Sequence[KVSlot],
        nodes: Sequence[Sequence[int]],
        jobs: Sequence[RowJob],
        shape: TreeWidths,
        searches: Sequence[TreeSearch],
    ) -> list[FoundTree]:
        """Run a pass over new rows, and grow a tree after the last row of each job.

        Keys, values and states before the rows are stored. The memory has room for the nodes that are read
        (`TreeWidths.sizes`) after the rows of each slot.

        Args:
            jobs: the rows, with logits at the last one only.
            shape: shape of the trees.
            searches: of each tree.

        Returns:
            The trees; a node whose share is NaN or minus infinity is left out.
        """
        raise NotImplementedError("trees grow level by level")

    def read(self, jobs: Sequence[RowJob]) -> RowResult:
        """Append rows with states from the target to prefixes, at most one job for each slot without tentative rows."""
        result = self.extend(jobs)
        states = self.pool.memory.keys[STATES]
        row = 0
        with torch.inference_mode(), single_threaded():
            for job in jobs:
                slot = job.slot
                count = len(job.tokens)
                states[slot.index, 0, slot.length : slot.length + count] = result.before[row : row + count]
                row += count
        self.pool.commit([Commit(job.slot, range(len(job.tokens))) for job in jobs])
        return result

    def read_and_grow(
        self, jobs: Sequence[RowJob], shape: TreeWidths, searches: Sequence[TreeSearch]
    ) -> list[FoundTree]:
        """Append rows as `read` does, and return trees after the last row of each job, whose rows are not kept."""
        slots = [job.slot for job in jobs]
        # rows of the trees need room: they are appended and dropped
        lengths = [len(job.tokens) + shape.sizes(search).read for job, search in zip(jobs, searches, strict=True)]
        self.pool.append(slots, [Extend(slot, (), range(-1, n - 1)) for slot, n in zip(slots, lengths, strict=True)])
        nodes = [range(len(job.tokens)) for job in jobs]
        trees = self.trees(slots, nodes, jobs, shape, searches)
        self.pool.commit([Commit(slot, rows) for slot, rows in zip(slots, nodes, strict=True)])
        return trees

    def extend(self, jobs: Sequence[RowJob]) -> RowResult:
        """Append tentative rows."""
        slots = [job.slot for job in jobs]
        nodes = self.pool.append(slots, [Extend(job.slot, job.tokens, job.parents) for job in jobs])
        return self.run(slots, nodes, jobs)

    def before(self, slot: KVSlot, row: int) -> Tensor:
        """Return the state before a row of a prefix, shape (1, hidden)."""
        return self.pool.memory.keys[STATES][slot.index, 0, row : row + 1].clone()


def requested_rows(jobs: Sequence[RowJob]) -> list[int]:
    """Return the rows whose logits are requested, counted over all jobs."""
    rows = []
    first = 0
    for job in jobs:
        rows += [first + row for row in job.logits_at]
        first += len(job.tokens)
    return rows


def joined_before(jobs: Sequence[RowJob]) -> Tensor:
    """Return what is before the rows of all jobs."""
    assert len({job.is_projected for job in jobs}) == 1, "the jobs of a pass are of one kind"
    return joined([job.before for job in jobs])


@final
class TorchPasses(HeadPasses):
    """Passes that call the head's module.

    `shapes`: limits of static passes, as CUDA graphs if the device has them; None for dynamic passes only.
    """

    def __init__(self, head: FeatureHead, device: torch.device, shapes: Shapes | None = None) -> None:
        super().__init__(head, device, Leftovers.MASKED, num_scratch=0 if shapes is None else 1)
        self._scaling = head.config.head_dim**-0.5
        self._growths: dict[Growth, TreeGrowth] = {}
        self.static = None
        if shapes is not None:
            self.static = StaticPasses(
                self._static_forward,
                self.pool.memory,
                device=device,
                shapes=shapes,
                min_rows=1,
                row_bytes=head.config.draft_vocab_size * LOGIT_BYTES,
                group=head.config.num_heads // head.config.num_kv_heads,
                window=head.window,
            )

    @property
    def footprint(self) -> Footprint:
        footprint = super().footprint
        return footprint if self.static is None else replace(footprint, graphs=self.static.most_bytes)

    def _static_forward(
        self,
        inputs: Inputs[Tensor],
        attention: StaticAttention,
        joined: Tensor | None,
        kind: tuple[bool, Growth | None],
    ) -> Outputs:
        is_projected, growth = kind
        assert joined is not None, "a row has something before it"
        before = self.head.project(joined) if is_projected else joined
        if growth is None:
            states = self._states(inputs, attention, before)
            # logits of all rows, requested ones first
            return before, states, self.head.logits(states.index_select(0, inputs.requested))

        def read(rows: Inputs[Tensor], before: Tensor | None) -> tuple[Tensor, Tensor]:
            assert before is not None, "a head has states"
            states = self._states(rows, attention.over(rows), before).index_select(0, rows.requested)
            return self.head.logits(states), self.head.recycle(states)

        memory = self.pool.memory
        memory.keys[STATES][inputs.slots, 0, inputs.places] = before
        roots = replace(inputs, requested=inputs.requested[: growth.trees])
        logits, recycled = read(roots, before)
        trees = self._growths[growth]
        return (trees.grow(inputs, logits, recycled, read=read, scratch=memory.length),)

    def _states(self, inputs: Inputs[Tensor], attention: StaticAttention, before: Tensor) -> Tensor:
        return self.head.run(inputs.tokens, before, inputs.positions, CallRows(attention.attend_rows, self.head))

    @torch.inference_mode()
    def project(self, features: Tensor) -> Tensor:
        return self.head.project(features.to(self.device))

    @torch.inference_mode()
    def recycle(self, states: Tensor) -> Tensor:
        return self.head.recycle(states)

    @torch.inference_mode()
    def run(self, slots: Sequence[KVSlot], nodes: Sequence[Sequence[int]], jobs: Sequence[RowJob]) -> RowResult:
        joined = joined_before(jobs)
        if self.static is not None:
            rows = [
                Rows(slot, job.tokens, slot_nodes, job.positions)
                for slot, slot_nodes, job in zip(slots, nodes, jobs, strict=True)
            ]
            kind = (jobs[0].is_projected, None)
            result = self.static.run(kind, rows, requested=requested_rows(jobs), floats=joined.to(self.device))
            if result is not None:
                return self._copied(jobs, *result[0])
        before = self.project(joined) if jobs[0].is_projected else joined
        starts = [0, *accumulate(len(job.tokens) for job in jobs)]
        order = sorted(range(len(jobs)), key=lambda index: slots[index].index)
        ordered = [jobs[index] for index in order]
        tokens = to_device([token for job in ordered for token in job.tokens], self.device)
        positions = to_device([position for job in ordered for position in job.positions], self.device)
        ordered_before = before if len(jobs) == 1 else torch.cat([before[starts[i] : starts[i + 1]] for i in order])
        attend = self._attend([slots[index] for index in order], [nodes[index] for index in order])
        states = self.head.run(tokens, ordered_before, positions, attend)
        if order != list(range(len(jobs))):
            ends = dict(zip(order, accumulate(len(job.tokens) for job in ordered), strict=True))
            states = torch.cat([states[ends[i] - len(job.tokens) : ends[i]] for i, job in enumerate(jobs)])
        requested = requested_rows(jobs)
        return RowResult(before, states, requested, self._logits(self.head.logits(rows_of(states, requested))))

    def grows(self, counts: Sequence[int], shape: TreeWidths, searches: Sequence[TreeSearch]) -> bool:
        return self.static is not None and Growth.of(shape, searches).fits(self.static, counts)

    @torch.inference_mode()
    def trees(
        self,
        slots: Sequence[KVSlot],
        nodes: Sequence[Sequence[int]],
        jobs: Sequence[RowJob],
        shape: TreeWidths,
        searches: Sequence[TreeSearch],
    ) -> list[FoundTree]:
        """Run the passes of all levels as one static pass."""
        assert self.static is not None, "trees that grow in one call are static"
        growth = Growth.of(shape, searches)
        if growth not in self._growths:
            self._growths[growth] = TreeGrowth(
                growth, device=self.device, per_tile=self.static.per_tile, subset=self.tokens
            )
        rows = [Rows(slot, job.tokens, own, job.positions) for slot, job, own in zip(slots, jobs, nodes, strict=True)]
        starts = [slot.length + len(own) for slot, own in zip(slots, nodes, strict=True)]
        self.pool.lengthen(max(starts) + growth.num_read)  # rows of a level have the places of the widest tree
        wanted = pack_wanted(
            growth,
            searches,
            slots=[slot.index for slot in slots],
            starts=starts,
            positions=[job.positions[-1] + 1 for job in jobs],
        )
        result = self.static.run(
            (jobs[0].is_projected, growth),
            rows,
            requested=requested_rows(jobs),
            floats=joined_before(jobs).to(self.device),
            extra=wanted,
        )
        assert result is not None, "the pass fits"
        (found,), _ = result
        return [tree._replace(read=()) for tree in found_trees(found[: len(jobs)])]

    def _copied(self, jobs: Sequence[RowJob], before: Tensor, states: Tensor, columns: Tensor) -> RowResult:
        """Return the outputs of a static pass, which the next one overwrites."""
        requested = requested_rows(jobs)
        return RowResult(before.clone(), states.clone(), requested, self._logits(columns[: len(requested)].clone()))

    def _logits(self, columns: Tensor) -> Logits:
        return TensorLogits(columns) if self.tokens is None else SubsetLogits(columns, self.tokens)

    def _attend(self, slots: Sequence[KVSlot], nodes: Sequence[Sequence[int]]) -> ChainRows | CallRows:
        memory = self.pool.memory
        slot = slots[0]
        is_plain = self.head.window is None and self.head.sinks is None
        if is_plain and len(slots) == 1 and slot.depths[-1] == slot.num_tentative:
            return ChainRows(memory, slot.index, slot.length + nodes[0][0], self._scaling)
        current = plan_pass(memory, slots, nodes, self.device)

        def attend(call: LayerCall, *rows: Tensor) -> Tensor:
            return current.attend(call, *(part.transpose(0, 1).unsqueeze(0) for part in rows))[0]

        return CallRows(attend, self.head)


@final
class ChainRows:
    """Attention of the last rows of one slot whose tentative rows are a chain: each sees all rows before it."""

    def __init__(self, memory: KVMemory, slot: int, place: int, scaling: float) -> None:
        self._memory = memory
        self._slot = slot
        self._place = place
        self._scaling = scaling
        self._mask: Tensor | None = None

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store keys and values, then attend; shapes as in `Attend`."""
        keys, values = self._memory.keys[layer][self._slot], self._memory.values[layer][self._slot]
        rows = len(query)
        first = self._place
        end = self._place + len(query)
        keys[:, first:end], values[:, first:end] = key.transpose(0, 1), value.transpose(0, 1)
        keys, values = keys[None, :, :end], values[None, :, :end]
        group = query.shape[1] // keys.shape[1]
        if rows > 1 and self._mask is None:
            hidden = torch.full((rows, end), -math.inf, dtype=query.dtype, device=query.device).triu_(first + 1)
            self._mask = hidden.repeat(group, 1)
        # the queries of one key head become rows; four axes select the faster kernel
        grouped = query.transpose(0, 1).reshape(1, -1, group * rows, query.shape[-1])
        mixed = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self._mask, scale=self._scaling)
        return mixed.view(query.shape[1], rows, -1).transpose(0, 1)


@final
class CallRows:
    """Attention of rows of several slots or trees, as a pass of a model handles it."""

    def __init__(self, attend: Callable[[LayerCall, Tensor, Tensor, Tensor], Tensor], head: FeatureHead) -> None:
        self._attend = attend
        self._call = LayerCall(0, head.config.head_dim**-0.5, window=head.window, softcap=None, sinks=head.sinks)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store keys and values, then attend; shapes as in `Attend`."""
        return self._attend(replace(self._call, layer=layer), query, key, value)
