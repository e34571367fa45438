"""Encoder-decoder model whose decoder runs in C, and whose encoder runs through torch once for each source."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from draftree.core.errors import UnsupportedModelError
from draftree.models.base import Extend, LanguageModel, Pass, PassResult
from draftree.models.embeddings import EmbeddingFacts
from draftree.models.kv.partial import LayerRange, RangeOutput
from draftree.models.kv.pool import kv_slot
from draftree.models.kv.slotted import requested_rows
from draftree.models.memory import Footprint
from draftree.models.native.blueprint import Blueprint
from draftree.models.native.model import NativeModel
from draftree.models.native.rows import SourceRows, plan_rows
from draftree.models.native.seq2seq.encoder import NativeSource, SourceEncoder
from draftree.models.native.weights import Weights
from draftree.models.source import Source
from draftree.models.sourced import WITHOUT_PARTS, SourcedModel
from draftree.models.torch.seq2seq.sources import SourceFacts
from draftree.sampling.decoding_rules import DecodingRules


class NativeEncoderDecoder(NativeModel, SourcedModel[NativeSource]):
    """Encoder-decoder model with passes in C.

    Args:
        blueprint: architecture of the decoder.
        weights: weights of the decoder.
        encoder: runs once for each source.
        facts: facts about sources.
        rules: settings of every text.
        quantization: "int8" or "int4" for weights of the decoder with 8 or 4 bits, None for the model's dtype.

    Raises:
        NativeUnavailableError: the native kernels are unavailable.
    """

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
        self._attended: list[np.ndarray] | None = None
        """Cross-attention of each job of the current pass, if it is wanted."""

    @property
    def footprint(self) -> Footprint:
        """Memory of weights, keys and values, and activations in bytes."""
        own = NativeModel.footprint.fget(self)  # type: ignore[attr-defined]
        return Footprint(own.weights + self._encoder.num_bytes, own.token, own.logits, own.row)

    def _encode(self, source: Source) -> Tensor:
        return self._encoder.hidden(source)

    def _keep(self, source: Source, hidden: Tensor) -> NativeSource:
        return self._encoder.keys_values(source, hidden)

    def require_capture(self, layers: Sequence[int]) -> None:
        """Raise if hidden states are wanted."""
        SourcedModel.require_capture(self, layers)

    def embedding_facts(self) -> EmbeddingFacts:
        """Raise: drafters that read the target's embedding do not read its sources."""
        raise UnsupportedModelError(f"{self.kind} {WITHOUT_PARTS}")

    def use_kv_dtype(self, kv_dtype: str) -> None:
        """Raise: keys and values of sources have the model's dtype."""
        raise UnsupportedModelError(
            f"kv_dtype is '{kv_dtype}', but {self.kind} is an encoder-decoder model: leave it out"
        )

    def quantized_copy(self, quantization: str) -> LanguageModel:
        """Raise: a copy has no sources of its own."""
        raise UnsupportedModelError(f"{self.kind} {WITHOUT_PARTS}")

    def run_attending(self, pass_: Pass) -> tuple[PassResult, list[np.ndarray]]:
        """Run a pass, and return the last layer's cross-attention of each job."""
        found = self._attended = []
        try:
            return self.run(pass_), found
        finally:
            self._attended = None

    @torch.inference_mode()
    def _pass(self, jobs: Sequence[Extend], nodes: Sequence[Sequence[int]], layer_range: LayerRange) -> RangeOutput:
        slots, tokens = [kv_slot(job.slot) for job in jobs], [job.tokens for job in jobs]
        counts, plan = [len(own) for own in tokens], self.blueprint
        rows = plan_rows(slots, tokens, nodes, rows_of_chunk=self._decoder.rows_of_chunk(sum(counts)))
        sources = [self._source_of[slot.index] for slot in slots]
        queries = None if self._attended is None else torch.empty(rows.count, plan.heads, plan.head_dim)
        output = self._decoder.run(
            self._pool.memory,
            rows,
            requested_rows(jobs, range(len(jobs))),
            layer_range=layer_range,
            sources=_rows_of(sources, counts, queries),
        )
        if self._attended is not None and queries is not None:
            for source, own in zip(sources, queries.split(counts), strict=True):
                self._attended.append(self._weights_of(source, own))
        return output

    def _weights_of(self, source: NativeSource, queries: Tensor) -> np.ndarray:
        """Return the weights of rows on a source, the mean over the heads, shape (rows, length)."""
        layer = self.blueprint.layers[-1].source
        assert layer is not None, "every layer attends to sources"
        keys = source.last_keys().repeat_interleave(self.blueprint.heads // self.blueprint.kv_heads, dim=0)
        scores = (queries.transpose(0, 1) * layer.scaling) @ keys.transpose(1, 2)
        return scores.softmax(dim=-1).mean(dim=0).numpy()


def _rows_of(sources: Sequence[NativeSource], counts: Sequence[int], queries: Tensor | None) -> SourceRows:
    """Return the sources of the rows of jobs."""
    places: dict[int, int] = {}
    table, rows = array("q"), array("q")
    for source, count in zip(sources, counts, strict=True):
        place = places.setdefault(id(source), len(places))
        if 2 * place == len(table):
            table.extend((source.memory.data_ptr(), source.length))
        rows.extend([place] * count)
    return SourceRows(rows, table, queries)
