"""Decoder whose passes run in C: packs the weights of a model and runs passes over slots.

Each weight is released once it is packed, so no large weight is in memory twice.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from draftree.models.embeddings import EmbeddingFacts
from draftree.models.kv.partial import LayerRange, RangeOutput
from draftree.models.kv.slots import KVMemory
from draftree.models.native.blueprint import Blueprint, LayerBlueprint, LinearBlueprint
from draftree.models.native.huge_pages import huge_pages
from draftree.models.native.library import FORMATS, LANES, address, library
from draftree.models.native.logit_buffers import LogitBufferPool, RowsAt
from draftree.models.native.logits import NativeLogits
from draftree.models.native.packing import bytes_needed, packed_bias
from draftree.models.native.rotary import RopeTables
from draftree.models.native.rows import Rows
from draftree.models.native.structures import CDecoder, CLayer, CLinear, CPass
from draftree.models.native.unpacking import unpack
from draftree.models.native.weights import Weights

NO_ROPE = -1
PAGE = 1 << 12
PIECES_OF_THREAD = 4
"""Attention chunks per thread, if there are enough rows."""
LEAST_ROWS = 8
PACK_ROWS = 256
"""Number of outputs per packing task."""
ROW_COLUMNS = ("tokens", "slot", "place", "position", "identical", "list_start", "list", "chunks")


class NativeDecoder:
    """Packed weights of one model, and its passes in C.

    Args:
        blueprint: architecture of the model.
        weights: read one by one and released once they are packed.
        quantization: "int8" for 8-bit weights, None for the model's dtype.

    Raises:
        NativeUnavailableError: the native kernels are unavailable.
    """

    def __init__(self, blueprint: Blueprint, weights: Weights, *, quantization: str | None = None) -> None:
        self._library = library()
        self._blueprint = blueprint
        self._weights = weights
        self._kept: list[Tensor] = []
        self._lent: list[Tensor] = []
        """Weights of another owner, which are not counted."""
        self._format = FORMATS[quantization or blueprint.dtype]
        self.dtype: torch.dtype = getattr(torch, blueprint.dtype)
        self._memory_version = -1
        self._ropes = RopeTables(blueprint.ropes)
        self._rooms = LogitBufferPool()
        self._form = CPass()  # arguments that all passes share
        self._arena, self._used = huge_pages(bytes_needed(blueprint, self._block_bytes, page=PAGE)), 0
        with torch.inference_mode(), ThreadPoolExecutor(torch.get_num_threads()) as pool:
            self._decoder = self._pack(pool)
        del self._weights

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self._blueprint.layers)

    @property
    def instructions(self) -> str:
        """Instruction set of the kernels."""
        return self._library.instructions

    @property
    def weight_bytes(self) -> int:
        """Size of all packed weights and of a separate embedding in bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._kept)

    @property
    def row_bytes(self) -> int:
        """Size of a row's activations in bytes: residual stream, product, mixed values, next input."""
        plan = self._blueprint
        heads, all_heads = (plan.heads * plan.head_dim, (plan.heads + 2 * plan.kv_heads) * plan.head_dim)
        widest = max(plan.hidden, heads, plan.mlp)
        return 4 * (plan.hidden + max(all_heads, plan.hidden) + 2 * widest)

    def rows_of_chunk(self, rows: int) -> int:
        """Return the rows per attention chunk in a pass over `rows` rows, so that threads end together.

        Results do not depend on it.
        """
        pieces = -(-PIECES_OF_THREAD * torch.get_num_threads() // self._blueprint.kv_heads)
        fair = -(-rows // (pieces * LEAST_ROWS)) * LEAST_ROWS
        return min(fair, self._library.rows_of_chunk)

    def _pack(self, pool: Executor) -> CDecoder:
        plan = self._blueprint
        # a tied embedding is read from the packed head if that keeps its bits
        tied = plan.is_tied and self._format == FORMATS[plan.dtype]
        self._layers = (CLayer * len(plan.layers))(*(self._layer(layer, pool) for layer in plan.layers))
        own = None
        if not tied:  # after the layers, whose weights are released by then
            own = self._embedding(plan)
        head = self._linear([plan.head], pool)
        return CDecoder(
            hidden=plan.hidden,
            heads=plan.heads,
            kv_heads=plan.kv_heads,
            head_dim=plan.head_dim,
            mlp=plan.mlp,
            num_layers=len(plan.layers),
            vocab=plan.vocab,
            format=self._format,
            kv_format=FORMATS[plan.dtype],
            activation=plan.activation,
            epsilon=plan.epsilon,
            embedding_scale=plan.embedding_scale,
            norm_offset=plan.norm_offset,
            residual_scale=plan.residual_scale,
            logit_scale=plan.logit_scale,
            embedding=address(own),
            final_norm=self._norm(plan.final_norm),
            layers=self._layers,
            head=head,
        )

    def _layer(self, layer: LayerBlueprint, pool: Executor) -> CLayer:
        return CLayer(
            attention_norm=self._norm(layer.attention_norm),
            embedding_norm=self._norm(layer.embedding_norm),
            attention_post_norm=self._norm(layer.attention_post_norm),
            mlp_norm=self._norm(layer.mlp_norm),
            mlp_post_norm=self._norm(layer.mlp_post_norm),
            query_norm=self._norm(layer.query_norm),
            key_norm=self._norm(layer.key_norm),
            qkv=self._linear(layer.qkv, pool),
            output=self._linear([layer.output], pool),
            gate_up=self._linear(layer.gate_up, pool, in_turns=True),
            down=self._linear([layer.down], pool),
            window=layer.window or 0,
            rope=NO_ROPE if layer.rope is None else layer.rope,
            is_normed_residual=layer.is_normed_residual,
            scaling=layer.scaling,
        )

    def _embedding(self, plan: Blueprint) -> Tensor:
        weight, is_lent = self._weights.get(plan.embedding), self._weights.lends(plan.embedding)
        if is_lent and weight.dtype == self.dtype and weight.is_contiguous():
            self._lent.append(weight)
            return weight
        own = self._keep(weight.to(self.dtype, copy=True).contiguous())
        if not plan.is_tied:
            self._weights.release(plan.embedding)
        return own

    def _kept_at(self, place: int | None) -> Tensor | None:
        """Return the retained tensor at an address; None for no address."""
        return (
            None
            if place is None
            else next(tensor for tensor in (*self._kept, *self._lent) if tensor.data_ptr() == place)
        )

    def input_embedding(self) -> Tensor:
        """Return the embedding as passes use it, shape (vocab, hidden)."""
        own = self._kept_at(self._decoder.embedding)
        return self.output_head() if own is None else own

    def output_head(self) -> Tensor:
        """Return the head as passes use it, shape (vocab, hidden), as a new tensor."""
        head = self._decoder.head
        packed = self._kept_at(head.weight)
        assert packed is not None, "a decoder has a head"
        scales = self._kept_at(head.scale)
        found = unpack(packed, self._format, inputs=head.inputs, outputs=self._blueprint.vocab, scales=scales)
        return found.to(self.dtype)

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Return hidden states after the final norm, float32; the equation is that of `norm` in `csrc/rows.h`."""
        weight = self._kept_at(self._decoder.final_norm)
        assert weight is not None, "a decoder has a final norm"
        states = hidden.float()
        inverse = torch.rsqrt(states.square().mean(dim=-1, keepdim=True) + self._blueprint.epsilon)
        return states * inverse * (weight + self._blueprint.norm_offset)

    def embedding_facts(self) -> EmbeddingFacts:
        """Return how the model uses its embedding and its head."""
        bias = self._kept_at(self._decoder.head.bias)
        plan = self._blueprint
        own = None if bias is None else bias[: plan.vocab]
        return EmbeddingFacts(plan.embedding_scale, plan.logit_scale, bias=own)

    def _keep(self, tensor: Tensor) -> Tensor:
        self._kept.append(tensor)
        return tensor

    def _norm(self, name: str | None) -> int | None:
        if name is None:
            return None
        weight = self._weights.get(name).to(self.dtype).to(torch.float32, copy=True).contiguous()
        self._weights.release(name)
        return self._keep(weight).data_ptr()

    def _linear(self, linears: Sequence[LinearBlueprint], pool: Executor, *, in_turns: bool = False) -> CLinear:
        """Pack layers one after the other or interleaved (gate and up), and release their weights."""
        inputs, outputs = linears[0].inputs, sum(linear.outputs for linear in linears)
        blocks = -(-outputs // LANES)
        packed = self._keep(self._room(blocks * self._block_bytes(inputs)))
        is_int8 = self._format == FORMATS["int8"]
        scales = self._keep(torch.zeros(blocks * LANES)) if is_int8 else None
        sums = self._keep(torch.zeros(blocks * LANES, dtype=torch.int32)) if is_int8 else None
        weights = [self._weights.get(linear.weight) for linear in linears]
        biases = [None if linear.bias is None else self._weights.get(linear.bias) for linear in linears]
        if in_turns and len(weights) == 1:
            weights = list(weights[0].chunk(2))
            biases = [None, None] if biases[0] is None else list(biases[0].chunk(2))
        step, first = (2, 0) if in_turns else (1, 0)
        bias = packed_bias(weights, biases, dtype=self.dtype, in_turns=in_turns)
        self._kept += [] if bias is None else [bias]
        pieces: list[tuple[Tensor, int]] = []
        for index, weight in enumerate(weights):
            place = index if in_turns else first
            rows = weight.split(PACK_ROWS)
            pieces += [(part, place + step * number * (PACK_ROWS // LANES)) for number, part in enumerate(rows)]
            first += weight.shape[0] // LANES
        pack = partial(self._library.pack, packed=packed, kind=self._format, step=step, scales=scales, sums=sums)
        list(pool.map(lambda piece: pack(piece[0].to(self.dtype), first=piece[1]), pieces))
        for name in (name for linear in linears for name in linear.names):
            self._weights.release(name)
        return CLinear(packed.data_ptr(), address(scales), address(sums), address(bias), inputs, outputs)

    def _block_bytes(self, inputs: int) -> int:
        return self._library.block_bytes(inputs, self._format)

    def _room(self, num_bytes: int) -> Tensor:
        start = self._used
        self._used += -(-num_bytes // PAGE) * PAGE
        return self._arena[start : start + num_bytes]

    def run(
        self,
        memory: KVMemory | None,
        rows: Rows,
        logit_rows: Sequence[int],
        *,
        layer_range: LayerRange,
        rope_positions: Sequence[int] | None = None,
    ) -> RangeOutput:
        """Run one pass over rows; their keys and values are written to the memory, None for a pass over no layers.

        `rope_positions` are entries of the rotary tables; None for the rows' positions.
        """
        # avoids numpy and torch: a pass has evicted their code from the processor caches
        if memory is not None and memory.version != self._memory_version:
            self._point_at(memory)
        longest = rows.longest if rope_positions is None else max(rope_positions, default=0) + 1
        self._ropes.point(self._form, longest=longest)
        vocab, num_threads = self._blueprint.vocab, torch.get_num_threads()
        buffer = self._rooms.take(len(logit_rows), vocab)
        run = CPass.from_buffer_copy(self._form)
        run.rows, run.num_chunks, run.num_logits = rows.count, rows.num_chunks, len(logit_rows)
        run.first_layer, run.last_layer = layer_range.first, layer_range.end
        run.num_threads = num_threads
        requested = array("q", logit_rows)
        run.logit_rows, run.logits = place_of(requested), buffer.address
        first = place_of(rows.numbers)
        for name, start in zip(ROW_COLUMNS, rows.starts, strict=True):
            setattr(run, name, first + start * rows.numbers.itemsize)
        rotated = None if rope_positions is None else array("q", rope_positions)
        run.rope_position = run.position if rotated is None else place_of(rotated)
        captured = layers = skipped = None
        if not layer_range.is_plain:
            layers = array("q", layer_range.captured_layers)
            captured = torch.empty(rows.count, len(layers), self._blueprint.hidden) if layers else None
            run.num_captured, run.captured_layers, run.captured = len(layers), place_of(layers), address(captured)
            skipped = layer_range.skipped(self.num_layers)
            run.hidden_in = address(layer_range.hidden)
            run.skipped = None if skipped is None else skipped.ctypes.data
        self._library.run(self._decoder, run)
        at = RowsAt(buffer.address, len(logit_rows), vocab, vocab)
        return layer_range.output(NativeLogits(self._library, at, buffer.memory, num_threads), captured)

    def _point_at(self, memory: KVMemory) -> None:
        for index, layer in enumerate(self._layers):
            layer.keys, layer.values = memory.keys[index].data_ptr(), memory.values[index].data_ptr()
        self._form.places = memory.length
        self._form.slot_step = memory.keys[0].stride(0) // self._blueprint.head_dim
        self._memory_version = memory.version


def place_of(numbers: array[int]) -> int:
    """Return the address of an array's numbers."""
    return numbers.buffer_info()[0]
