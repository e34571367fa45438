"""Models that do not call the registered attention (bloom, mpt, …) or keep states: chains in transformers' own cache.

Each slot has its own cache. Each sequence is one forward pass, so a batch costs as much as its sequences one by one.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from draftree.models.base import (
    ALL_LAYERS,
    Close,
    Commit,
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
from draftree.models.torch.cache_slots import MAX_KEPT, ChainSlot, CopiedSlot, CroppedSlot, Reading, RereadSlot
from draftree.models.torch.family_cache import (
    copied,
    has_keys,
    is_cropped,
    new_cache,
    num_bytes,
    refuse_padding,
    row_of,
)
from draftree.models.torch.inspection import (
    ReadPrompt,
    accepts_cache,
    cache_name,
    cache_windows,
    context_length,
    offsets_of,
    prompt_inputs,
    takes_positions,
)
from draftree.models.torch.layers import TorchLayers, TransformersModel
from draftree.models.torch.packing import weight_bytes
from draftree.sampling.logits import TensorLogits


class Continuation(Enum):
    """How a model's forward pass continues a text that it has read."""

    CHAIN = auto()  # with any number of tokens
    TOKEN = auto()  # token by token
    REREAD = auto()  # not at all: each pass reads the whole text


class CachedModel(TransformersModel):
    """Transformers model with its own attention and cache; chains only.

    `continuation`: checked by the caller; ignored for a model whose forward accepts no cache.
    """

    def __init__(self, model: Any, continuation: Continuation = Continuation.CHAIN) -> None:
        self.model: Any = model.eval()
        config = model.config.get_text_config()
        hides_arguments = "input_ids" not in inspect.signature(model.forward).parameters  # a wrapper with **kwargs
        has_cache = hides_arguments or accepts_cache(model.forward)
        self._continuation = continuation if has_cache else Continuation.REREAD
        self.vocab_size = int(config.vocab_size)
        self.max_length = context_length(config)
        self._crops = is_cropped(model)
        windows = set(cache_windows(config).values()) if self._crops else set()
        if windows:
            # without a window in the mask, the cache of generate drops keys that would be visible
            self.max_length = min([self.max_length, *(windows - windows_of_masks(model))])
        self.supports_trees = False
        self._ids = SlotIds()
        self.device, self.dtype = model.device, next(model.parameters()).dtype
        self._rows_keyword = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._cache_name = cache_name(model.forward)
        self._takes_positions = takes_positions(model)
        self._takes_mask = "attention_mask" in inspect.signature(model.forward).parameters or hides_arguments
        self._layers = TorchLayers(model, int(config.num_hidden_layers))
        self._empty = new_cache(model)
        self._state_bytes = self._token_bytes = 0
        if self._continuation is not Continuation.REREAD:
            self._measure_cache()

    @torch.inference_mode()
    def _measure_cache(self) -> None:
        """Measure the bytes of a token and of what does not grow."""
        slot = self.open()
        sizes = []
        for _ in range(2):
            self.run(Pass([Extend(slot, [0], [-1], logits_at=(), settled=1)]))
            self.apply([Commit(slot, [0])])
            sizes.append(num_bytes(slot.cache))
        self.apply([Close(slot)])
        self._token_bytes = sizes[1] - sizes[0]
        self._state_bytes = sizes[0] - self._token_bytes

    @property
    def footprint(self) -> Footprint:
        num_states = 1 if self._crops else 2 + MAX_KEPT  # the slot's, that of a chain, and those kept
        return Footprint(
            weights=weight_bytes(self.model),
            token=self._token_bytes,
            logits=self.vocab_size * LOGIT_BYTES,
            row=activation_bytes(self.model.config.get_text_config(), self.dtype),
            state=num_states * self._state_bytes,
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

    def open(self) -> ChainSlot:
        number = self._ids.take()
        if self._continuation is Continuation.REREAD:
            return RereadSlot(number)
        if self._crops:
            return CroppedSlot(number, copied(self._empty))
        return CopiedSlot(number, copied(self._empty), by_token=self._continuation is Continuation.TOKEN)

    def cut_length(self, slot: Slot, length: int) -> int:
        return _slot(slot).cut_length(length)

    @torch.inference_mode()
    def read(self, input_ids: Tensor, mask: Tensor | None, extra_inputs: Mapping[str, Any]) -> list[ReadPrompt]:
        """Prefill prompts with the model's own forward pass, as `generate` does; padding is kept."""
        if mask is not None and not bool(mask.all()):
            refuse_padding(self.model)
        rereads = self._continuation is Continuation.REREAD
        cache = copied(self._empty) if self._crops and not rereads else None
        inputs = prompt_inputs(
            self.model, input_ids, mask=mask, cache=cache, use_cache=cache is not None, **extra_inputs
        )
        logits = self.model(**inputs).logits[:, -1].float()
        width = input_ids.shape[1]
        lengths = [width] * len(logits) if mask is None else mask.sum(dim=1).tolist()
        offsets = offsets_of(inputs.get("position_ids"), lengths, width)
        caches: list[Any]
        if rereads:
            caches = [row[:-1].tolist() for row in input_ids]
        else:
            if cache is None:
                cache = self._without_last(input_ids, mask, extra_inputs)
            else:
                cache.crop(-1)
            caches = [row_of(cache, row) for row in range(len(logits))]
        return [
            ReadPrompt({}, length, width - length, offset, row_logits, row_cache)
            for length, offset, row_logits, row_cache in zip(lengths, offsets, logits, caches, strict=True)
        ]

    def _without_last(self, input_ids: Tensor, mask: Tensor | None, extra_inputs: Mapping[str, Any]) -> Any:
        """Return a cache that has read prompts without their last tokens: a state cannot be taken back."""
        cache = copied(self._empty)
        if input_ids.shape[1] == 1:
            return cache
        shorter = {
            name: value[..., :-1] if name in ("position_ids", "token_type_ids", "mm_token_type_ids") else value
            for name, value in extra_inputs.items()
        }
        seen = None if mask is None else mask[:, :-1]
        inputs = prompt_inputs(self.model, input_ids[:, :-1], mask=seen, cache=cache, use_cache=True, **shorter)
        return self._cache_after(self.model(**inputs), cache)

    def adopt(self, prompt: ReadPrompt) -> ChainSlot:
        """Open a slot with all but the last token of a prompt that was prefilled by the model's own forward pass."""
        slot = self.open()
        slot.num_pads, slot.offset = prompt.num_pads, prompt.offset
        slot.adopt(prompt.cache, prompt.length - 1)
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
            self._run_job(job, layers, logits, captured)
        none = torch.empty(0, self.vocab_size, device=self.device)
        return PassResult.of_jobs(
            jobs, TensorLogits(torch.cat(logits or [none])), torch.cat(captured) if captured else None
        )

    def _run_job(self, job: Extend, layers: LayerRange, logits: list[Tensor], captured: list[Tensor]) -> None:
        """Run the readings of a job; append its requested logits and the captured states of its rows."""
        slot = _slot(job.slot)
        expected = range(slot.num_tentative - 1, slot.num_tentative - 1 + len(job.tokens))
        assert list(job.parents) == list(expected), "this model scores chains only"
        first = 0  # row of the job with which a reading begins
        for reading in slot.readings(job):
            offset = reading.num_repeated - first
            first += len(reading.tokens) - reading.num_repeated
            wanted = [row + offset for row in job.rows if reading.num_repeated <= row + offset < len(reading.tokens)]
            skipped = reading.num_repeated
            for begin, end in self._parts(reading):
                rows = [row - begin for row in wanted if begin <= row < end]
                with self._layers.running(layers) as caught:
                    logits.append(self._forward(slot, reading, begin, end, rows))
                if (states := caught.stacked(layers.capture)) is not None:
                    captured.append(states[max(0, skipped - begin) :])

    def _parts(self, reading: Reading) -> list[tuple[int, int]]:
        """Return begin and end of the tokens of each forward pass."""
        count = len(reading.tokens)
        if self._continuation is Continuation.TOKEN and reading.start:
            return [(place, place + 1) for place in range(count)]
        return [(0, count)]

    def _forward(self, slot: ChainSlot, reading: Reading, begin: int, end: int, requested: list[int]) -> Tensor:
        """Read a part of the tokens, and return logits of the requested ones."""
        rows = torch.tensor(requested or [0], device=self.device)  # the head needs at least one row
        keep = {"logits_to_keep": rows} if self._rows_keyword else {}
        ids = torch.tensor([reading.tokens[begin:end]], device=self.device)
        if self._continuation is Continuation.REREAD:
            mask = torch.ones_like(ids)
            mask[:, : slot.num_pads] = 0
            output = self.model(**prompt_inputs(self.model, ids, mask=mask, use_cache=False), **keep)
        else:
            output = self._continued(slot, reading, reading.start + begin, ids, keep)
        logits = output.logits[0] if self._rows_keyword else output.logits[0, rows]
        return (logits if logits.dtype == torch.float64 else logits.float())[: len(requested)]

    def _continued(self, slot: ChainSlot, reading: Reading, start: int, ids: Tensor, keep: Mapping[str, Tensor]) -> Any:
        """Read tokens of the text from `start` on into the cache of a reading, and return the model's output."""
        inputs: dict[str, Any] = {"input_ids": ids, "use_cache": True, self._cache_name: reading.cache}
        # without padding, and where only states are kept, a model with states needs no mask
        if self._takes_mask and (self._crops or (slot.num_pads and has_keys(reading.cache))):
            mask = torch.ones(1, slot.num_pads + start + ids.shape[1], dtype=torch.long, device=self.device)
            mask[:, : slot.num_pads] = 0
            inputs["attention_mask"] = mask
        if self._takes_positions:
            positions = torch.arange(start, start + ids.shape[1], device=self.device) + slot.offset
            inputs["position_ids"] = positions.unsqueeze(0)
        output = self.model(**inputs, **keep)
        reading.cache = self._cache_after(output, reading.cache)
        return output

    def _cache_after(self, output: Any, cache: Any) -> Any:
        """Return the cache after a pass: most change the one that they get, others return a new one."""
        returned = output.get(self._cache_name)
        return cache if returned is None else returned

    @torch.inference_mode()
    def apply(self, edits: Sequence[Edit]) -> list[Slot]:
        opened: list[Slot] = []
        for edit in edits:
            slot = _slot(edit.slot)
            match edit:
                case Commit(_, path, keep):
                    slot.commit(path, keep)
                case Truncate(_, length):
                    slot.truncate(length)
                case Fork(_, length):
                    opened.append(slot.fork(self._ids.take(), length))
                case Close():
                    slot.close()
                    self._ids.free(slot.id)
        return opened


def _slot(slot: Slot) -> ChainSlot:
    assert isinstance(slot, ChainSlot), "a slot belongs to the model that opened it"
    assert not slot.is_closed, "a closed slot is not used again"
    return slot
