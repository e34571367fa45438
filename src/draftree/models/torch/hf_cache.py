"""Models that do not call the registered attention (bloom, mpt, falcon, …): chains in transformers' own cache.

Each slot has its own cache; a tentative chain is appended to it, and rejected tokens are cropped. Each sequence is one
forward pass, so a batch costs as much as its sequences one by one.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftree.models.base import (
    ALL_LAYERS,
    Close,
    Commit,
    CountedSlot,
    Edit,
    Extend,
    Fork,
    Pass,
    PassResult,
    Slot,
    SlotIds,
    Truncate,
)
from draftree.models.kv.slots import LayerRange
from draftree.models.memory import LOGIT_BYTES, Footprint, activation_bytes
from draftree.models.torch.attention import windows_of_masks
from draftree.models.torch.inspection import (
    ReadPrompt,
    cache_name,
    cache_windows,
    context_length,
    offsets_of,
    prompt_inputs,
    refuse_state,
    takes_positions,
)
from draftree.models.torch.layers import TorchLayers, TransformersModel
from draftree.models.torch.packing import weight_bytes
from draftree.sampling.logits import TensorLogits


@dataclass(slots=True, eq=False)
class CacheSlot(CountedSlot):
    """A slot with a transformers cache. Mutated by its model only."""

    cache: Any = field(kw_only=True)
    num_pads: int = 0  # masked padding tokens before the prefix
    offset: int = 0  # position minus index of a token

    def set_length(self, length: int) -> None:
        """Crop the cache to a prefix of this length; drop the tentative chain."""
        surplus = self.length + self.num_tentative - length
        if surplus:
            self.cache.crop(-surplus)
        self.length, self.num_tentative = length, 0


class CachedModel(TransformersModel):
    """Transformers model with its own attention and cache; chains only."""

    def __init__(self, model: Any) -> None:
        self.model: Any = model.eval()
        config = model.config.get_text_config()
        refuse_state(model)
        self.vocab_size = int(config.vocab_size)
        self.max_length = context_length(config)
        windows = set(cache_windows(config).values())
        if windows:
            # without a window in the mask, the cache of generate drops keys that would be visible
            self.max_length = min([self.max_length, *(windows - windows_of_masks(model))])
        self.supports_trees = False
        self._ids = SlotIds()
        self.device, self.dtype = model.device, next(model.parameters()).dtype
        self._rows_keyword = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._cache_name = cache_name(model.forward)
        self._takes_positions = takes_positions(model)
        self._layers = TorchLayers(model, int(config.num_hidden_layers))

    @property
    def footprint(self) -> Footprint:
        config = self.model.config.get_text_config()
        heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
        head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        return Footprint(
            weights=weight_bytes(self.model),
            token=2 * int(config.num_hidden_layers) * heads * head_dim * self.dtype.itemsize,
            logits=self.vocab_size * LOGIT_BYTES,
            row=activation_bytes(config, self.dtype),
        )

    def attach(self, model: Any) -> None:
        """Attach a model of the same architecture after `release`."""
        self.model = model
        self._layers.bind(model)

    def release(self) -> None:
        """Close every slot and drop the reference to the model."""
        self.model = None
        self._layers.release()
        self._ids = SlotIds()

    def reserve(self, num_slots: int, length: int) -> None:
        """Do nothing: transformers' caches grow on demand."""

    @property
    def num_open(self) -> int:
        return self._ids.num_taken

    def open(self) -> CacheSlot:
        from transformers import DynamicCache

        # without the configuration no layer gets a sliding cache, which could not be rolled back
        return CacheSlot(self._ids.take(), cache=DynamicCache())

    @torch.inference_mode()
    def read(self, input_ids: Tensor, mask: Tensor | None, extra_inputs: Mapping[str, Any]) -> list[ReadPrompt]:
        """Prefill prompts with the model's own forward pass, as `generate` does; padding is kept."""
        from transformers import DynamicCache

        cache: Any = DynamicCache()
        inputs = prompt_inputs(self.model, input_ids, mask=mask, cache=cache, use_cache=True, **extra_inputs)
        logits = self.model(**inputs).logits[:, -1].float()
        width = input_ids.shape[1]
        lengths = [width] * len(logits) if mask is None else mask.sum(dim=1).tolist()
        offsets = offsets_of(inputs.get("position_ids"), lengths)
        prompts = []
        for row, (length, offset) in enumerate(zip(lengths, offsets, strict=True)):
            layers = {
                place: (layer.keys[row], layer.values[row])
                for place, layer in enumerate(cache.layers)
                if layer.keys is not None
            }
            prompts.append(ReadPrompt(layers, length, width - length, offset, logits[row]))
        return prompts

    @torch.inference_mode()
    def adopt(self, prompt: ReadPrompt) -> CacheSlot:
        """Open a slot with all but the last token of a prompt that was prefilled by the model's own forward pass."""
        slot = self.open()
        for layer, (keys, values) in prompt.layers.items():
            slot.cache.update(keys[None, :, :-1], values[None, :, :-1], layer)
        slot.num_pads = prompt.num_pads
        slot.offset = prompt.offset
        slot.length = prompt.length - 1
        return slot

    @torch.inference_mode()
    def run(self, pass_: Pass) -> PassResult:
        if pass_.layers != ALL_LAYERS:
            self.require_part(pass_.layers)
        if pass_.capture:
            self.require_capture(pass_.capture)
        jobs = pass_.jobs
        assert len({id(job.slot) for job in jobs}) == len(jobs), "a slot occurs in one job at most"
        logits: list[Tensor] = []
        captured: list[Tensor] = []
        layers = LayerRange(0, self._layers.num_layers, capture=pass_.capture)
        for job in jobs:
            with self._layers.running(layers) as caught:
                logits.append(self._logits(job))
            if (states := caught.stacked(pass_.capture)) is not None:
                captured.append(states)
        return PassResult.of_jobs(jobs, TensorLogits(torch.cat(logits)), torch.cat(captured) if captured else None)

    def _logits(self, job: Extend) -> Tensor:
        slot = _slot(job.slot)
        expected = range(slot.num_tentative - 1, slot.num_tentative - 1 + len(job.tokens))
        assert list(job.parents) == list(expected), "this model scores chains only"
        start = slot.length + slot.num_tentative
        count = len(job.tokens)
        requested = list(job.rows)
        rows = torch.tensor(requested or [0], device=self.device)  # the head needs at least one row
        positions = torch.arange(start, start + count, device=self.device) + slot.offset
        seen = torch.ones(1, slot.num_pads + start + count, dtype=torch.long, device=self.device)
        seen[:, : slot.num_pads] = 0
        output = self.model(
            input_ids=torch.tensor([list(job.tokens)], device=self.device),
            attention_mask=seen,
            use_cache=True,
            **{self._cache_name: slot.cache},
            **({"logits_to_keep": rows} if self._rows_keyword else {}),
            **({"position_ids": positions.unsqueeze(0)} if self._takes_positions else {}),
        )
        slot.num_tentative += count
        logits = output.logits[0] if self._rows_keyword else output.logits[0, rows]
        return (logits if logits.dtype == torch.float64 else logits.float())[: len(requested)]

    @torch.inference_mode()
    def apply(self, edits: Sequence[Edit]) -> list[Slot]:
        opened: list[Slot] = []
        for edit in edits:
            slot = _slot(edit.slot)
            match edit:
                case Commit():
                    _commit(slot, edit)
                case Truncate(_, length):
                    assert 0 <= length <= slot.length, "a prefix is cut, not lengthened"
                    slot.set_length(length)
                case Fork(_, length):
                    opened.append(self._fork(slot, length))
                case Close():
                    slot.cache = None
                    self._ids.free(slot.id)
        return opened

    def _fork(self, source: CacheSlot, length: int) -> CacheSlot:
        assert 0 <= length <= source.length, "a prefix is cut, not lengthened"
        cache = copy.deepcopy(source.cache)
        twin = CacheSlot(self._ids.take(), cache=cache, num_pads=source.num_pads, offset=source.offset)
        twin.length, twin.num_tentative = source.length, source.num_tentative
        twin.set_length(length)
        return twin


def _commit(slot: CacheSlot, edit: Commit) -> None:
    kept = [*edit.path, *edit.keep]
    assert kept == list(range(len(kept))), "a path of a chain starts at its first node, followed by the kept nodes"
    assert len(kept) <= slot.num_tentative, "kept nodes are tentative"
    length = slot.length + len(edit.path)
    slot.set_length(length + len(edit.keep))
    slot.length, slot.num_tentative = length, len(edit.keep)


def _slot(slot: Slot) -> CacheSlot:
    assert isinstance(slot, CacheSlot), "a slot belongs to the model that opened it"
    assert slot.cache is not None, "a closed slot is not used again"
    return slot
