"""Encoder-decoder model with a native decoder; its encoder runs in PyTorch, once for each source."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftree.core.errors import UnsupportedModelError
from draftree.models.base import EmbeddingFacts, Extend, LanguageModel
from draftree.models.kv.slots import LayerRange, RangeOutput, kv_slot
from draftree.models.kv.slotted import WITHOUT_PARTS, SourcedModel, requested_rows
from draftree.models.memory import Footprint
from draftree.models.native.blueprint import Blueprint
from draftree.models.native.decoder import SourceRows, plan_rows
from draftree.models.native.library import LANES
from draftree.models.native.model import NativeModel
from draftree.models.native.weights import ModelWeights, Weights
from draftree.models.source import Source
from draftree.models.torch.seq2seq.sources import SourceFacts, encoder_input
from draftree.sampling.decoding_rules import DecodingRules


@dataclass(slots=True, eq=False)
class NativeSource:
    """Keys and values of a source for all layers (layout: `csrc/attention_source.h`)."""

    source: Source
    memory: Tensor  # shape (layers, 2, heads, padded length, head_dim); keys of 16 positions are transposed
    length: int  # number of positions
    num_slots: int = 0  # number of slots that refer to it

    def last_keys(self) -> Tensor:
        """Return the keys of the last layer, float32 of shape (heads, length, head_dim)."""
        keys = self.memory[-1, 0].float()
        heads, padded, dim = keys.shape
        rows = keys.view(heads, padded // LANES, dim, LANES).transpose(2, 3)
        return rows.reshape(heads, padded, dim)[:, : self.length]


@dataclass(frozen=True, slots=True, eq=False)
class SourceEncoder:
    """What runs in PyTorch, once for each source."""

    encoder: Any
    products: Sequence[tuple[nn.Linear, nn.Linear]]  # products of keys and of values of each layer
    heads: int  # number of their heads
    device: torch.device  # device of the encoder
    dtype: torch.dtype  # dtype of the encoder

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [
            *self.encoder.parameters(),
            *(parameter for pair in self.products for linear in pair for parameter in linear.parameters()),
        ]

    @property
    def num_bytes(self) -> int:
        unique = {id(parameter): parameter for parameter in self.parameters}
        return sum(parameter.numel() * parameter.element_size() for parameter in unique.values())

    @torch.inference_mode()
    def hidden(self, source: Source) -> Tensor:
        """Return the encoder's output, shape (1, length, features)."""
        inputs = encoder_input(source, self.device, self.dtype)
        hidden: Tensor = self.encoder(inputs, return_dict=True).last_hidden_state
        return hidden

    @torch.inference_mode()
    def keys_values(self, source: Source, hidden: Tensor) -> NativeSource:
        length = hidden.shape[1]
        padding = -length % LANES
        layers = []
        for pair in self.products:
            both = [F.linear(hidden[0], linear.weight, linear.bias) for linear in pair]
            keys, values = (
                F.pad(part.view(length, self.heads, -1).transpose(0, 1), (0, 0, 0, padding)) for part in both
            )
            heads, padded, dim = keys.shape
            keys = keys.reshape(heads, padded // LANES, LANES, dim).transpose(2, 3).reshape(heads, padded, dim)
            layers.append(torch.stack([keys, values]))
        return NativeSource(source, torch.stack(layers).contiguous(), length)


class NativeEncoderDecoder(NativeModel, SourcedModel[NativeSource]):
    def __init__(
        self,
        blueprint: Blueprint,
        weights: Weights,
        *,
        encoder: SourceEncoder,
        facts: SourceFacts,
        rules: DecodingRules,
        quantization: str | None = None,
    ) -> None:
        super().__init__(blueprint, weights, quantization=quantization)
        self.rules = rules
        self.source_vocab_size, self.max_source_length = facts.source_vocab_size, facts.max_source_length
        self.feature_shape, self.probe_source = facts.feature_shape, facts.probe_source
        self._encoder = encoder

    @property
    def footprint(self) -> Footprint:
        decoder = super().footprint
        return replace(decoder, weights=decoder.weights + self._encoder.num_bytes)

    def _encode(self, source: Source) -> Tensor:
        return self._encoder.hidden(source)

    def _keep(self, source: Source, hidden: Tensor) -> NativeSource:
        return self._encoder.keys_values(source, hidden)

    def require_capture(self, layers: Sequence[int]) -> None:
        SourcedModel.require_capture(self, layers)

    def embedding_facts(self) -> EmbeddingFacts:
        raise UnsupportedModelError(f"{self.kind} {WITHOUT_PARTS}")

    def use_kv_dtype(self, kv_dtype: str) -> None:
        raise UnsupportedModelError(
            f"kv_dtype is '{kv_dtype}', but {self.kind} is an encoder-decoder model: leave it out"
        )

    def quantized_copy(self, quantization: str) -> LanguageModel:
        raise UnsupportedModelError(f"{self.kind} {WITHOUT_PARTS}")

    @torch.inference_mode()
    def _pass(self, jobs: Sequence[Extend], nodes: Sequence[Sequence[int]], layer_range: LayerRange) -> RangeOutput:
        slots, tokens = [kv_slot(job.slot) for job in jobs], [job.tokens for job in jobs]
        counts = list(map(len, tokens))
        plan = self.blueprint
        rows = plan_rows(slots, tokens, nodes, rows_of_chunk=self._decoder.rows_of_chunk(sum(counts)))
        sources = [self._source_of[slot.index] for slot in slots]
        queries = None if self._attended is None else torch.empty(rows.count, plan.heads, plan.head_dim)
        output = self._decoder.run(
            self._pool.memory,
            rows,
            requested_rows(jobs),
            layer_range=layer_range,
            sources=_rows_of(sources, counts, queries),
        )
        if self._attended is not None and queries is not None:
            for source, part in zip(sources, queries.split(counts), strict=True):
                self._attended.append(self._weights_of(source, part))
        return output

    def _weights_of(self, source: NativeSource, queries: Tensor) -> np.ndarray:
        """Return the weights of rows on a source, the mean over the heads, shape (rows, length)."""
        layer = self.blueprint.layers[-1].source
        assert layer is not None, "every layer attends to sources"
        keys = source.last_keys().repeat_interleave(self.blueprint.heads // self.blueprint.kv_heads, dim=0)
        scores = (queries.transpose(0, 1) * layer.scaling) @ keys.transpose(1, 2)
        return scores.softmax(dim=-1).mean(dim=0).numpy()


def _rows_of(sources: Sequence[NativeSource], counts: Sequence[int], queries: Tensor | None) -> SourceRows:
    places: dict[int, int] = {}
    table, rows = array("q"), array("q")
    for source, count in zip(sources, counts, strict=True):
        place = places.setdefault(id(source), len(places))
        if 2 * place == len(table):
            table.extend((source.memory.data_ptr(), source.length))
        rows.extend([place] * count)
    return SourceRows(rows, table, queries)


class DecoderWeights(ModelWeights):
    """Weights of a decoder; those that the encoder or sources need are kept."""

    def __init__(self, model: Any, kept: set[int]) -> None:
        super().__init__(model)
        self._owner, self._kept = model, kept

    def get(self, name: str) -> Tensor:
        """Return a parameter or a buffer in the model's dtype; a bias of one row as a vector."""
        if name in self._parameters:
            return super().get(name)
        module, _, attribute = name.rpartition(".")
        value: Tensor = getattr(self._owner.get_submodule(module), attribute)
        return value.flatten() if value.shape[0] == 1 else value

    def release(self, name: str) -> None:
        if name in self._parameters and id(self._parameters[name]) not in self._kept:
            super().release(name)
