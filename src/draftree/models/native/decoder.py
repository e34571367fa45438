"""Decoder whose passes over slots run in C."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from draftree.core.errors import UnsupportedModelError
from draftree.models.embeddings import EmbeddingFacts
from draftree.models.kv.partial import LayerRange, RangeOutput
from draftree.models.kv.slots import KVMemory
from draftree.models.native.blueprint import Blueprint
from draftree.models.native.library import FORMATS, LANES, address, format_of, library
from draftree.models.native.logit_buffers import LogitBuffer, LogitBufferPool, RowsAt
from draftree.models.native.logits import NativeLogits
from draftree.models.native.packed import PackedWeights
from draftree.models.native.packed_source import PackedSource
from draftree.models.native.read_bytes import read_bytes
from draftree.models.native.rotary import RopeTables
from draftree.models.native.rows import Rows, SourceRows, place_of
from draftree.models.native.score_biases import ScoreBiases
from draftree.models.native.shares import Share, ShareWeights
from draftree.models.native.structures import CPass, product_of
from draftree.models.native.trees import NativeTrees
from draftree.models.native.unpacking import unpack
from draftree.models.native.weights import Weights

PIECES_OF_THREAD = 4
"""Attention chunks per thread, if there are enough rows."""
LEAST_ROWS = 8
KV_SCALE_BYTES = 4
"""Size of the scale after the codes of a head's key or value in 8 bits."""
ROW_COLUMNS = ("tokens", "slot", "place", "position", "identical", "list_start", "list", "chunks")


class NativeDecoder:
    """Packed weights of one model, and its passes in C.

    Args:
        blueprint: architecture of the model.
        weights: read one by one and released once they are packed; or packed weights.
        quantization: "int8" for 8-bit weights, "int4" for 4-bit ones, "gguf" for blocks of a file, None for the
            model's dtype.
        share: this process's share of a model that a team computes; None for the whole model.

    Raises:
        NativeUnavailableError: the native kernels are unavailable.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        weights: Weights | PackedSource,
        *,
        quantization: str | None = None,
        share: Share | None = None,
    ) -> None:
        self._library = library()
        self._share = share
        if share is not None:
            assert isinstance(weights, Weights), "a share packs its own weights"
            blueprint, weights = share.blueprint, ShareWeights(weights, share)
        self._blueprint = blueprint
        self._format = format_of(quantization, blueprint.dtype)
        self.dtype: torch.dtype = getattr(torch, blueprint.dtype)
        self._memory_version = -1
        self._ropes = RopeTables(blueprint.ropes)
        self.logit_buffers = LogitBufferPool()
        self._form = CPass()  # arguments that all passes share
        if isinstance(weights, Weights):
            weights = PackedWeights(self._library, blueprint, weights, kind=self._format, share=share)
        self._packed: PackedSource = weights
        self._biases = ScoreBiases(self._packed.biases, [layer.score_bias for layer in blueprint.layers])

    def store_codes(self) -> None:
        """Store keys and values of later passes in 8 bits, in rows of `KV_SCALE_BYTES` more than a head has numbers."""
        self._packed.decoder.cache_format = FORMATS["int8"]
        self._memory_version = -1

    def settle(self) -> None:
        """Finish work that would slow the first passes."""

    @property
    def packed(self) -> PackedSource:
        """The packed weights."""
        return self._packed

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self._blueprint.layers)

    @property
    def instructions(self) -> str:
        """Instruction set of the kernels."""
        return self._library.instructions

    @property
    def max_count(self) -> int:
        """Maximum number of entries that a search in C returns for a row."""
        return self._library.max_count

    @property
    def weight_bytes(self) -> int:
        """Size of all packed weights and of a separate embedding in bytes."""
        return self._packed.num_bytes

    @property
    def read_bytes(self) -> int:
        """Size of the packed products that a pass over one row reads, in bytes: of experts those of one row."""
        return read_bytes(self._library, self._packed.decoder)

    @property
    def row_bytes(self) -> int:
        """Size of a row's activations in bytes: residual stream, product, mixed values, next input."""
        plan = self._blueprint
        heads, all_heads = (plan.heads * plan.head_dim, (plan.heads + 2 * plan.kv_heads) * plan.head_dim)
        widest = max(plan.hidden, heads, plan.mlp)
        experts = [layer.experts for layer in plan.layers if layer.experts is not None]
        uses = max((one.chosen + (one.shared_down is not None) for one in experts), default=1)
        return 4 * (plan.hidden + uses * (max(all_heads, plan.hidden) + 2 * widest))  # each expert takes as much room

    def rows_of_chunk(self, rows: int) -> int:
        """Return the rows per attention chunk in a pass over `rows` rows, which makes threads end together."""
        threads = torch.get_num_threads()  # one thread shares nothing, and reads keys once for all rows
        pieces = 1 if threads == 1 else -(-PIECES_OF_THREAD * threads // self._blueprint.kv_heads)
        fair = -(-rows // (pieces * LEAST_ROWS)) * LEAST_ROWS
        return min(fair, self._library.rows_of_chunk)

    @property
    def _num_tokens(self) -> int:
        """Number of tokens whose logits this process computes."""
        return self._blueprint.vocab if self._share is None else len(self._share.vocab)

    def input_embedding(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the embedding as passes use it, shape (vocab, hidden); of a share, the rows of its tokens."""
        if self._packed.decoder.lookup.weight is not None:
            return self._library.groups.unpack(self._packed.decoder.lookup, self._num_tokens).to(dtype or self.dtype)
        own = self._packed.at(self._packed.decoder.embedding)
        return self.output_head(dtype) if own is None else own

    def output_head(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the head as passes use it, shape (vocab, hidden), as a new tensor; of a share, its tokens' rows."""
        head, dtype = self._packed.decoder.head, dtype or self.dtype
        if head.format == FORMATS["grouped"]:
            return self._library.groups.unpack(head, self._num_tokens).to(dtype)
        packed = self._packed.at(head.weight)
        assert packed is not None, "a decoder has a head"
        scales = self._packed.at(head.scale)
        found = unpack(packed, self._format, inputs=head.inputs, outputs=self._num_tokens, scales=scales)
        return found.to(dtype)

    def product_weight(self, layer: int, name: str, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of a product as packed: (outputs, inputs), gate and up in turns of 16 rows."""
        linear, dtype = product_of(self._packed.layers[layer], name), dtype or self.dtype
        if linear.format == FORMATS["grouped"]:
            return self._library.groups.unpack(linear, linear.outputs).to(dtype), self._packed.at(linear.bias)
        blocks, scales = self._packed.product(layer, name)
        outputs = -(-linear.outputs // LANES) * LANES
        found = unpack(blocks, linear.format, inputs=linear.inputs, outputs=outputs, scales=scales)
        return found[: linear.outputs].to(dtype), self._packed.at(linear.bias)

    def small_weight(self, layer: int | None, name: str) -> Tensor:
        """Return a norm of a layer, or of the whole model for None, float32."""
        owner = self._packed.decoder if layer is None else self._packed.layers[layer]
        found = self._packed.at(getattr(owner, name))
        assert found is not None, "the model has this norm"
        return found

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Return hidden states after the final norm, float32."""
        return self._library.final_norm(self._packed.decoder, hidden.float().contiguous())

    def embedding_facts(self) -> EmbeddingFacts:
        """Return how the model uses its embedding and its head."""
        bias = self._packed.at(self._packed.decoder.head.bias)
        plan = self._blueprint
        if plan.start_norm is not None:
            raise UnsupportedModelError(f"{plan.kind} normalizes embeddings: choose a drafter that reads none")
        own = None if bias is None else bias[: self._num_tokens]
        if own is not None and self._share is not None:
            raise UnsupportedModelError("the head's bias is divided among processes: choose a drafter that needs none")
        is_tied = self._packed.decoder.lookup.weight is None and self._packed.decoder.embedding is None
        return EmbeddingFacts(
            plan.embedding_scale, plan.logit_scale, soft_cap=plan.logit_cap, bias=own, is_tied=is_tied
        )

    def run(
        self,
        memory: KVMemory | None,
        rows: Rows,
        logit_rows: Sequence[int],
        *,
        layer_range: LayerRange,
        features: Tensor | None = None,
        rope_positions: Sequence[int] | None = None,
        sources: SourceRows | None = None,
    ) -> RangeOutput:
        """Run one pass over rows; their keys and values are written to the memory, None for a pass over no layers.

        `features` are projected to the input of the first layer, shape (rows, inputs of the projection), float32.
        `rope_positions` are entries of the rotary tables; None for the rows' positions. `sources` are those that rows
        attend to.
        """
        requested, vocab = array("q", logit_rows), self._blueprint.vocab
        rotated = None if rope_positions is None else array("q", rope_positions)
        run, buffer = self._filled(memory, rows, requested, rotated)
        run.first_layer, run.last_layer = layer_range.first, layer_range.end
        captured = layers = skipped = None
        if not layer_range.is_plain:
            layers = array("q", layer_range.captured_layers)
            captured = torch.empty(rows.count, len(layers), self._blueprint.hidden) if layers else None
            run.num_captured, run.captured_layers, run.captured = len(layers), place_of(layers), address(captured)
            skipped = layer_range.skipped(self.num_layers)
            run.hidden_in, run.features = address(layer_range.hidden), address(features)
            run.skipped = None if skipped is None else skipped.ctypes.data
        if sources is not None:
            run.source, run.sources = place_of(sources.rows), place_of(sources.table)
            run.source_queries = address(sources.queries)
        self._library.run(self._packed.decoder, run)
        at = RowsAt(buffer.address, len(logit_rows), vocab, vocab)
        return layer_range.output(NativeLogits(self._library, at, buffer.memory, run.num_threads), captured)

    def grow_trees(
        self,
        memory: KVMemory,
        rows: Rows,
        logit_rows: Sequence[int],
        trees: NativeTrees,
        *,
        before: Tensor,
        rope_positions: Sequence[int],
    ) -> None:
        """Run one pass over rows through all layers, and grow trees after the rows with logits.

        Args:
            memory: as for `run`.
            rows: as for `run`.
            logit_rows: as for `run`.
            trees: the trees, which contain the results afterwards.
            before: input of the first layer, shape (rows, hidden), or features, shape (rows, layers, hidden),
                contiguous float32.
            rope_positions: entries of the rotary tables.
        """
        requested, rotated = array("q", logit_rows), array("q", rope_positions)
        run, buffer = self._filled(
            memory, rows, requested, rotated, ahead=trees.structure.levels, logits=trees.structure.most_rows
        )
        run.last_layer = self.num_layers
        if before.dim() == 3:
            run.features, layers = before.data_ptr(), array("q", (0, self.num_layers))
        else:
            run.hidden_in, layers = before.data_ptr(), array("q", (self.num_layers,))
        states = self.logit_buffers.take(rows.count * len(layers), self._blueprint.hidden)
        run.num_captured, run.captured_layers, run.captured = len(layers), place_of(layers), states.address
        self._library.grow_trees(self._packed.decoder, run, trees.structure)
        del buffer, states  # the pass refers to their memory

    def _filled(
        self,
        memory: KVMemory | None,
        rows: Rows,
        requested: array[int],
        rope_positions: array[int] | None,
        *,
        ahead: int = 0,
        logits: int = 0,
    ) -> tuple[CPass, LogitBuffer]:
        """Return the arguments of a pass, which refer to the given arrays, and the memory of its logits.

        `ahead` is the number of rotary positions that are needed after the last one, `logits` the number of rows that
        the memory has room for at least.
        """
        # avoids numpy and torch: a pass has evicted their code from the processor caches
        if memory is not None and memory.version != self._memory_version:
            self._point_at(memory)
        longest = rows.longest if rope_positions is None else max(rope_positions, default=0) + 1
        self._ropes.point(self._form, longest=longest + ahead)
        self._biases.point(self._form, self._packed.layers, longest=rows.longest)
        buffer = self.logit_buffers.take(max(len(requested), logits), self._blueprint.vocab)
        run = CPass.from_buffer_copy(self._form)
        run.rows, run.num_chunks, run.num_logits = rows.count, rows.num_chunks, len(requested)
        run.num_threads = torch.get_num_threads()
        run.logit_rows, run.logits = place_of(requested), buffer.address
        if self._share is not None:
            self._join_team(run, self._share)
        first = place_of(rows.numbers)
        for name, start in zip(ROW_COLUMNS, rows.starts, strict=True):
            setattr(run, name, first + start * rows.numbers.itemsize)
        run.rope_position = run.position if rope_positions is None else place_of(rope_positions)
        return run, buffer

    def _join_team(self, run: CPass, share: Share) -> None:
        """Point a pass at the memory of the team; only rank 0 reads the logits."""
        size = self._library.team_bytes(self._packed.decoder, run.rows, run.num_logits)
        run.team, run.team_rank, run.team_size = share.memory.at_least(size), share.rank, share.size
        if share.rank:
            run.logits = None

    def _point_at(self, memory: KVMemory) -> None:
        for index, layer in enumerate(self._packed.layers):
            layer.keys, layer.values = memory.keys[index].data_ptr(), memory.values[index].data_ptr()
        self._form.places = memory.length
        self._form.slot_step = memory.keys[0].stride(0) // memory.keys[0].shape[-1]
        self._memory_version = memory.version
