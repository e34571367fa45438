"""Any causal language model of transformers, unforked.

The model runs without a cache of its own: our attention, registered with transformers, writes keys and values
into our slots and attends over prefix and ancestors. Positions go by depth.
"""

from __future__ import annotations

import bisect
import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from draftree.core.errors import UnsupportedModelError
from draftree.core.tree import ancestor_mask, is_chain, is_path, is_rooted
from draftree.models.attention import NAME, ProbePass, announced, register
from draftree.models.base import Extend, LanguageModel, Part, Scores, Slot, starts_of
from draftree.models.check import TOLERANCE, sketch_error
from draftree.models.context import context_length
from draftree.models.identity import fingerprint
from draftree.models.memory import LOGIT_BYTES, Footprint, activation_bytes
from draftree.models.native.decoder import NativeDecoder
from draftree.models.native.rows import plan_rows
from draftree.models.packing import weight_bytes
from draftree.models.passes import SlotPass, is_run, plan_blocks
from draftree.models.sketch import Outcome, Sketch, Stretch
from draftree.models.slots import CLOSED, KVMemory, KVSlot
from draftree.models.static.buckets import WORD_BITS, Shapes
from draftree.models.static.passes import StaticPasses
from draftree.models.torch_layers import TorchLayers

logger = logging.getLogger(__name__)

MAX_SKETCHED = 512
"""Tokens that may be stored behind a slot's prefix and tree."""
KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention"})


class HFModel(LanguageModel):
    """A transformers model behind the model seam.

    Args:
        model: any `…ForCausalLM` in evaluation mode. Its attention implementation is set to ours, which passes
            calls that are not ours on to transformers' own.
        row_buckets: ascending numbers of rows; a pass is padded to the next of them, so that a row is computed
            by the same kernels whatever comes beside it. Empty: no padding.
        shapes: run passes in these shapes, as CUDA graphs where there are such; None: each as it comes.

    Raises:
        UnsupportedModelError: the model's layers do not call the registered attention, or keep other state.
    """

    def __init__(self, model: Any, *, row_buckets: Sequence[int] = (), shapes: Shapes | None = None) -> None:
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
        self.num_layers = int(self.config.num_hidden_layers)
        self._layers = TorchLayers(model, self.num_layers)
        self.fingerprint = fingerprint(model)
        self._checked_parts = False
        model.set_attn_implementation(NAME)
        probe = self._probe()
        self._calls = probe.calls
        self._memory = KVMemory(
            probe.shapes,
            dtype=self.dtype,
            device=self.device,
            granule=1 if shapes is None else WORD_BITS,
            num_scratch=0 if shapes is None else 1,
        )
        self._free: list[int] = []
        self._open: dict[int, KVSlot] = {}
        self._native: NativeDecoder | None = None
        self.static = None if shapes is None else self._static_passes(shapes)

    def lower(self, *, quantization: str | None = None) -> None:
        """Run passes in C from now on, if the model is built as most decoders are.

        The model's own weights are given up. Slots that are open must be empty.

        Args:
            quantization: "int8" for weights of 8 bits, None for the model's own.

        Raises:
            NativeUnavailableError: it is built otherwise, or there is no C pass here; nothing has changed then.
        """
        self._native = NativeDecoder(self.model, self._calls, quantization=quantization)

    def _static_passes(self, shapes: Shapes) -> StaticPasses:
        return StaticPasses(
            lambda tokens, positions: self._forward(tokens, positions, None),
            self._memory,
            device=self.device,
            shapes=shapes,
            min_rows=min(self.row_buckets, default=1),
        )

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
        self._layers.bind(model)

    def release(self) -> None:
        """Let the model and all memory of slots go; every slot is closed. The attention implementation stays ours."""
        self.model = None
        self._layers.release()
        if self.static is not None:
            self.static.drop()
        self._memory.clear()
        self._free.clear()
        self._open.clear()

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
        with announced(probe), self._layers.learning():
            self._forward(torch.zeros(1, 2, dtype=torch.long), torch.arange(2).unsqueeze(0), None)
        if len(probe.shapes) != self.num_layers:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} calls the registered attention in {len(probe.shapes)} of "
                f"{self.num_layers} layers"
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
        """Make room for so many slots of so many tokens.

        Slots that are too short are exchanged for longer ones, and then there are no more of them than are asked for.
        """
        memory = self._memory
        known = memory.num_slots
        if length > memory.length:
            num_slots = max(num_slots, max(self._open, default=-1) + 1)
        else:
            num_slots, length = max(num_slots, known), memory.length
        # sketches are stored behind the prefix and noted elsewhere; what a pass is about to append is not stored yet
        behind = {index: slot.num_tentative + MAX_SKETCHED for index, slot in self._open.items()}
        used = {index: min(memory.length, slot.length + behind[index]) for index, slot in self._open.items()}
        memory.reserve(num_slots, length, used=used)
        self._free = [index for index in range(num_slots) if index not in self._open]

    def open(self) -> KVSlot:
        """An empty slot: the free one with the lowest index, so that open slots stay neighbours."""
        if not self._free:
            self.reserve(max(1, 2 * self._memory.num_slots), max(64, self._memory.length))
        slot = KVSlot(self._free.pop(0))
        self._open[slot.index] = slot
        return slot

    @property
    def num_open(self) -> int:
        """Open slots."""
        return len(self._open)

    def check_integrity(self) -> None:
        """Every place is free or open, and every open slot fits into its place."""
        assert sorted([*self._free, *self._open]) == list(range(self._memory.num_slots)), "each place is free or open"
        assert self._free == sorted(self._free), "free places ascend"
        for index, slot in self._open.items():
            assert slot.index == index, "a slot knows its place"
            assert slot.length + slot.num_tentative <= self._memory.length, "what is stored fits"
            assert len(slot.parents) == len(slot.depths), "every tentative node has a parent and a depth"

    @torch.inference_mode()
    def extend(self, jobs: Sequence[Extend]) -> Scores:
        """One forward pass over the new tokens of all jobs, side by side as (1, rows)."""
        sketches = self._take_sketches(jobs)
        nodes = self._append([_slot(job.slot) for job in jobs], jobs)
        stretch = self._resumed(jobs, nodes, sketches) if sketches else Stretch(0, self.num_layers)
        return Scores(self._pass(jobs, nodes, stretch).logits, starts_of(jobs))

    def _append(self, slots: Sequence[KVSlot], jobs: Sequence[Extend]) -> list[Sequence[int]]:
        """Note the jobs' tokens in these slots; the nodes that they are there."""
        assert len({id(job.slot) for job in jobs}) == len(jobs), "a slot occurs in one job at most"
        nodes: list[Sequence[int]] = []
        for slot, job in zip(slots, jobs, strict=True):
            first = slot.num_tentative
            slot.append(job.parents)
            nodes.append(range(first, slot.num_tentative))
        self._make_room(slots)
        return nodes

    def _pass(self, jobs: Sequence[Extend], nodes: Sequence[Sequence[int]], stretch: Stretch) -> Outcome:
        """One pass over these tentative nodes, which are the jobs' tokens; hidden states stand job after job."""
        self.num_sublayer_runs += sum(map(len, nodes)) * stretch.num_sublayers
        slots, tokens = [_slot(job.slot) for job in jobs], [job.tokens for job in jobs]
        if self._native is None:
            bucket = None
            if self.static is not None and stretch.is_whole(self.num_layers):
                bucket = self.static.bucket(slots, nodes)
            if self.static is None or bucket is None:
                return self._run(jobs, nodes, stretch)
            asked = _asked(jobs, range(len(jobs)))
            return Outcome(self.static.run(bucket, slots, tokens=tokens, nodes=nodes, asked=asked), None)
        rows = plan_rows(slots, tokens, nodes, rows_of_chunk=self._native.rows_of_chunk)
        return self._native.run(self._memory, rows, _asked(jobs, range(len(jobs))), stretch=stretch)

    def _run(self, jobs: Sequence[Extend], nodes: Sequence[Sequence[int]], stretch: Stretch) -> Outcome:
        order = sorted(range(len(jobs)), key=lambda job: _slot(jobs[job].slot).index)
        tokens: list[int] = []
        positions: list[int] = []
        for job in order:
            slot = _slot(jobs[job].slot)
            tokens.extend(jobs[job].tokens)
            positions.extend(slot.length - 1 + slot.depths[node] for node in nodes[job])
        current = self._plan([_slot(jobs[job].slot) for job in order], [nodes[job] for job in order])
        asked = _asked(jobs, order)
        padding = self._padding(len(tokens))
        rows = None
        if padding or len(asked) != len(tokens) or order != list(range(len(jobs))):
            rows = torch.tensor(asked or [0])  # the head can not be asked for no row at all
        tokens_row, positions_row = torch.tensor([tokens + [0] * padding]), torch.tensor([positions + [0] * padding])
        if stretch.first == 0 and stretch.end == self.num_layers and stretch.part is None:
            with announced(current):
                return Outcome(self._forward(tokens_row, positions_row, rows)[: len(asked)], None)
        place = torch.tensor(_rows_by_job([len(job.tokens) for job in jobs], order), device=self.device)
        if stretch.hidden is not None:
            stretch = replace(stretch, hidden=stretch.hidden[place.argsort()])
        with announced(current), self._layers.running(stretch) as caught:
            logits = self._forward(tokens_row, positions_row, rows)
        hidden = caught.hidden[place] if stretch.keeps_hidden and caught.hidden is not None else None
        return Outcome(logits[: len(asked)], hidden)

    def require_part(self, part: Part) -> None:
        """Refuse a part that this model can not run, or does not run rightly."""
        end = self.num_layers if part.end is None else part.end
        strange = sorted(layer for layer in part.attention | part.mlp if layer >= self.num_layers)
        if strange or not 0 < end <= self.num_layers:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} has {self.num_layers} layers, numbered from 0: "
                f"layer {strange[0] if strange else end} is not among them"
            )
        if self._native is None:
            self._layers.require(part)
        if not self._checked_parts:
            error = sketch_error(self)
            if not error <= TOLERANCE[self.dtype]:
                raise UnsupportedModelError(
                    f"{type(self.model).__name__} gives other logits when its layers run in two parts "
                    f"(error {error:.1e} of their spread): take a drafter that needs no part of the model"
                )
            self._checked_parts = True

    @torch.inference_mode()
    def sketch(self, jobs: Sequence[Extend], part: Part) -> Scores:
        """One pass through a part of the layers."""
        sketches = []
        for job in jobs:
            slot = _slot(job.slot)
            assert not slot.num_tentative, "a slot with a tentative tree is not sketched in"
            if slot.sketch is None or slot.sketch.part != part:
                slot.sketch = Sketch(slot, part)
            sketches.append(slot.sketch)
        nodes = self._append([sketch.nodes for sketch in sketches], jobs)
        end = self.num_layers if part.end is None else part.end
        stretch = Stretch(0, end, part, keeps_hidden=part.is_beginning and end < self.num_layers)
        twins = [replace(job, slot=sketch.nodes) for job, sketch in zip(jobs, sketches, strict=True)]
        outcome = self._pass(twins, nodes, stretch)
        row = 0
        for job, sketch in zip(jobs, sketches, strict=True):
            end_row = row + len(job.tokens)
            sketch.note(job.tokens, job.parents, None if outcome.hidden is None else outcome.hidden[row:end_row])
            row = end_row
        return Scores(outcome.logits, starts_of(jobs))

    def erase(self, slots: Sequence[Slot]) -> None:
        """Forget sketches; what is stored is written over."""
        for slot in slots:
            _slot(slot).sketch = None

    def _take_sketches(self, jobs: Sequence[Extend]) -> dict[int, Sketch]:
        """Sketches that a pass over these jobs can start from, by job: all of one part."""
        found: dict[int, Sketch] = {}
        for index, job in enumerate(jobs):
            slot = _slot(job.slot)
            sketch, slot.sketch = slot.sketch, None
            if sketch is None or not sketch.keeps_hidden:
                continue
            if not found or next(iter(found.values())).part == sketch.part:
                found[index] = sketch
        return found

    def _resumed(
        self, jobs: Sequence[Extend], nodes: Sequence[Sequence[int]], sketches: Mapping[int, Sketch]
    ) -> Stretch:
        """Bring all nodes to where the sketches end; the layers that are left to run."""
        first = next(iter(sketches.values()))
        starts = [0, *accumulate(len(job.tokens) for job in jobs)]
        hidden = first.hidden().new_zeros(starts[-1], first.hidden().shape[1])
        late = dict(enumerate(range(len(job.tokens)) for job in jobs))  # by job, places of nodes without a sketch
        for index, sketch in sketches.items():
            found = sketch.find(jobs[index].tokens, jobs[index].parents)
            late[index] = found.missing  # type: ignore[assignment]
            hidden[[starts[index] + place for place in found.places]] = sketch.hidden()[found.sources]
            self._memory.move(sketch.nodes, found.sources, found.places, layers=range(first.end))
        late = {index: places for index, places in late.items() if places}
        if late:
            parts = [
                replace(jobs[i], tokens=[jobs[i].tokens[place] for place in places], logits_at=())
                for i, places in late.items()
            ]
            chosen = [[nodes[i][place] for place in places] for i, places in late.items()]
            outcome = self._pass(parts, chosen, Stretch(0, first.end, keeps_hidden=True))
            assert outcome.hidden is not None, "hidden states were asked for"
            hidden[[starts[i] + place for i, places in late.items() for place in places]] = outcome.hidden
        return Stretch(first.end, self.num_layers, hidden=hidden)

    def _make_room(self, slots: Sequence[KVSlot]) -> None:
        longest = max(slot.length + slot.num_tentative for slot in slots)
        if longest > self._memory.length:
            self.reserve(self._memory.num_slots, max(longest, 2 * self._memory.length))

    def _padding(self, rows: int) -> int:
        return next((bucket - rows for bucket in self.row_buckets if bucket >= rows), 0)

    def _plan(self, slots: Sequence[KVSlot], nodes: Sequence[Sequence[int]]) -> SlotPass:
        def visible(job: int) -> Tensor | None:
            parents, own = slots[job].parents, nodes[job]
            if is_chain(parents) and is_run(own) and own[-1] == len(parents) - 1:
                return None
            mask = torch.from_numpy(ancestor_mask(parents))
            return mask[own[0] : own[-1] + 1] if is_run(own) else mask[list(own)]

        num_rows = sum(map(len, nodes))
        blocks = plan_blocks(slots, nodes, visible, self.device)
        if len(slots) == 1 and is_run(nodes[0]):
            return SlotPass(self._memory, blocks, num_rows, None, None, (slots[0].index, slots[0].length + nodes[0][0]))
        slot_of_row = [slot.index for slot, own in zip(slots, nodes, strict=True) for _ in own]
        place_of_row = [slot.length + node for slot, own in zip(slots, nodes, strict=True) for node in own]
        slot_index, place_index = (torch.tensor(rows, device=self.device) for rows in (slot_of_row, place_of_row))
        return SlotPass(self._memory, blocks, num_rows, slot_index, place_index, None)

    @torch.inference_mode()
    def commit(self, slot: Slot, path: Sequence[int]) -> None:
        """Compact the path behind the prefix, in place."""
        self.commit_many([slot], [path])

    @torch.inference_mode()
    def commit_many(self, slots: Sequence[Slot], paths: Sequence[Sequence[int]]) -> None:
        """Compact the paths behind the prefixes, in place."""
        kept = [_slot(slot) for slot in slots]
        for slot, nodes in zip(kept, paths, strict=True):
            assert is_path(slot.parents, nodes), "a path goes down the tree"
        self._settle(kept, paths)
        for slot, nodes in zip(kept, paths, strict=True):
            slot.commit(len(nodes))

    def _settle(self, slots: Sequence[KVSlot], kept: Sequence[Sequence[int]]) -> None:
        """Bring the kept nodes of each slot's tree to where it begins."""
        if self.static is None:
            for slot, nodes in zip(slots, kept, strict=True):
                self._memory.gather(slot.index, start=slot.length, offsets=nodes)
            return
        moves, dropped = [], []
        for slot, nodes in zip(slots, kept, strict=True):
            pairs = enumerate(nodes)
            moves += [(slot.index, slot.length + node, slot.length + place) for place, node in pairs if place != node]
            dropped += [(slot.index, slot.length + place) for place in range(len(nodes), slot.num_tentative)]
        self._memory.rearrange(moves, dropped)

    @torch.inference_mode()
    def prune(self, slot: Slot, keep: Sequence[int]) -> None:
        """Compact the kept nodes behind the prefix, still tentative."""
        pruned = _slot(slot)
        assert is_rooted(pruned.parents, keep), "a kept node needs its parent kept, and keeps its order"
        self._settle([pruned], [keep])
        pruned.keep(keep)

    @torch.inference_mode()
    def truncate(self, slot: Slot, length: int) -> None:
        """Forget where the prefix went on; what is stored there is written over."""
        cut = _slot(slot)
        self._settle([cut], [()])
        cut.truncate(length)

    @torch.inference_mode()
    def fork(self, slot: Slot, length: int | None = None) -> KVSlot:
        """Copy the prefix, or the beginning of it, into a new slot."""
        source = _slot(slot)
        count = source.length if length is None else length
        assert 0 <= count <= source.length, "a prefix is cut, not lengthened"
        target = self.open()
        self._memory.copy(source.index, target.index, count)
        target.copy_prefix(count)
        return target

    @torch.inference_mode()
    def close(self, slot: Slot) -> None:
        """Free the slot's place."""
        closed = _slot(slot)
        if self.static is not None:
            self._memory.wipe(closed.index)  # looking whether there is need would wait for the device
        elif self._native is None:  # a pass in C does not touch what is masked
            self._memory.scrub(closed.index)
        bisect.insort(self._free, closed.index)
        del self._open[closed.index]
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


def _rows_by_job(counts: Sequence[int], order: Sequence[int]) -> list[int]:
    """Where each row stands if the jobs' rows stand in that order, job after job."""
    starts, row = {}, 0
    for job in order:
        starts[job] = row
        row += counts[job]
    return [starts[job] + place for job, count in enumerate(counts) for place in range(count)]


def _slot(slot: Slot) -> KVSlot:
    assert isinstance(slot, KVSlot), "a slot belongs to the model that opened it"
    assert slot.index != CLOSED, "a closed slot is not used again"
    return slot
