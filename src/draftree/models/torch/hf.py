"""Causal language models of transformers, with our attention and slots.

The model runs without its own cache: our attention, registered with transformers, writes keys and values into our slots
and attends to prefix and ancestors; recurrent mixers take their states from our slots. Positions go by depth.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftree.core.errors import UnsupportedModelError
from draftree.core.tensors import runs_triton, to_device
from draftree.models.base import Commit, Extend, LayerSubset, Slot
from draftree.models.kv.slots import KVSlot, LayerRange, Leftovers, RangeOutput, SlotPool, kv_slot
from draftree.models.kv.slotted import RowOrder, SlottedModel, requested_rows
from draftree.models.kv.states import RecurrentStates, StateKey
from draftree.models.memory import LOGIT_BYTES, Footprint, activation_bytes
from draftree.models.torch.attention import NoAttention, Pass, ProbePass, announced, plan_pass, recorded, use_in_decoder
from draftree.models.torch.chunks import read_in_chunks
from draftree.models.torch.growth import Growth, TreeGrowth, found_trees, pack_wanted
from draftree.models.torch.inspection import (
    KNOWN_LAYER_TYPES,
    ReadPrompt,
    cache_windows,
    context_length,
    fingerprint,
    layer_types,
    offsets_of,
    prompt_inputs,
    require_keys_only,
)
from draftree.models.torch.layers import TorchLayers, TransformersModel
from draftree.models.torch.packing import weight_bytes
from draftree.models.torch.recurrent import MIN_CHAIN, Mixers, find_mixers, keeps_states
from draftree.models.torch.static import Inputs, Outputs, Rows, Shapes, StaticAttention, StaticPasses
from draftree.sampling.logits import TensorLogits
from draftree.sampling.tree_search import FoundTree, TreeSearch, TreeWidths


class HFModel(TransformersModel, SlottedModel):
    """Transformers model as a `LanguageModel`.

    `model`: any `…ForCausalLM` in evaluation mode. Its attention implementation is set to ours, which computes calls
    outside of our passes as transformers does. `row_buckets`: ascending numbers of rows; a pass is padded to the next
    of them, so that a row is computed by the same kernels in every batch. Empty for no padding. `shapes`: limits of
    static passes, as CUDA graphs if the device has them; None for dynamic passes only.

    Raises:
        UnsupportedModelError: the model cannot run here; with `shapes.exact`, a layer would round a row differently in
            other passes.
    """

    def __init__(self, model: Any, *, row_buckets: Sequence[int] = (), shapes: Shapes | None = None) -> None:
        self.model: Any = model.eval()
        self.config = model.config.get_text_config()
        self.vocab_size = int(self.config.vocab_size)
        self.max_length = context_length(self.config)
        self.supports_trees = True
        parameter = next(model.parameters())
        self.device, self.dtype = model.device, parameter.dtype
        self._is_exact = shapes is not None and shapes.exact
        self._exactly: Callable[[], AbstractContextManager[None]] = nullcontext
        self.row_buckets = () if self._is_exact else tuple(row_buckets)
        self._rows_keyword = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._mixers = self._found_mixers()
        num_layers = int(self.config.num_hidden_layers)
        self._layers = TorchLayers(model, num_layers)
        self.fingerprint = fingerprint(model)
        use_in_decoder(model)
        probe = self._probe(num_layers)
        self.calls = probe.calls
        if self._is_exact:
            self._compute_exactly()
        # the cache of generate drops keys that a layer without a window of its own would see: texts end before that
        forgotten = [
            window
            for layer, window in cache_windows(self.config).items()
            if layer in self.calls and self.calls[layer].window is None
        ]
        self.max_length = min([self.max_length, *forgotten])
        self._states: RecurrentStates | None = None
        if self._mixers is not None:
            shapes = None  # a level of a tree has no fixed shape
            self._states = RecurrentStates(
                self._mixers.shapes,
                device=self.device,
                min_chain=MIN_CHAIN,
                continues=self._mixers.continues,
            )
        pool = SlotPool(
            probe.shapes,
            dtype=self.dtype,
            device=self.device,
            leftovers=Leftovers.MASKED,
            num_scratch=0 if shapes is None else 1,
            states=self._states,
        )
        super().__init__(type(model).__name__, num_layers=num_layers, pool=pool)
        self._growths: dict[Growth, TreeGrowth] = {}
        self.static = None if shapes is None else self._static_passes(shapes, group=max(probe.groups))
        if shapes is not None and not self._is_exact and runs_triton(self.device):
            self._layers.compile(lambda: self._run_probe(ProbePass()))

    def _compute_exactly(self) -> None:
        """Compute each row with the same bits in every pass; raise UnsupportedModelError for a layer that cannot."""
        from draftree.models.torch.exact import exact_rows, require_exact_rows

        require_exact_rows(self.model)
        if self._mixers is not None:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} has recurrent layers, which are not exact on GPUs"
            )
        self._layers.uncompile()
        self._exactly = lambda: exact_rows(self.model)
        self._run_probe(NoAttention())

    def _static_passes(self, shapes: Shapes, *, group: int) -> StaticPasses:
        windows = [call.window for call in self.calls.values() if call.window is not None]
        return StaticPasses(
            self._static_forward,
            self._pool.memory,
            device=self.device,
            shapes=shapes,
            min_rows=min(self.row_buckets, default=1),
            row_bytes=self.vocab_size * self.dtype.itemsize,
            group=group,
            window=min(windows, default=None),
        )

    def _static_forward(
        self,
        inputs: Inputs[Tensor],
        attention: StaticAttention,
        floats: Tensor | None,
        kind: tuple[int, ...] | Growth,
    ) -> Outputs:
        """Return logits and captured hidden states of all rows, or trees."""
        if isinstance(kind, Growth):
            return self._static_trees(inputs, attention, kind)
        layers = LayerRange(0, self.num_layers, capture=kind)
        with announced(attention), self._layers.running(layers) as caught:
            logits = self._forward(inputs.tokens.unsqueeze(0), inputs.positions.unsqueeze(0), None)
        captured = caught.stacked(kind)
        return (logits,) if captured is None else (logits, captured)

    def _static_trees(self, inputs: Inputs[Tensor], attention: StaticAttention, growth: Growth) -> Outputs:
        def read(rows: Inputs[Tensor], _: Tensor | None) -> tuple[Tensor, None]:
            with announced(attention.over(rows)), self._layers.numbered():
                tokens, positions = rows.tokens.unsqueeze(0), rows.positions.unsqueeze(0)
                return wide(self._forward(tokens, positions, rows.requested)), None

        logits, _ = read(replace(inputs, requested=inputs.requested[: growth.trees]), None)
        scratch = self._pool.memory.length
        return (self._growths[growth].grow(inputs, logits, None, read=read, scratch=scratch),)

    @property
    def num_warm_ups(self) -> int:
        """Number of slower first passes: on a GPU they load and choose kernels; a shape is captured when first used."""
        return 1 if self.static is not None or self.device.type != "cpu" else 0

    @property
    def footprint(self) -> Footprint:
        return Footprint(
            weights=weight_bytes(self.model),
            token=self._pool.memory.token_bytes,
            logits=self.vocab_size * LOGIT_BYTES,
            row=activation_bytes(self.config, self.dtype),
            graphs=0 if self.static is None else self.static.most_bytes,
            state=0 if self._states is None else self._states.slot_bytes,
            node=0 if self._states is None else self._states.memory.row_bytes,
        )

    def attach(self, model: Any) -> None:
        """Attach a model of the same architecture after `release`."""
        self.model, self._norm = model, None
        use_in_decoder(model)
        self._layers.bind(model)
        if self._mixers is not None:
            self._mixers.bind(model)

    def release(self) -> None:
        """Close every slot, free their memory and drop the reference to the model, which keeps our attention."""
        self.model = self._norm = None
        self._layers.release()
        if self.static is not None:
            self.static.drop()
        self._pool.clear()
        if self._mixers is not None and self._states is not None:
            self._mixers.release()
            self._states.clear()

    def _found_mixers(self) -> Mixers | None:
        """Return the recurrent mixers; None for a model whose layers all attend."""
        kind = type(self.model).__name__
        if not self.model._can_set_attn_implementation():
            raise UnsupportedModelError(f"{kind} does not let its attention be chosen")
        if keeps_states(self.config):
            return find_mixers(self.model)
        require_keys_only(self.model)
        strange = layer_types(self.config) - KNOWN_LAYER_TYPES
        if strange:
            raise UnsupportedModelError(f"{kind} has layers of type {', '.join(sorted(strange))}")
        return None

    def _probe(self, num_layers: int) -> ProbePass:
        probe = ProbePass()
        with self._layers.learning():
            self._run_probe(probe)
        self._require_calls(probe, num_layers)
        return probe

    @torch.inference_mode()
    def _run_probe(self, probe: Pass) -> None:
        tokens = torch.zeros(1, 2, dtype=torch.long, device=self.device)
        with announced(probe), self._layers.numbered():
            self._forward(tokens, torch.arange(2, device=self.device).unsqueeze(0), None)

    def _require_calls(self, probe: ProbePass, num_layers: int) -> None:
        """Check that the layers call the registered attention as the pass expects."""
        if self._mixers is not None:
            self._require_types(probe)
        elif len(probe.shapes) != num_layers:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} calls the registered attention in {len(probe.shapes)} of "
                f"{num_layers} layers"
            )
        if probe.windows_of_masks != probe.windows_of_calls:
            # the self-check is too short to detect this: real windows span thousands of tokens
            raise UnsupportedModelError(
                f"{type(self.model).__name__} masks with windows {sorted(probe.windows_of_masks)} and calls its "
                f"attention with {sorted(probe.windows_of_calls)}, so the window of each layer is unknown"
            )

    def _require_types(self, probe: ProbePass) -> None:
        """Check that some layers have states, and that the others attend to all tokens or to a window."""
        assert self._mixers is not None, "the model has states"
        if not self._mixers.mixers:
            raise UnsupportedModelError(f"{type(self.model).__name__} keeps its states outside of transformers' cache")
        names = getattr(self.config, "layer_types", None) or ()
        attending = {name for layer, name in enumerate(names) if layer in probe.shapes.keys() - self._mixers.layers}
        strange = attending - KNOWN_LAYER_TYPES
        if strange:
            raise UnsupportedModelError(f"{type(self.model).__name__} has layers of type {', '.join(sorted(strange))}")

    def _forward(self, tokens: Tensor, positions: Tensor, rows: Tensor | None) -> Tensor:
        arguments: dict[str, Any] = {
            "input_ids": tokens,
            "position_ids": positions,
            "use_cache": False,
        }
        if rows is not None and self._rows_keyword:
            arguments["logits_to_keep"] = rows
        with self._exactly():
            logits = self._model_logits(arguments)
        if logits is None:
            return torch.empty(0, self.vocab_size, device=self.device)
        return logits[0] if rows is None or self._rows_keyword else logits[0, rows]

    def _model_logits(self, arguments: dict[str, Any]) -> Tensor | None:
        """Run the model; None if another process has its head."""
        return self.model(**arguments).logits

    def last_keys(self, slot: Slot, *, has_window: bool) -> tuple[Tensor, Tensor]:
        layers = [layer for layer, call in self.calls.items() if (call.window is not None) == has_window]
        if not layers:
            kind = "with" if has_window else "without"
            raise UnsupportedModelError(f"{self.kind} has no layer {kind} a sliding window that attends")
        memory, index = self._pool.memory, kv_slot(slot).index
        return tuple(part[max(layers)][index, :, : slot.length] for part in (memory.keys, memory.values))  # type: ignore[return-value]

    @torch.inference_mode()
    def read(self, input_ids: Tensor, mask: Tensor | None, extra_inputs: Mapping[str, Any]) -> list[ReadPrompt]:
        """Prefill prompts with the model's own forward pass; padding is not kept."""
        rows_wanted = {"logits_to_keep": 1} if self._rows_keyword else {}
        inputs = prompt_inputs(self.model, input_ids, mask=mask, use_cache=False, **rows_wanted, **extra_inputs)
        chunks = read_in_chunks(self.model) if self._mixers is None or self._mixers.continues else nullcontext()
        with recorded() as calls, self._reading() as states, self._layers.numbered(), chunks:
            logits = self.model(**inputs).logits[:, -1].float()
        width = input_ids.shape[1]
        lengths = [width] * len(logits) if mask is None else mask.sum(dim=1).tolist()
        offsets = offsets_of(inputs.get("position_ids"), lengths, width)
        prompts = []
        for row, (length, offset) in enumerate(zip(lengths, offsets, strict=True)):
            layers = {
                layer: (keys[row, :, width - length : -1], values[row, :, width - length : -1])
                for layer, (keys, values) in calls.items()
            }
            row_states = {key: state[row] for key, state in states.items()}
            prompts.append(ReadPrompt(layers, length, 0, offset, logits[row], row_states))
        return prompts

    def _reading(self) -> AbstractContextManager[Mapping[StateKey, Tensor]]:
        """Record states before the last tokens of prompts, if the model has any."""
        return nullcontext({}) if self._mixers is None else self._mixers.reading()

    def adopt(self, prompt: ReadPrompt) -> KVSlot:
        """Open a slot with all but the last token of a prompt that was prefilled by the model's own forward pass."""
        assert set(prompt.layers) == set(self.calls), "every attention layer was recorded"
        slot = self._pool.adopt(prompt.layers, prompt.length - 1)
        slot.offset = prompt.offset
        if self._states is not None and slot.length:
            self._states.adopt(slot, prompt.cache)
        return slot

    @torch.inference_mode()
    def _pass(self, jobs: Sequence[Extend], nodes: Sequence[Sequence[int]], layer_range: LayerRange) -> RangeOutput:
        if self.static is None or not replace(layer_range, capture=()).is_whole(self.num_layers):
            return self._run(jobs, nodes, layer_range)
        rows = [Rows(kv_slot(job.slot), job.tokens, slot_nodes) for job, slot_nodes in zip(jobs, nodes, strict=True)]
        result = self.static.run(layer_range.capture, rows, requested=requested_rows(jobs))
        if result is None:
            return self._run(jobs, nodes, layer_range)
        outputs, requested = result
        logits = outputs[0]
        if len(logits):  # the head is in this process
            logits = logits.index_select(0, requested)
        # the next pass overwrites the outputs
        captured = outputs[1].clone() if layer_range.capture else None
        return layer_range.output(TensorLogits(wide(logits)), captured)

    @torch.inference_mode()
    def grow(self, jobs: Sequence[Extend], shape: TreeWidths, searches: Sequence[TreeSearch]) -> list[FoundTree] | None:
        growth = Growth.of(shape, searches)
        counts = [len(job.tokens) for job in jobs]
        if self.static is None or not growth.fits(self.static, counts):
            return None
        if growth not in self._growths:
            self._growths[growth] = TreeGrowth(growth, device=self.device, per_tile=self.static.per_tile)
        slots = [kv_slot(job.slot) for job in jobs]
        ends = [slot.length + count for slot, count in zip(slots, counts, strict=True)]
        self._pool.lengthen(max(ends) + growth.num_read)
        nodes = self._pool.append(slots, jobs)
        wanted = pack_wanted(
            growth,
            searches,
            slots=[slot.index for slot in slots],
            starts=ends,
            positions=[slot.offset + end for slot, end in zip(slots, ends, strict=True)],
        )
        rows = [Rows(slot, job.tokens, own) for slot, job, own in zip(slots, jobs, nodes, strict=True)]
        result = self.static.run(growth, rows, requested=requested_rows(jobs), extra=wanted)
        assert result is not None, "the pass fits"
        trees = found_trees(result[0][0][: len(jobs)])
        self._pool.commit([Commit(slot, own) for slot, own in zip(slots, nodes, strict=True)])
        for slot, tree in zip(slots, trees, strict=True):
            slot.append(tree.parents_of_read())
        num_read = sum(place >= 0 for tree in trees for place in tree.read)
        self.num_sublayer_runs += 2 * self.num_layers * (sum(counts) + num_read)
        return trees

    def _require_layers(self, part: LayerSubset) -> None:
        if int(getattr(self.config, "num_kv_shared_layers", None) or 0):
            raise UnsupportedModelError(
                f"{self.kind} shares keys and values between its layers, so no part of them can run alone: "
                "choose a drafter that runs no part of the model"
            )
        self._layers.require(part)

    def _run(self, jobs: Sequence[Extend], nodes: Sequence[Sequence[int]], layer_range: LayerRange) -> RangeOutput:
        order = RowOrder(jobs, nodes)
        current: Pass
        if self._is_exact and self.static is not None:
            rows_of_slots = zip(order.slots, order.nodes, strict=True)
            current = self.static.attention([Rows(slot, [0] * len(own), own) for slot, own in rows_of_slots])
        else:
            current = plan_pass(self._pool.memory, order.slots, order.nodes, self.device)
        tokens = order.tokens
        requested = order.requested
        padding = next((bucket - len(tokens) for bucket in self.row_buckets if bucket >= len(tokens)), 0)
        rows = None
        if padding or requested != list(range(len(tokens))):
            rows = to_device(requested or [0], self.device)  # the head needs at least one row
        tokens_row = to_device([tokens + [0] * padding], self.device)
        positions_row = to_device([order.positions + [0] * padding], self.device)
        routed = self._routed(current, order)
        if layer_range.is_whole(self.num_layers):
            with routed:
                return RangeOutput(TensorLogits(wide(self._forward(tokens_row, positions_row, rows)[: len(requested)])))
        place = to_device(order.places, self.device)
        if layer_range.hidden is not None:
            layer_range = replace(layer_range, hidden=layer_range.hidden[place.argsort()])
        with routed, self._layers.running(layer_range) as caught:
            logits = self._forward(tokens_row, positions_row, rows)
        captured = caught.stacked(layer_range.captured_layers)
        return layer_range.output(
            TensorLogits(wide(logits[: len(requested)])), None if captured is None else captured[place]
        )

    @contextmanager
    def _routed(self, current: Pass, order: RowOrder) -> Iterator[None]:
        """Let attentions and mixers run over the rows of a pass."""
        with announced(current), self._layers.numbered():
            if self._mixers is None or self._states is None:
                yield
                return
            plan = self._states.plan(order.slots, order.nodes, order.settled)
            with self._mixers.running(self._states.memory, plan):
                yield


def wide(logits: Tensor) -> Tensor:
    """Return logits in float32, or in float64 as they are."""
    return logits if logits.dtype == torch.float64 else logits.float()
