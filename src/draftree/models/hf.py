"""Any causal language model of transformers, unforked.

The model runs without a cache of its own: our attention, registered with transformers, writes keys and values
into our slots and attends over prefix and ancestors. Positions go by depth.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draftree.core.errors import UnsupportedModelError
from draftree.core.tree import ancestor_mask, is_chain, is_path, is_rooted
from draftree.models.attention import NAME, ProbePass, announced, register
from draftree.models.base import Extend, LanguageModel, Scores, Slot, starts_of
from draftree.models.context import context_length
from draftree.models.memory import LOGIT_BYTES, Footprint, activation_bytes
from draftree.models.native.decoder import NativeDecoder
from draftree.models.native.rows import plan_rows
from draftree.models.packing import weight_bytes
from draftree.models.passes import SlotPass, plan_blocks
from draftree.models.slots import CLOSED, KVMemory, KVSlot

logger = logging.getLogger(__name__)

KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention"})


class HFModel(LanguageModel):
    """A transformers model behind the model seam.

    Args:
        model: any `…ForCausalLM` in evaluation mode. Its attention implementation is set to ours, which passes
            calls that are not ours on to transformers' own.
        row_buckets: ascending numbers of rows; a pass is padded to the next of them, so that a row is computed
            by the same kernels whatever comes beside it. Empty: no padding.

    Raises:
        UnsupportedModelError: the model's layers do not call the registered attention, or keep other state.
    """

    def __init__(self, model: Any, *, row_buckets: Sequence[int] = ()) -> None:
        register()
        self.model: Any = model.eval()
        self.config = model.config.get_text_config()
        self.vocab_size = int(self.config.vocab_size)
        self.max_length = context_length(self.config)
        self.supports_trees = True
        parameter = next(model.parameters())
        self.device, self.dtype = model.device, parameter.dtype
        self.row_buckets = tuple(row_buckets)
        self._rows_keyword = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._require_attention_only()
        model.set_attn_implementation(NAME)
        probe = self._probe()
        self._calls = probe.calls
        self._memory = KVMemory(probe.shapes, dtype=self.dtype, device=self.device)
        self._free: list[int] = []
        self._native: NativeDecoder | None = None

    def lower(self, *, quantization: str | None = None) -> None:
        """Run passes in C from now on, if the model is built as most decoders are.

        The model's own weights are given up. Slots that are open must be empty.

        Args:
            quantization: "int8" for weights of 8 bits, None for the model's own.

        Raises:
            NativeUnavailableError: it is built otherwise, or there is no C pass here; nothing has changed then.
        """
        self._native = NativeDecoder(self.model, self._calls, quantization=quantization)

    @property
    def instructions(self) -> str | None:
        """What passes in C compute with; None if they run through torch."""
        return None if self._native is None else self._native.instructions

    @property
    def footprint(self) -> Footprint:
        """Bytes of weights, of keys and values, and of what a pass works on."""
        native = self._native
        return Footprint(
            weights=weight_bytes(self.model) if native is None else native.weight_bytes,
            token=self._memory.token_bytes,
            logits=self.vocab_size * LOGIT_BYTES,
            row=activation_bytes(self.config, self.dtype) if native is None else native.row_bytes,
        )

    def attach(self, model: Any) -> None:
        """Go on with the model that was let go by `release`."""
        self.model = model
        model.set_attn_implementation(NAME)

    def release(self) -> None:
        """Let the model and all memory of slots go; every slot is closed. The attention implementation stays ours."""
        self.model = None
        self._memory.clear()
        self._free.clear()

    def _require_attention_only(self) -> None:
        kind = type(self.model).__name__
        if getattr(self.model, "_is_stateful", False):
            raise UnsupportedModelError(
                f"{kind} keeps a recurrent state, which can not be rolled back after a rejected draft: "
                "use a model whose layers all attend"
            )
        strange = set(getattr(self.config, "layer_types", None) or ()) - KNOWN_LAYER_TYPES
        if strange:
            raise UnsupportedModelError(
                f"{kind} has layers of type {', '.join(sorted(strange))}, whose state can not be rolled back: "
                "use a model whose layers all attend"
            )
        if not self.model._can_set_attn_implementation():
            raise UnsupportedModelError(f"{kind} does not let its attention be chosen")

    @torch.inference_mode()
    def _probe(self) -> ProbePass:
        probe = ProbePass()
        with announced(probe):
            self._forward(torch.zeros(1, 2, dtype=torch.long), torch.arange(2).unsqueeze(0), None)
        layers = int(self.config.num_hidden_layers)
        if len(probe.shapes) != layers:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} calls the registered attention in {len(probe.shapes)} of {layers} layers"
            )
        if probe.windows_of_masks != probe.windows_of_calls:
            # the self-check is too short to see this: a real window is thousands of tokens wide
            raise UnsupportedModelError(
                f"{type(self.model).__name__} masks with windows {sorted(probe.windows_of_masks)} and calls its "
                f"attention with {sorted(probe.windows_of_calls)}: which layers look how far is not known"
            )
        return probe

    def _forward(self, tokens: Tensor, positions: Tensor, rows: Tensor | None) -> Tensor:
        keywords: dict[str, Any] = {}
        if rows is not None and self._rows_keyword:
            keywords["logits_to_keep"] = rows.to(self.device)
        output = self.model(
            input_ids=tokens.to(self.device), position_ids=positions.to(self.device), use_cache=False, **keywords
        )
        logits: Tensor = output.logits[0]
        if rows is not None and not self._rows_keyword:
            logits = logits[rows.to(self.device)]
        return logits if logits.dtype == torch.float64 else logits.float()

    def reserve(self, num_slots: int, length: int) -> None:
        """Make room for so many slots of so many tokens."""
        known = self._memory.num_slots
        self._memory.reserve(num_slots, length)
        self._free.extend(range(known, self._memory.num_slots))
        self._free.sort()

    def open(self) -> KVSlot:
        """An empty slot: the free one with the lowest index, so that open slots stay neighbours."""
        if not self._free:
            self.reserve(max(1, 2 * self._memory.num_slots), max(64, self._memory.length))
        return KVSlot(self._free.pop(0))

    @torch.inference_mode()
    def extend(self, jobs: Sequence[Extend]) -> Scores:
        """One forward pass over the new tokens of all jobs, side by side as (1, rows)."""
        assert len({id(job.slot) for job in jobs}) == len(jobs), "a slot occurs in one job at most"
        for job in jobs:
            _slot(job.slot).append(job.parents)
        self._make_room([_slot(job.slot) for job in jobs])
        return Scores(
            self._run(jobs) if self._native is None else self._run_native(self._native, jobs), starts_of(jobs)
        )

    def _run_native(self, native: NativeDecoder, jobs: Sequence[Extend]) -> Tensor:
        rows = plan_rows(
            [_slot(job.slot) for job in jobs], [job.tokens for job in jobs], rows_of_chunk=native.rows_of_chunk
        )
        return native.run(self._memory, rows, _asked(jobs, range(len(jobs))))

    def _run(self, jobs: Sequence[Extend]) -> Tensor:
        order = sorted(range(len(jobs)), key=lambda job: _slot(jobs[job].slot).index)
        tokens: list[int] = []
        positions: list[int] = []
        for job in order:
            slot, extend = _slot(jobs[job].slot), jobs[job]
            tokens.extend(extend.tokens)
            start = slot.length - 1
            positions.extend(start + depth for depth in slot.depths[slot.num_tentative - len(extend.tokens) :])
        current = self._plan([jobs[job] for job in order], len(tokens))
        asked = _asked(jobs, order)
        padding = self._padding(len(tokens))
        rows = None
        if padding or len(asked) != len(tokens) or order != list(range(len(jobs))):
            rows = torch.tensor(asked or [0])  # the head can not be asked for no row at all
        with announced(current):
            logits = self._forward(
                torch.tensor([tokens + [0] * padding]), torch.tensor([positions + [0] * padding]), rows
            )
        return logits[: len(asked)]

    def _make_room(self, slots: Sequence[KVSlot]) -> None:
        longest = max(slot.length + slot.num_tentative for slot in slots)
        if longest > self._memory.length:
            self._memory.reserve(self._memory.num_slots, max(longest, 2 * self._memory.length))

    def _padding(self, rows: int) -> int:
        return next((bucket - rows for bucket in self.row_buckets if bucket >= rows), 0)

    def _plan(self, jobs: Sequence[Extend], num_rows: int) -> SlotPass:
        slots = [_slot(job.slot) for job in jobs]
        counts = [len(job.tokens) for job in jobs]

        def visible(job: int) -> Tensor | None:
            parents = slots[job].parents
            return None if is_chain(parents) else torch.from_numpy(ancestor_mask(parents)[-counts[job] :])

        blocks = plan_blocks(slots, counts, visible, self.device)
        starts = [slot.length + slot.num_tentative - count for slot, count in zip(slots, counts, strict=True)]
        if len(jobs) == 1:
            return SlotPass(self._memory, blocks, num_rows, None, None, (slots[0].index, starts[0]))
        slot_of_row = [slot.index for slot, count in zip(slots, counts, strict=True) for _ in range(count)]
        place_of_row = [start + i for start, count in zip(starts, counts, strict=True) for i in range(count)]
        slot_index, place_index = (torch.tensor(rows, device=self.device) for rows in (slot_of_row, place_of_row))
        return SlotPass(self._memory, blocks, num_rows, slot_index, place_index, None)

    @torch.inference_mode()
    def commit(self, slot: Slot, path: Sequence[int]) -> None:
        """Compact the path behind the prefix, in place."""
        kept = _slot(slot)
        assert is_path(kept.parents, path), "a path goes down the tree"
        self._memory.gather(kept.index, start=kept.length, offsets=path)
        kept.commit(len(path))

    @torch.inference_mode()
    def prune(self, slot: Slot, keep: Sequence[int]) -> None:
        """Compact the kept nodes behind the prefix, still tentative."""
        pruned = _slot(slot)
        assert is_rooted(pruned.parents, keep), "a kept node needs its parent kept, and keeps its order"
        self._memory.gather(pruned.index, start=pruned.length, offsets=keep)
        pruned.keep(keep)

    def truncate(self, slot: Slot, length: int) -> None:
        """Forget where the prefix went on; what is stored there is written over."""
        _slot(slot).truncate(length)

    @torch.inference_mode()
    def fork(self, slot: Slot) -> KVSlot:
        """Copy the prefix into a new slot."""
        source, target = _slot(slot), self.open()
        self._memory.copy(source.index, target.index, source.length)
        target.copy_prefix(source)
        return target

    def close(self, slot: Slot) -> None:
        """Free the slot's place."""
        closed = _slot(slot)
        self._free.append(closed.index)
        self._free.sort()
        closed.index = CLOSED


def _asked(jobs: Sequence[Extend], order: Sequence[int]) -> list[int]:
    """Rows whose logits are asked for, job after job, where the jobs' rows stand in that order."""
    first_rows, row = {}, 0
    for job in order:
        first_rows[job] = row
        row += len(jobs[job].tokens)
    return [
        first_rows[job] + node
        for job, extend in enumerate(jobs)
        for node in (range(len(extend.tokens)) if extend.logits_at is None else extend.logits_at)
    ]


def _slot(slot: Slot) -> KVSlot:
    assert isinstance(slot, KVSlot), "a slot belongs to the model that opened it"
    assert slot.index != CLOSED, "a closed slot is not used again"
    return slot
