"""Decoder in C as a `LanguageModel`, independent of transformers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftree.core.errors import UnsupportedModelError
from draftree.models.base import Extend, LanguageModel, Pass, PassResult
from draftree.models.embeddings import EmbeddingFacts
from draftree.models.kv.partial import LayerRange, RangeOutput
from draftree.models.kv.pool import Leftovers, SlotPool, kv_slot
from draftree.models.kv.slots import LayerShape
from draftree.models.kv.slotted import SlottedModel, requested_rows
from draftree.models.memory import LOGIT_BYTES, Footprint
from draftree.models.native.blueprint import Blueprint
from draftree.models.native.decoder import KV_SCALE_BYTES, NativeDecoder
from draftree.models.native.rows import plan_rows
from draftree.models.native.shares import Share
from draftree.models.native.weights import Weights


class NativeModel(SlottedModel):
    """Model whose passes run in C.

    Args:
        blueprint: architecture of the model.
        weights: weights of the model, or its decoder.
        quantization: "int8" for 8-bit weights, "int4" for 4-bit ones, "gguf" for blocks of a file, None for the
            model's dtype.
        share: this process's share of a model that a team of processes computes; None for the whole model.

    Attributes:
        blueprint: as above.
        quantization: as above.
        kv_dtype: "int8" for keys and values in 8 bits, None for the model's dtype; see `use_kv_dtype`.

    Raises:
        NativeUnavailableError: the native kernels are unavailable.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        weights: Weights | NativeDecoder,
        *,
        quantization: str | None = None,
        share: Share | None = None,
    ) -> None:
        if isinstance(weights, Weights):
            weights = NativeDecoder(blueprint, weights, quantization=quantization, share=share)
        decoder = weights
        self.vocab_size, self.max_length = blueprint.vocab, blueprint.context
        self.supports_trees = True
        self.device, self.dtype = torch.device("cpu"), decoder.dtype
        self.fingerprint = blueprint.fingerprint
        self.quantization = quantization
        self.kv_dtype: str | None = None
        self.blueprint = blueprint
        self._decoder = decoder
        self._kv_heads = blueprint.kv_heads if share is None else len(share.kv_heads)
        pool = self._new_pool(blueprint.head_dim, self.dtype)
        super().__init__(blueprint.kind, num_layers=decoder.num_layers, pool=pool)

    def _new_pool(self, row: int, dtype: torch.dtype) -> SlotPool:
        """Return slots with `row` numbers for the key of a token and a head, and as many for its value."""
        shapes = dict.fromkeys(range(self._decoder.num_layers), LayerShape(self._kv_heads, row, row))
        return SlotPool(shapes, dtype=dtype, device=self.device, leftovers=Leftovers.UNREAD)

    def use_kv_dtype(self, kv_dtype: str) -> None:
        """Store keys and values in 8 bits from now on: symmetric codes with a float32 scale per token and head.

        Keys are rounded after their rotation. Texts differ from those of the model's dtype, and logits remain
        bit-identical in every batch and tree. No slot may be open.

        Raises:
            UnsupportedModelError: the kind is unknown, or the model cannot use it.
        """
        if kv_dtype != "int8":
            raise UnsupportedModelError(f"keys and values of kind '{kv_dtype}' are not known: the only one is int8")
        assert not self.num_open, "slots keep their format"
        self._decoder.store_codes()
        self._pool.clear()
        self._pool = self._new_pool(self.blueprint.head_dim + KV_SCALE_BYTES, torch.int8)
        self.kv_dtype = kv_dtype

    def free_slots(self) -> None:
        """Free the memory of keys and values and of logits that are not in use; no slot may be open."""
        assert not self.num_open, "their keys and values are in use"
        self._pool.clear()
        self._decoder.logit_buffers.clear()

    def settle(self) -> None:
        """Copy mapped weights now instead of beside later passes."""
        self._decoder.settle()

    def require_capture(self, layers: Sequence[int]) -> None:
        """Check that the model has these layers and that their input is the residual stream."""
        if self.blueprint.is_post_norm:
            raise UnsupportedModelError(
                f"{self.kind} has norms after its sublayers, and its hidden states are not returned by passes in C: "
                "choose a drafter that needs none, or kernels 'torch'"
            )
        super().require_capture(layers)

    @property
    def instructions(self) -> str:
        """Instruction set of the kernels."""
        return self._decoder.instructions

    @property
    def decoder(self) -> NativeDecoder:
        """Packed weights and their passes."""
        return self._decoder

    def run_with(self, decoder: NativeDecoder, pass_: Pass) -> PassResult:
        """Run a pass on the model's slots with another decoder of the same shape, such as a copy with fewer bits."""
        own, self._decoder = self._decoder, decoder
        try:
            return self.run(pass_)
        finally:
            self._decoder = own

    def quantized_copy(self, quantization: str) -> LanguageModel:
        """Return a copy with fewer bits that drafts on the model's slots."""
        from draftree.models.native.twins import QuantizedCopy  # it imports this module

        return QuantizedCopy(self, quantization)

    @property
    def footprint(self) -> Footprint:
        """Memory of packed weights, keys and values, and activations in bytes."""
        return Footprint(
            weights=self._decoder.weight_bytes,
            token=self._pool.memory.token_bytes,
            logits=self.vocab_size * LOGIT_BYTES,
            row=self._decoder.row_bytes,
        )

    def input_embedding(self) -> Tensor:
        """Return the retained embedding, or a new tensor from the packed head if tied. Never quantized."""
        return self._decoder.input_embedding()

    def output_head(self) -> Tensor:
        """Return a new tensor from the packed head, in the model's dtype; int8 weights times scales."""
        return self._decoder.output_head()

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Return hidden states after the final norm of the blueprint, float32."""
        return self._decoder.final_norm(hidden)

    def embedding_facts(self) -> EmbeddingFacts:
        """Return the blueprint's facts, which were compared with the model at load."""
        return self._decoder.embedding_facts()

    def _pass(self, jobs: Sequence[Extend], nodes: Sequence[Sequence[int]], layer_range: LayerRange) -> RangeOutput:
        slots, tokens = [kv_slot(job.slot) for job in jobs], [job.tokens for job in jobs]
        chunk = self._decoder.rows_of_chunk(sum(map(len, tokens)))
        rows = plan_rows(slots, tokens, nodes, rows_of_chunk=chunk)
        return self._decoder.run(
            self._pool.memory, rows, requested_rows(jobs, range(len(jobs))), layer_range=layer_range
        )
