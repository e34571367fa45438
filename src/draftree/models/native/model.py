"""A decoder that runs in C, behind the model seam. Nothing of transformers is left in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftree.models.base import Extend
from draftree.models.hf import HFModel
from draftree.models.memory import LOGIT_BYTES, Footprint
from draftree.models.native.decoder import NativeDecoder
from draftree.models.native.rows import plan_rows
from draftree.models.sketch import Outcome, Stretch
from draftree.models.slot_pool import Leftovers, SlotPool, kv_slot
from draftree.models.slotted import SlottedModel, asked_rows


class NativeModel(SlottedModel):
    """A model whose passes run in C.

    Args:
        decoder: with its weights.
        kind: what messages call it.
        max_length: positions that it knows.
        fingerprint: tells it from others.
    """

    def __init__(self, decoder: NativeDecoder, *, kind: str, max_length: int, fingerprint: str) -> None:
        self.vocab_size, self.max_length = decoder.vocab_size, max_length
        self.supports_trees = True
        self.device, self.dtype = torch.device("cpu"), decoder.dtype
        self.fingerprint = fingerprint
        self._decoder = decoder
        shapes = dict.fromkeys(range(decoder.num_layers), decoder.layer_shape)
        pool = SlotPool(shapes, dtype=self.dtype, device=self.device, leftovers=Leftovers.UNREAD)
        super().__init__(kind, num_layers=decoder.num_layers, pool=pool)

    @property
    def instructions(self) -> str:
        """What passes compute with."""
        return self._decoder.instructions

    @property
    def footprint(self) -> Footprint:
        """Bytes of packed weights, of keys and values, and of what a pass works on."""
        return Footprint(
            weights=self._decoder.weight_bytes,
            token=self._pool.memory.token_bytes,
            logits=self.vocab_size * LOGIT_BYTES,
            row=self._decoder.row_bytes,
        )

    def _pass(self, jobs: Sequence[Extend], nodes: Sequence[Sequence[int]], stretch: Stretch) -> Outcome:
        slots, tokens = [kv_slot(job.slot) for job in jobs], [job.tokens for job in jobs]
        rows = plan_rows(slots, tokens, nodes, rows_of_chunk=self._decoder.rows_of_chunk)
        return self._decoder.run(self._pool.memory, rows, asked_rows(jobs, range(len(jobs))), stretch=stretch)


def lower(model: HFModel, *, quantization: str | None = None) -> NativeModel:
    """The same model with passes in C, if it is built as most decoders are. It gives up its own weights.

    Args:
        model: without open slots.
        quantization: "int8" for weights of 8 bits, None for the model's own.

    Raises:
        NativeUnavailableError: it is built otherwise, or there is no C pass here; nothing has changed then.
    """
    decoder = NativeDecoder(model.model, model.calls, quantization=quantization)
    return NativeModel(decoder, kind=model.kind, max_length=model.max_length, fingerprint=model.fingerprint)
