"""Native decoder as a `LanguageModel`, independent of transformers, and its quantized copy on the same slots."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import final

import torch
from torch import Tensor

from draftree.core.errors import UnsupportedModelError
from draftree.models.base import Edit, EmbeddingFacts, Extend, LanguageModel, LayerSubset, Pass, PassResult, Slot
from draftree.models.kv.slots import KVSlot, LayerRange, LayerShape, Leftovers, RangeOutput, SlotPool, kv_slot
from draftree.models.kv.slotted import SlottedModel, requested_rows
from draftree.models.memory import LOGIT_BYTES, Footprint
from draftree.models.native.blueprint import LAYER_NORM, Blueprint, LayerBlueprint, LinearBlueprint
from draftree.models.native.decoder import KV_SCALE_BYTES, NativeDecoder, Rows, plan_rows
from draftree.models.native.library import LANES
from draftree.models.native.shares import Share
from draftree.models.native.states import MOST_KEPT, NativeStates
from draftree.models.native.structures import NORMS, latents_of
from draftree.models.native.weights import Weights
from draftree.models.torch.inspection import ReadPrompt
from draftree.sampling.logits import RowNoise


class NativeModel(SlottedModel):
    """Model whose passes run on native kernels."""

    def __init__(
        self,
        blueprint: Blueprint,
        weights: Weights | NativeDecoder,
        *,
        quantization: str | None = None,
        share: Share | None = None,
    ) -> None:
        decoder = weights
        if isinstance(decoder, Weights):
            decoder = NativeDecoder(blueprint, decoder, quantization=quantization, share=share)
        self.vocab_size, self.max_length = blueprint.vocab, blueprint.context
        self.supports_trees = True
        self.device, self.dtype = torch.device("cpu"), decoder.dtype
        self.fingerprint = blueprint.fingerprint
        self.quantization = quantization
        # "int8" for keys and values in 8 bits, None for the model's dtype; see `use_kv_dtype`
        self.kv_dtype: str | None = None
        self.blueprint = blueprint
        self._decoder = decoder
        own = blueprint if share is None else share.blueprint
        self._kv_heads, self._layers = own.kv_heads, own.layers
        self._reads_sources = any(layer.source is not None for layer in own.layers)
        pool = self._new_pool(blueprint.head_dim, self.dtype)
        super().__init__(blueprint.kind, num_layers=decoder.num_layers, pool=pool)

    def _new_pool(self, row: int, dtype: torch.dtype) -> SlotPool:
        """Return slots with `row` numbers for the key of a token and a head, and as many for its value."""
        layers = self._layers
        attentions = [index for index, layer in enumerate(layers) if layer.attends]
        recurrences = {index: layer.state for index, layer in enumerate(layers) if layer.state is not None}
        self._states = NativeStates(recurrences) if recurrences else None
        return SlotPool(
            dict.fromkeys(attentions, LayerShape(self._kv_heads, row, row)),
            dtype=dtype,
            device=self.device,
            leftovers=Leftovers.UNREAD,
            states=self._states,
        )

    def use_kv_dtype(self, kv_dtype: str) -> None:
        """Store keys and values in 8 bits from now on: symmetric codes with a float32 scale per token and head.

        Keys are rounded after their rotation. Texts differ from those of the model's dtype, and logits remain
        bit-identical in every batch and tree. No slot may be open.
        """
        if kv_dtype != "int8":
            raise UnsupportedModelError(f"keys and values of kind '{kv_dtype}' are not known: the only one is int8")
        assert not self.num_open, "slots keep their format"
        self._decoder.store_codes()
        self._pool.clear()
        self._pool = self._new_pool(self.blueprint.head_dim + KV_SCALE_BYTES, torch.int8)
        self.kv_dtype = kv_dtype

    def adopt(self, prompt: ReadPrompt) -> KVSlot:
        """Open a slot with all but the last token of a prompt that a transformers model has read."""
        assert self.kv_dtype is None, "keys and values have the model's dtype"
        slot = self._pool.adopt(prompt.layers, prompt.length - 1)
        slot.offset = prompt.offset
        if self._states is not None and slot.length:
            self._states.adopt(slot, prompt.cache)
        return slot

    def free_slots(self) -> None:
        """Free the memory of keys and values and of logits that are not in use; no slot may be open."""
        assert not self.num_open, "their keys and values are in use"
        self._pool.clear()
        self._decoder.logit_buffers.clear()

    def settle(self) -> None:
        self._decoder.settle()

    def require_capture(self, layers: Sequence[int]) -> None:
        if self.blueprint.is_post_norm:
            raise UnsupportedModelError(
                f"{self.kind} has norms after its sublayers, and its hidden states are not returned by native kernels: "
                "choose a drafter that needs none, or kernels 'torch'"
            )
        super().require_capture(layers)

    @property
    def instructions(self) -> str:
        return self._decoder.library.instructions

    @property
    def decoder(self) -> NativeDecoder:
        return self._decoder

    def run_with(self, decoder: NativeDecoder, pass_: Pass) -> PassResult:
        """Run a pass on the model's slots with another decoder of the same shape, such as a copy with fewer bits."""
        target, self._decoder = self._decoder, decoder
        try:
            return self.run(pass_)
        finally:
            self._decoder = target

    def quantized_copy(self, quantization: str) -> LanguageModel:
        return QuantizedCopy(self, quantization)

    @property
    def footprint(self) -> Footprint:
        return Footprint(
            weights=self._decoder.weight_bytes,
            token=self._pool.memory.token_bytes,
            logits=self.vocab_size * LOGIT_BYTES,
            row=self._decoder.row_bytes,
            state=0 if self._states is None else (1 + MOST_KEPT) * self._states.state_bytes,
            node=0 if self._states is None else self._states.entry_bytes,
        )

    def input_embedding(self) -> Tensor:
        """Return the retained embedding, or a new tensor from the packed head if tied. Never quantized."""
        return self._decoder.input_embedding()

    def output_head(self) -> Tensor:
        return self._decoder.output_head()

    def final_norm(self, hidden: Tensor) -> Tensor:
        return self._decoder.final_norm(hidden)

    def embedding_facts(self) -> EmbeddingFacts:
        return self._decoder.embedding_facts()

    def _pass(self, jobs: Sequence[Extend], nodes: Sequence[Sequence[int]], layer_range: LayerRange) -> RangeOutput:
        slots, tokens = [kv_slot(job.slot) for job in jobs], [job.tokens for job in jobs]
        chunk = self._decoder.rows_of_chunk(sum(map(len, tokens)))
        rows = plan_rows(slots, tokens, nodes, rows_of_chunk=chunk)
        requested, memory, states = requested_rows(jobs), self._pool.memory, self._states
        positions = _moved_positions(rows, slots, nodes)
        run = partial(self._decoder.run, memory, rows, requested, layer_range=layer_range, rope_positions=positions)
        if states is None:
            return run()
        is_partial = layer_range.part is not None
        # whole passes start at a later layer only if the earlier ones run elsewhere
        keeps = not is_partial and layer_range.end == self.num_layers
        settled = [0 if is_partial else job.settled for job in jobs]
        steps = states.plan(slots, nodes, settled, keeps=keeps, is_partial=is_partial)
        output = run(states=states, steps=steps)
        states.note(steps)
        return output

    def decode(
        self, jobs: Sequence[Extend], noise: Sequence[RowNoise], stop_ids: Collection[int], *, seconds: float
    ) -> list[list[int]]:
        if self._states is not None or self._reads_sources:
            return []
        slots = [kv_slot(job.slot) for job in jobs]
        nodes = self._pool.append(slots, jobs)
        self._pool.lengthen(max(slot.length for slot in slots) + len(noise))
        rows = plan_rows(slots, [job.tokens for job in jobs], nodes, rows_of_chunk=1)
        positions = _moved_positions(rows, slots, nodes)
        tokens = self._decoder.decode(
            self._pool.memory, rows, noise, stop_ids, seconds=seconds, rope_positions=positions
        )
        self.num_sublayer_runs += 2 * self.num_layers * len(tokens) * len(slots)
        for slot in slots:
            slot.commit(())
            slot.append(range(-1, len(tokens) - 1))
        return tokens

    @property
    def _continues_partials(self) -> bool:
        return self._states is None  # the base states of all layers move on in one pass


def _moved_positions(rows: Rows, slots: Sequence[KVSlot], nodes: Sequence[Sequence[int]]) -> list[int] | None:
    """Return the rotary positions of rows, if images before some of them take fewer positions than tokens."""
    if not any(slot.offset for slot in slots):
        return None
    offsets = (slot.offset for slot, chosen in zip(slots, nodes, strict=True) for _ in chosen)
    return [position + offset for position, offset in zip(rows.positions, offsets, strict=True)]


@final
class UnpackedWeights(Weights):
    """Weights of a decoder, unpacked one product at a time. Its embedding is lent."""

    def __init__(self, blueprint: Blueprint, decoder: NativeDecoder, dtype: torch.dtype | None = None) -> None:
        self._blueprint = blueprint
        self._decoder = decoder
        self._dtype = dtype
        self._parts: dict[str, Tensor] = {}
        self._small: dict[str, Tensor] = {}
        for field in ("final_norm", "start_norm"):
            self._add_norm(getattr(blueprint, field), None, field)
        if blueprint.positions is not None:
            self._small[blueprint.positions] = decoder.small_weight(None, "positions")
        self._owners: dict[str, tuple[int, str, Sequence[LinearBlueprint], bool]] = {}
        for index, layer in enumerate(blueprint.layers):
            if layer.sinks is not None:
                self._small[layer.sinks] = decoder.small_weight(index, "sinks")
            for product, linears, in_turns in products_of_rows(layer, is_gated=blueprint.is_gated):
                for name in (name for linear in linears for name in linear.names):
                    self._owners[name] = (index, product, linears, in_turns)
            for field in NORMS:
                self._add_norm(getattr(layer, field), index, field)
            if layer.source is not None:
                self._add_norm(layer.source.norm, index, "source_norm")
            for latent, packed in zip(layer.latents, latents_of(decoder.packed.layers[index]), strict=True):
                if latent.norm is not None and (weight := decoder.packed.at(packed.norm)) is not None:
                    self._small[latent.norm] = weight

    def _add_norm(self, name: str | None, layer: int | None, field: str) -> None:
        if name is None:
            return
        weight = self._decoder.small_weight(layer, field)
        if self._blueprint.norm == LAYER_NORM:
            weight, bias = weight.chunk(2)
            if (name_of_bias := self._blueprint.bias_of_norm(name)) is not None:
                self._small[name_of_bias] = bias
        self._small[name] = weight

    def get(self, name: str) -> Tensor:
        """Return a weight in the decoder's dtype; norms, positions and biases in float32."""
        plan = self._blueprint
        if name in self._small:
            return self._small[name]
        if name == plan.embedding:
            return self._decoder.input_embedding(self._dtype)
        if name == plan.head.weight:
            return self._decoder.output_head(self._dtype)
        if name == plan.head.bias:
            bias = self._decoder.embedding_facts().bias
            assert bias is not None, "the head has a bias"
            return bias
        if name not in self._parts:
            self._unpack(*self._owners[name])
        return self._parts[name]

    def release(self, name: str) -> None:
        self._parts.pop(name, None)

    def lends(self, name: str) -> bool:
        return name == self._blueprint.embedding and not self._blueprint.is_tied

    def _unpack(self, layer: int, product: str, linears: Sequence[LinearBlueprint], in_turns: bool) -> None:
        weight, bias = self._decoder.product_weight(layer, product, self._dtype)
        if in_turns:  # blocks of gate and up alternate
            weight = weight.view(-1, 2, LANES, weight.shape[1]).transpose(0, 1).reshape(-1, weight.shape[1])
            bias = None if bias is None else bias.view(-1, 2, LANES).transpose(0, 1).flatten()
        first = 0
        if product == "output" and len(linears) > 1:  # their inputs lie side by side
            for linear, part in zip(linears, weight.split([linear.inputs for linear in linears], dim=1), strict=True):
                self._parts[linear.weight] = part.contiguous()
            return
        for linear in linears:
            end = first + linear.outputs
            self._parts[linear.weight] = weight[first:end].contiguous()
            if linear.bias is not None:
                assert bias is not None, "the product has biases"
                self._parts[linear.bias] = bias[first:end].contiguous()
            first = end + -end % LANES  # each layer starts in a block of its own


def products_of_rows(
    layer: LayerBlueprint, *, is_gated: bool = True
) -> Iterator[tuple[str, Sequence[LinearBlueprint], bool]]:
    """Yield name, linear layers and order of the products of a layer that every row uses, without routers."""
    if layer.output is not None:
        yield "qkv", layer.inputs, False
        yield from ((f"latents.{index}", (latent.product,), False) for index, latent in enumerate(layer.latents))
        yield "output", layer.outputs, False
    if layer.source is not None:
        yield "source_query", (layer.source.query,), False
        yield "source_output", (layer.source.output,), False
    experts = layer.experts
    if experts is None and layer.down is not None:
        yield "gate_up", layer.gate_up, is_gated
        yield "down", (layer.down,), False
    elif experts is not None and experts.shared_down is not None:
        yield f"gate_up.{experts.count}", experts.shared_gate_up, True
        yield f"down.{experts.count}", (experts.shared_down,), False


@final
class QuantizedCopy(LanguageModel):
    """Copy of a model that runs on the model's slots; its passes append partial nodes.

    The copy reads and writes the keys and values of the target's slots, so it needs no prefill and no memory
    besides its weights, and it sees the target's own keys and values of the text. Its nodes are partial nodes,
    which the target's pass drops and computes again.

    Source: SubSpec, arXiv 2509.18344.
    """

    def __init__(self, target: NativeModel, quantization: str) -> None:
        if target.quantization is not None:
            raise UnsupportedModelError(
                f"the target has weights of kind {target.quantization} already: a copy of it with fewer bits needs a "
                "target that is not quantized"
            )
        if target.blueprint.has_experts:
            raise UnsupportedModelError("a model with experts has no copy with fewer bits")
        self._target = target
        blueprint = target.blueprint.as_unpacked()
        weights = UnpackedWeights(blueprint, target.decoder)
        products = replace(blueprint, layers=tuple(layer.without_state() for layer in blueprint.layers))
        with torch.inference_mode():
            self._decoder = NativeDecoder(products, weights, quantization=quantization)
        # recurrences have no products: they and their states are the target's
        for layer, original in zip(self._decoder.packed.layers, target.decoder.packed.layers, strict=True):
            layer.recurrence = original.recurrence
        if target.kv_dtype is not None:
            self._decoder.store_codes()  # it reads and writes the target's slots
        self.supports_trees = True
        for name in ("vocab_size", "max_length", "device", "dtype", "num_layers"):
            setattr(self, name, getattr(target, name))
        self.fingerprint = f"{target.fingerprint}-{quantization}"

    @property
    def footprint(self) -> Footprint:
        return Footprint(weights=self._decoder.weight_bytes, token=0, logits=0, row=0)

    def require_part(self, part: LayerSubset) -> None:
        if part.attention or part.mlp or part.end not in (None, self.num_layers):
            raise UnsupportedModelError("a copy of the target runs all of its layers")

    def reserve(self, num_slots: int, length: int) -> None:
        self._target.reserve(num_slots, length)

    def open(self) -> Slot:
        return self._target.open()

    def cut_length(self, slot: Slot, length: int) -> int:
        return self._target.cut_length(slot, length)

    def run(self, pass_: Pass) -> PassResult:
        if pass_.layers.end != self.num_layers:
            raise UnsupportedModelError("passes of a copy append partial nodes: name the number of layers as their end")
        return self._target.run_with(self._decoder, pass_)

    def apply(self, edits: Sequence[Edit]) -> list[Slot]:
        return self._target.apply(edits)
