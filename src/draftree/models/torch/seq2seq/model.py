"""Encoder-decoder models of transformers as `EncoderDecoder`, with our attention and slots in the decoder."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from draftree.core.errors import UnsupportedModelError
from draftree.models.base import Extend
from draftree.models.kv.slots import LayerRange, LayerShape, Leftovers, RangeOutput, SlotPool
from draftree.models.kv.slotted import RowOrder, SourcedModel
from draftree.models.memory import LOGIT_BYTES, Footprint, activation_bytes
from draftree.models.source import Source
from draftree.models.torch.attention import plan_pass
from draftree.models.torch.inspection import UNBOUNDED, cache_name, fingerprint
from draftree.models.torch.packing import weight_bytes
from draftree.models.torch.seq2seq.layers import DecoderFunction, decoder_function, decoder_of
from draftree.models.torch.seq2seq.passes import (
    BiasTables,
    DecoderLayers,
    DecoderPass,
    EncodedSource,
    RecordedCalls,
    announced,
    plan_cross,
    replace_positions,
    restore_positions,
    use_in,
)
from draftree.models.torch.seq2seq.sources import encoder_input, source_facts
from draftree.sampling.decoding_rules import DecodingRules, decoding_rules
from draftree.sampling.logits import TensorLogits


def empty_cache(shapes: dict[int, tuple[int, int, int]], *, dtype: torch.dtype, device: torch.device) -> Any:
    """Return the cache.

    transformers' cross-attentions project the encoder's output unless the cache they are given holds their keys.
    This one holds one position of zeros for each layer, which our attention replaces by the keys of each row's
    source.
    """
    from transformers import DynamicCache, EncoderDecoderCache

    class PassedThrough(DynamicCache):
        def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            return key_states, value_states

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return 0

        def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
            return query_length, 0

    cross = DynamicCache()
    for layer, (heads, key_dim, value_dim) in sorted(shapes.items()):
        keys, values = (torch.zeros(1, heads, 1, size, dtype=dtype, device=device) for size in (key_dim, value_dim))
        cross.update(keys, values, layer)
    cache = EncoderDecoderCache(PassedThrough(), cross)
    assert all(cache.is_updated.get(layer) for layer in shapes), "no layer projects the encoder's output"
    return cache


class HFEncoderDecoder(SourcedModel[EncodedSource]):
    """Transformers `…ForConditionalGeneration` as an `EncoderDecoder`.

    Its attention is set to ours, which computes calls outside of our passes as transformers does.
    """

    def __init__(self, model: Any, rules: DecodingRules | None = None) -> None:
        kind = type(model).__name__
        self.model: Any = model.eval()
        self.config = model.config
        self.device, self.dtype = model.device, next(model.parameters()).dtype
        self.rules = decoding_rules(model) if rules is None else rules
        facts = source_facts(model)
        self.source_vocab_size, self.max_source_length = facts.source_vocab_size, facts.max_source_length
        self.feature_shape, self.probe_source = facts.feature_shape, facts.probe_source
        if int(getattr(model.config, "num_experts", None) or 0) > 1:
            raise UnsupportedModelError(
                f"{kind} limits the tokens of each expert in a pass, so a token's logits depend on the others: use a "
                "model without experts"
            )
        if not model._can_set_attn_implementation():
            raise UnsupportedModelError(f"{kind} does not let its attention be chosen")
        self._decoder: Any = decoder_of(model)
        self.supports_trees = True
        self.fingerprint = fingerprint(model)
        use_in(model)
        places = replace_positions(model, self._decoder)
        self.max_length = UNBOUNDED if places is None else places
        self._cache_name = cache_name(model.forward)
        self._takes_positions = "decoder_position_ids" in inspect.signature(model.forward).parameters
        self._tables = BiasTables()
        shapes = self._probe()
        self.function: DecoderFunction | None = decoder_function(model, self._decoder)
        """The decoder without its modules; None to run them."""
        self._runs_function = self.function is not None
        self._weight_bytes = weight_bytes(model)
        pool = SlotPool(shapes, dtype=self.dtype, device=self.device, leftovers=Leftovers.MASKED)
        super().__init__(kind, num_layers=len(shapes), pool=pool)

    @torch.inference_mode()
    def _probe(self) -> dict[int, LayerShape]:
        """Learn the decoder's attention modules and their shapes; returns those of self-attention by layer."""
        calls = RecordedCalls()
        hidden = self._encode(self.probe_source)
        logits = self._record(hidden, 2, calls)
        self.vocab_size = int(logits.shape[-1])
        cross = [module for module, (keys, _) in calls.keys.items() if keys.shape[2] == hidden.shape[1]]
        self_attentions = [module for module, (keys, _) in calls.keys.items() if keys.shape[2] == 2]
        if (
            not self_attentions
            or len(self_attentions) != len(cross)
            or len(self_attentions) + len(cross) != len(calls.keys)
        ):
            raise UnsupportedModelError(
                f"{type(self.model).__name__} calls the registered attention in {len(self_attentions)} self-attentions "
                f"and {len(cross)} cross-attentions of its decoder"
            )
        self._modules = DecoderLayers(
            {module: layer for layer, module in enumerate(self_attentions)},
            {module: layer for layer, module in enumerate(cross)},
        )
        shapes, stubs = {}, {}
        for layer, (module, other) in enumerate(zip(self_attentions, cross, strict=True)):
            (keys, values), (far_keys, far_values) = calls.keys[module], calls.keys[other]
            shapes[layer] = LayerShape(keys.shape[1], keys.shape[3], values.shape[3])
            stubs[layer] = (far_keys.shape[1], far_keys.shape[3], far_values.shape[3])
        self._cache = empty_cache(stubs, dtype=self.dtype, device=self.device)
        self._stub = hidden.new_zeros(1, 1, hidden.shape[2])
        return shapes

    def _encode(self, source: Source) -> Tensor:
        inputs = encoder_input(source, self.device, self.dtype)
        return self.model.get_encoder()(inputs, return_dict=True).last_hidden_state

    def _record(self, hidden: Tensor, rows: int, calls: RecordedCalls) -> Tensor:
        """Run the decoder over a few tokens as transformers does, without a cache."""
        tokens = torch.full((1, rows), self.rules.start_ids[0], device=self.device)
        with announced(calls):
            return self._logits(hidden, tokens, use_cache=False)

    def _logits(self, hidden: Tensor, tokens: Tensor, **extra_inputs: Any) -> Tensor:
        from transformers.modeling_outputs import BaseModelOutput

        outputs = BaseModelOutput(last_hidden_state=hidden)
        logits: Tensor = self.model(
            encoder_outputs=outputs, decoder_input_ids=tokens, return_dict=True, **extra_inputs
        ).logits
        return logits[0] if logits.dtype == torch.float64 else logits[0].float()

    @property
    def footprint(self) -> Footprint:
        return Footprint(
            weights=self._weight_bytes,
            token=self._pool.memory.token_bytes,
            logits=self.vocab_size * LOGIT_BYTES,
            row=activation_bytes(self.config, self.dtype),
        )

    @property
    def num_warm_ups(self) -> int:
        return 0 if self.device.type == "cpu" else 1

    def _keep(self, source: Source, hidden: Tensor) -> EncodedSource:
        if self.function is not None:
            return EncodedSource(source, self.function.encoded(hidden), hidden.shape[1])
        calls = RecordedCalls()
        self._record(hidden, 1, calls)
        return EncodedSource(source, [calls.keys[module] for module in self._modules.cross], hidden.shape[1])

    @torch.inference_mode()
    def _pass(self, jobs: Sequence[Extend], nodes: Sequence[Sequence[int]], layers: LayerRange) -> RangeOutput:
        order = RowOrder(jobs, nodes)
        sources = [self._source_of[slot.index] for slot in order.slots]
        rows = torch.tensor([order.tokens, order.positions], device=self.device)
        current = DecoderPass(
            self._modules,
            plan_pass(self._pool.memory, order.slots, order.nodes, self.device),
            plan_cross(sources, order.counts, self.device),
            tokens=rows[0],
            positions=rows[1],
            num_positions=max(order.positions) + 1,
            tables=self._tables,
            weighed=None if self._attended is None else list(zip(sources, order.counts, strict=True)),
        )
        wanted = None
        if order.requested != list(range(len(order.tokens))):
            wanted = torch.tensor(order.requested, dtype=torch.long, device=self.device)
        with announced(current):
            logits = self._scored(current, rows, wanted)
        if self._attended is not None:
            self._attended.extend(current.weights_of(order.jobs))
        return RangeOutput(TensorLogits(logits))

    def pack(self) -> None:
        """Use prepacked float32 weights in later passes; the modules of the decoder cannot run afterwards."""
        assert self.function is not None, "modules are not packed"
        self.function.pack()
        for linear in self.function.packed_linears():
            linear.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def attach(self, model: Any) -> None:
        self.model, self._decoder = model, decoder_of(model)
        use_in(model)
        replace_positions(model, self._decoder)
        if self._runs_function:
            self.function = decoder_function(model, self._decoder)

    def release(self) -> None:
        """Close every slot, free their memory, restore the modules and drop the reference to the model."""
        restore_positions(self._decoder)
        self._runs_function = self.function is not None
        self._clear()
        self.model = self._decoder = self.function = None

    def _clear(self) -> None:
        self._pool.clear()
        self._encoded.clear()
        self._source_of.clear()

    def run_modules(self) -> None:
        """Run the modules of the decoder in later passes; closes all slots."""
        self.function = None
        self._clear()

    def _scored(self, current: DecoderPass, rows: Tensor, wanted: Tensor | None) -> Tensor:
        """Return logits of the wanted rows; `rows` holds tokens and positions."""
        if self.function is not None:
            scores = self.function.run(current, wanted)
            return scores if scores.dtype == torch.float64 else scores.float()
        inputs = {self._cache_name: self._cache}
        if self._takes_positions:
            inputs["decoder_position_ids"] = rows[1:]
        logits = self._logits(self._stub, rows[:1], use_cache=True, **inputs)
        return logits if wanted is None else logits[wanted]
