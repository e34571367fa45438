"""Native forward passes of heads, beside the target's own.

States are float32; stored ones have the head's dtype.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from draftree.core.tensors import rows_of
from draftree.heads.base import BlockHead, BlockRows, FeatureHead, Head
from draftree.heads.block_passes import BlockPasses, BlockResult, SlotAttention, TorchBlockPasses
from draftree.heads.dflash import DFlashHead
from draftree.heads.native_plans import plan_head, plan_product
from draftree.heads.passes import STATES, HeadPasses, RowJob, RowResult, TorchPasses, joined_before, requested_rows
from draftree.heads.peagle import ParallelEagle
from draftree.models.base import LanguageModel
from draftree.models.kv.slots import KVSlot, LayerRange, Leftovers, RangeOutput
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.decoder import NativeDecoder, NativeTrees, Rows, plan_blocks, plan_rows
from draftree.models.native.library import LANES, RowsAt, library
from draftree.models.native.logits import NativeLogits, NativeSubset, NativeSubsetLogits
from draftree.models.native.model import NativeModel
from draftree.models.torch.hf import HFModel
from draftree.sampling.logits import Logits
from draftree.sampling.tree_search import UNFILTERED, FoundTree, TreeSearch, TreeWidths

logger = logging.getLogger(__name__)


def passes_of(head: FeatureHead, target: LanguageModel) -> HeadPasses:
    """Return native passes if the target's are and they support the head; else PyTorch ones, whose reason is logged.

    Native passes take the weights of the head, which cannot run in PyTorch afterwards. Unless the target is unquantized
    float32, the head has 8-bit weights: a level takes half the time, and drafts are accepted almost as often.
    """
    if isinstance(model := target.here, NativeModel):
        try:
            return NativePasses(head, quantization=_quantization(model))
        except NativeUnavailableError as reason:
            _log(head, reason)
    static = model.static if isinstance(model, HFModel) else None
    return TorchPasses(head, target.device, None if static is None else static.shapes)


def block_passes_of(head: BlockHead, target: LanguageModel) -> BlockPasses:
    """Do as `passes_of` for a head that drafts all levels in one pass."""
    if isinstance(model := target.here, NativeModel):
        try:
            return NativeBlockPasses(head, quantization=_quantization(model))
        except NativeUnavailableError as reason:
            _log(head, reason)
    return TorchBlockPasses(head, target.device)


def _quantization(target: NativeModel) -> str | None:
    is_exact = target.quantization is None and target.dtype == torch.float32
    return None if is_exact else "int8"


def _log(head: Head, reason: NativeUnavailableError) -> None:
    logger.warning("head of kind '%s': kernels: torch (%s)", head.config.kind, reason)


@final
class NativePasses(HeadPasses):
    """Native forward passes. The head's weights are packed, and its module cannot run afterwards.

    Raises NativeUnavailableError if the native kernels are unavailable or do not support the head, which is then
    unchanged.
    """

    def __init__(self, head: FeatureHead, *, quantization: str | None = None) -> None:
        super().__init__(head, torch.device("cpu"), Leftovers.UNREAD)
        plan = plan_head(head)
        self.quantization = quantization
        self._norms_output = plan.recycles_normed
        self._projects = plan.blueprint.projection is not None
        self._decoder = NativeDecoder(plan.blueprint, plan.weights, quantization=quantization)
        self._subset = None if self.tokens is None else NativeSubset(self.tokens)

    @property
    def weight_bytes(self) -> int:
        return self._decoder.weight_bytes + super().weight_bytes

    @torch.inference_mode()
    def project(self, features: Tensor) -> Tensor:
        """Return the states before the tokens that follow, float32 with the values of the head's dtype."""
        if not self._projects:
            return self.head.project(features).float()
        flat = features.float().flatten(1).contiguous()
        output = self._decoder.run(
            None, Rows.hidden(len(flat)), (), layer_range=LayerRange(0, 0, keeps_hidden=True), features=flat
        )
        assert output.hidden is not None, "states are captured"
        return output.hidden

    @torch.inference_mode()
    def recycle(self, states: Tensor) -> Tensor:
        """Return the states before the children of rows, float32."""
        return self._decoder.final_norm(states) if self._norms_output else states

    @torch.inference_mode()
    def run(self, slots: Sequence[KVSlot], nodes: Sequence[Sequence[int]], jobs: Sequence[RowJob]) -> RowResult:
        """Run a pass over new rows; states are float32, projected ones with values of the head's dtype."""
        tokens = [job.tokens for job in jobs]
        end = self._decoder.num_layers
        requested = requested_rows(jobs)
        joined = self._joined(jobs)
        if joined.dim() == 3:
            layer_range = LayerRange(0, end, keeps_hidden=True, capture=(0,))
            features = joined.flatten(1)
        else:
            layer_range = LayerRange(0, end, hidden=joined, keeps_hidden=True)
            features = None
        output = self._decoder.run(
            self.pool.memory,
            plan_rows(slots, tokens, nodes, rows_of_chunk=self._decoder.rows_of_chunk(sum(map(len, tokens)))),
            requested,
            layer_range=layer_range,
            features=features,
            rope_positions=[position for job in jobs for position in job.positions],
        )
        assert output.hidden is not None, "states are captured"
        before = joined if output.captured is None else output.captured[:, 0]
        return RowResult(before, output.hidden, requested, self._answered(output))

    def _joined(self, jobs: Sequence[RowJob]) -> Tensor:
        """Return what is before the rows of all jobs, contiguous float32: states, or what the decoder projects."""
        joined = joined_before(jobs)
        if joined.dim() == 3 and not self._projects:
            joined = self.project(joined)
        is_ready = joined.dtype == torch.float32 and joined.is_contiguous()
        return joined if is_ready else joined.float().contiguous()

    def grows(self, counts: Sequence[int], shape: TreeWidths, searches: Sequence[TreeSearch]) -> bool:
        is_plain = all(search.kept == UNFILTERED for search in searches)
        return is_plain and max(shape.widths) <= self._decoder.library.max_count

    def trees(
        self,
        slots: Sequence[KVSlot],
        nodes: Sequence[Sequence[int]],
        jobs: Sequence[RowJob],
        shape: TreeWidths,
        searches: Sequence[TreeSearch],
    ) -> list[FoundTree]:
        """Run a pass over new rows, and grow trees after them in the same call."""
        tokens = [job.tokens for job in jobs]
        memory = self.pool.memory
        states = memory.keys[STATES]
        before = self._joined(jobs)
        places = [slot.length + len(row) for slot, row in zip(slots, tokens, strict=True)]
        trees = NativeTrees(shape, searches, slots, places, [job.positions[-1] + 1 for job in jobs])
        structure = trees.structure
        structure.ids = None if self._subset is None else self._subset.address
        structure.is_normed = self._norms_output
        structure.kept = states.data_ptr()
        structure.kept_step = states.stride(0)
        rows = plan_rows(slots, tokens, nodes, rows_of_chunk=self._decoder.rows_of_chunk(sum(map(len, tokens))))
        rope_positions = [position for job in jobs for position in job.positions]
        self._decoder.grow_trees(
            memory, rows, requested_rows(jobs), trees, before=before, rope_positions=rope_positions
        )
        return trees.trees()

    def _answered(self, output: RangeOutput) -> Logits:
        columns = output.logits
        assert isinstance(columns, NativeLogits), "native passes return native logits"
        return columns if self._subset is None else NativeSubsetLogits(columns, self._subset)


class PlannedRows(NamedTuple):
    """Rows of a pass, their features, rotary positions, and the rows whose logits are requested."""

    rows: Rows
    features: Tensor
    positions: Sequence[int]
    requested: Sequence[int]


@final
class NativeBlockPasses(BlockPasses):
    """Native forward passes of a head that drafts all levels in one pass, which takes its weights.

    Layers of DFlash and DSpark run over blocks and context, those of P-EAGLE over rows and masks as one chain. The
    perceptrons of Medusa and the bias of DSpark are products of their modules. Raises as `NativePasses` does.
    """

    def __init__(self, head: BlockHead, *, quantization: str | None = None) -> None:
        super().__init__(head, torch.device("cpu"))
        self._masked = head.head if isinstance(head, ParallelEagle) else None
        self._decoder = None
        products = products_of(head)
        if head.config.num_layers:
            plan = plan_head(self._masked or head)
            self._decoder = NativeDecoder(plan.blueprint, plan.weights, quantization=quantization)
            self.num_stored = head.config.block_size if self._masked is None else head.num_levels - 1
        self._decoders = [] if self._decoder is None else [self._decoder]
        for owner, name, linear in products:
            product = NativeProduct(linear, quantization=quantization)
            setattr(owner, name, product)
            self._decoders.append(product.decoder)
        self._subset = None if self.tokens is None else NativeSubset(self.tokens)

    @property
    def weight_bytes(self) -> int:
        return sum(decoder.weight_bytes for decoder in self._decoders) + super().weight_bytes

    def run(self, slots: Sequence[KVSlot], rows: BlockRows, drafting: Sequence[int]) -> BlockResult:
        head, decoder, memory = self.head, self._decoder, self.pool.memory
        if decoder is None:
            states = rows_of(head.run(rows, SlotAttention(memory, slots, rows.counts)), drafting)
            return BlockResult(states, head.logits(states))
        plan = self._blocks if self._masked is None else self._chains
        native_rows, features, positions, requested = plan(decoder, slots, rows, drafting)
        output = decoder.run(
            memory,
            native_rows,
            requested,
            layer_range=LayerRange(0, decoder.num_layers, keeps_hidden=True),
            features=features,
            rope_positions=positions,
        )
        assert output.hidden is not None, "states are captured"
        count, size = len(drafting), head.num_levels + head.first_slot
        states = output.hidden[: count * size]
        if head.has_bias or head.config.has_confidence:  # otherwise they are not used
            states = decoder.final_norm(states).to(self.dtype)
        columns = output.logits.tensor()
        return BlockResult(
            states.view(count, size, states.shape[1]), columns.view(count, head.num_levels, columns.shape[1])
        )

    def _blocks(
        self, decoder: NativeDecoder, slots: Sequence[KVSlot], rows: BlockRows, drafting: Sequence[int]
    ) -> PlannedRows:
        """Plan blocks of the anchor and masks, and the context."""
        size, mask = self.head.config.block_size, self.head.config.mask_token_id
        assert mask is not None, "tested by the configuration"
        tokens, places = _split(rows.tokens, rows.counts), _split(rows.positions, rows.counts)
        blocks = [[own[-1], *[mask] * (size - 1)] if i in drafting else [] for i, own in enumerate(tokens)]
        positions = [position for i in drafting for position in range(places[i][-1], places[i][-1] + size)]
        positions += [position - 1 for own in places for position in own]
        chunk = decoder.rows_of_chunk(size * len(drafting))
        first = self.head.first_slot
        requested = [block * size + slot for block in range(len(drafting)) for slot in range(first, size)]
        features = rows.features.float().flatten(1).contiguous()
        return PlannedRows(plan_blocks(slots, blocks, tokens, rows_of_chunk=chunk), features, positions, requested)

    def _chains(
        self, decoder: NativeDecoder, slots: Sequence[KVSlot], rows: BlockRows, drafting: Sequence[int]
    ) -> PlannedRows:
        """Plan rows and the masks after them."""
        masked, mask = self._masked, self.head.config.mask_token_id
        assert masked is not None, "the head has masks"
        assert mask is not None, "tested by the configuration"
        tokens, positions = _split(rows.tokens, rows.counts), _split(rows.positions, rows.counts)
        features, total = [], 0
        requested: list[int] = []
        masks = masked.mask_hidden.float().view(1, -1).expand(self.num_stored, -1)
        for index, known in enumerate(rows.features.float().flatten(1).split(list(rows.counts))):
            features.append(known)
            if index in drafting:
                requested += range(total + len(known) - 1, total + len(known) + self.num_stored)
                features.append(masks)
                positions[index] += range(positions[index][-1] + 1, positions[index][-1] + 1 + self.num_stored)
                tokens[index] += [mask] * self.num_stored
            total += len(tokens[index])
        nodes = [range(len(own)) for own in tokens]
        chains = plan_rows(slots, tokens, nodes, rows_of_chunk=decoder.rows_of_chunk(total))
        return PlannedRows(chains, torch.cat(features), [place for own in positions for place in own], requested)

    def logits(self, columns: Tensor) -> Logits:
        at = RowsAt(columns.data_ptr(), columns.shape[0], columns.stride(0), columns.shape[1])
        native = NativeLogits(library(), at, columns, torch.get_num_threads())
        return native if self._subset is None else NativeSubsetLogits(native, self._subset)


def _split(numbers: Tensor, counts: Sequence[int]) -> list[list[int]]:
    return [part.tolist() for part in numbers.split(list(counts))]


def products_of(head: BlockHead) -> list[tuple[nn.Module, str, nn.Linear]]:
    """Return the linear layers of a block head that are no part of a decoder, with their owners and names."""
    root: nn.Module | None = head
    if head.config.num_layers:
        root = (head.markov_head or head.refiner_head) if isinstance(head, DFlashHead) else None
    products = [
        (owner, name, child)
        for owner in (() if root is None else root.modules())
        for name, child in owner.named_children()
        if isinstance(child, nn.Linear)
    ]
    for _, name, linear in products:
        if linear.in_features % LANES:
            raise NativeUnavailableError(f"'{name}' has {linear.in_features} inputs, no multiple of {LANES}")
    return products


@final
class NativeProduct(nn.Module):
    """Linear layer whose weight is packed; results are float32."""

    def __init__(self, linear: nn.Linear, *, quantization: str | None) -> None:
        super().__init__()
        self.weight = linear.weight.detach()[:0].clone()  # for its dtype
        self.num_outputs = linear.out_features
        plan = plan_product(linear)
        self.decoder = NativeDecoder(plan.blueprint, plan.weights, quantization=quantization)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product, shape (..., outputs)."""
        flat = x.float().reshape(-1, x.shape[-1]).contiguous()
        count = len(flat)
        output = self.decoder.run(None, Rows.hidden(count), range(count), layer_range=LayerRange(0, 0, hidden=flat))
        return output.logits.tensor().view(*x.shape[:-1], self.num_outputs)
