"""What all models with slots of our own have in common: everything but the pass itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from draftree.core.errors import UnsupportedModelError
from draftree.models.base import Extend, LanguageModel, LayerSubset, Scores, Slot, starts_of
from draftree.models.check import TOLERANCE, partial_error
from draftree.models.kv.partial import LayerRange, Outcome, PartialTree, require_capture
from draftree.models.kv.pool import SlotPool, kv_slot
from draftree.models.kv.slots import KVSlot
from draftree.models.memory import Footprint


class SlottedModel(LanguageModel):
    """A model whose keys and values lie in slots here.

    Args:
        kind: what messages call it.
        num_layers: all of them attend.
        pool: its slots.
    """

    def __init__(self, kind: str, *, num_layers: int, pool: SlotPool) -> None:
        self.kind = kind
        self.num_layers = num_layers
        self._pool = pool
        self._checked_parts = False

    @abstractmethod
    def _pass(self, jobs: Sequence[Extend], nodes: Sequence[Sequence[int]], stretch: LayerRange) -> Outcome:
        """One pass over these tentative nodes, which are the jobs' tokens; hidden states stand job after job."""

    @property
    @abstractmethod
    def footprint(self) -> Footprint:
        """Bytes of weights, of keys and values, and of what a pass works on."""

    def _require_layers(self, part: LayerSubset) -> None:
        """Refuse a part that names layers which cannot be told apart here."""

    def reserve(self, num_slots: int, length: int) -> None:
        """Make room for so many slots of so many tokens."""
        self._pool.reserve(num_slots, length)

    def open(self) -> KVSlot:
        """An empty slot: the free one with the lowest index, so that open slots stay neighbours."""
        return self._pool.open()

    @property
    def num_open(self) -> int:
        """Open slots."""
        return self._pool.num_open

    def check_integrity(self) -> None:
        """Every place is free or open, and every open slot fits into its place."""
        self._pool.check_integrity()

    def extend(self, jobs: Sequence[Extend]) -> Scores:
        """One forward pass over the new tokens of all jobs, side by side as (1, rows)."""
        outcome = self.extend_and_capture(jobs, ())
        return Scores(outcome.logits, starts_of(jobs), outcome.at)

    def extend_and_capture(self, jobs: Sequence[Extend], capture: tuple[int, ...]) -> Outcome:
        """`extend` that also gives what enters these layers; a sketch that ran one of them is not taken over."""
        sketches = self._take_sketches(jobs, min(capture, default=self.num_layers))
        nodes = self._pool.append([kv_slot(job.slot) for job in jobs], jobs)
        stretch = self._resumed(jobs, nodes, sketches) if sketches else LayerRange(0, self.num_layers)
        return self._counted_pass(jobs, nodes, replace(stretch, capture=capture) if capture else stretch)

    def require_capture(self, capture: Sequence[int]) -> None:
        """Refuse layers that this model does not have."""
        require_capture(capture, first=0, end=self.num_layers)

    def _counted_pass(self, jobs: Sequence[Extend], nodes: Sequence[Sequence[int]], stretch: LayerRange) -> Outcome:
        self.num_sublayer_runs += sum(map(len, nodes)) * stretch.num_sublayers
        return self._pass(jobs, nodes, stretch)

    def require_part(self, part: LayerSubset) -> None:
        """Refuse a part that this model cannot run, or does not run rightly."""
        end = self.num_layers if part.end is None else part.end
        strange = sorted(layer for layer in part.attention | part.mlp if layer >= self.num_layers)
        if strange or not 0 < end <= self.num_layers:
            raise UnsupportedModelError(
                f"{self.kind} has {self.num_layers} layers, numbered from 0: "
                f"layer {strange[0] if strange else end} is not among them"
            )
        self._require_layers(part)
        if not self._checked_parts:
            try:
                error = partial_error(self)
            except AssertionError:
                raise  # a mistake of ours, not the model's
            except Exception as reason:  # a model's own code may raise anything
                raise UnsupportedModelError(
                    f"{self.kind} cannot run its layers in two parts: take a drafter that needs no part of the model"
                ) from reason
            if not error <= TOLERANCE[self.dtype]:
                raise UnsupportedModelError(
                    f"{self.kind} gives other logits when its layers run in two parts "
                    f"(error {error:.1e} of their spread): take a drafter that needs no part of the model"
                )
            self._checked_parts = True

    @torch.inference_mode()
    def sketch(self, jobs: Sequence[Extend], part: LayerSubset) -> Scores:
        """One pass through a part of the layers."""
        outcome = self.sketch_and_capture(jobs, part, ())
        return Scores(outcome.logits, starts_of(jobs), outcome.at)

    @torch.inference_mode()
    def sketch_and_capture(self, jobs: Sequence[Extend], part: LayerSubset, capture: tuple[int, ...]) -> Outcome:
        """`sketch` that also gives what enters these layers."""
        sketches = []
        for job in jobs:
            slot = kv_slot(job.slot)
            assert not slot.num_tentative, "a slot with a tentative tree is not sketched in"
            if slot.sketch is None or slot.sketch.part != part:
                slot.sketch = PartialTree(slot, part)
            sketches.append(slot.sketch)
        nodes = self._pool.append([sketch.nodes for sketch in sketches], jobs)
        end = self.num_layers if part.end is None else part.end
        keeps_hidden = part.is_beginning and end < self.num_layers
        stretch = LayerRange(0, end, part, keeps_hidden=keeps_hidden, capture=capture)
        twins = [replace(job, slot=sketch.nodes) for job, sketch in zip(jobs, sketches, strict=True)]
        outcome = self._counted_pass(twins, nodes, stretch)
        row = 0
        for job, sketch in zip(jobs, sketches, strict=True):
            end_row = row + len(job.tokens)
            sketch.note(job.tokens, job.parents, None if outcome.hidden is None else outcome.hidden[row:end_row])
            row = end_row
        return outcome

    def erase(self, slots: Sequence[Slot]) -> None:
        """Forget sketches; what is stored is written over."""
        for slot in slots:
            kv_slot(slot).sketch = None

    def _take_sketches(self, jobs: Sequence[Extend], last: int) -> dict[int, PartialTree]:
        """Sketches that a pass over these jobs can start from, by job: all of one part, which ends by layer `last`."""
        found: dict[int, PartialTree] = {}
        for index, job in enumerate(jobs):
            slot = kv_slot(job.slot)
            sketch, slot.sketch = slot.sketch, None
            if sketch is None or not sketch.keeps_hidden or sketch.end > last:
                continue
            if not found or next(iter(found.values())).part == sketch.part:
                found[index] = sketch
        return found

    @torch.inference_mode()
    def _resumed(
        self, jobs: Sequence[Extend], nodes: Sequence[Sequence[int]], sketches: Mapping[int, PartialTree]
    ) -> LayerRange:
        """Bring all nodes to where the sketches end; the layers that are left to run."""
        first = next(iter(sketches.values()))
        starts = [0, *accumulate(len(job.tokens) for job in jobs)]
        hidden = first.hidden().new_zeros(starts[-1], first.hidden().shape[1])
        late = dict(enumerate(range(len(job.tokens)) for job in jobs))  # by job, places of nodes without a sketch
        for index, sketch in sketches.items():
            found = sketch.find(jobs[index].tokens, jobs[index].parents)
            late[index] = found.missing  # type: ignore[assignment]
            hidden[[starts[index] + place for place in found.places]] = sketch.hidden()[found.sources]
            self._pool.memory.move(sketch.nodes, found.sources, found.places, layers=range(first.end))
        late = {index: places for index, places in late.items() if places}
        if late:
            parts = [
                replace(jobs[i], tokens=[jobs[i].tokens[place] for place in places], logits_at=())
                for i, places in late.items()
            ]
            chosen = [[nodes[i][place] for place in places] for i, places in late.items()]
            outcome = self._counted_pass(parts, chosen, LayerRange(0, first.end, keeps_hidden=True))
            assert outcome.hidden is not None, "hidden states were asked for"
            hidden[[starts[i] + place for i, places in late.items() for place in places]] = outcome.hidden
        return LayerRange(first.end, self.num_layers, hidden=hidden)

    def commit(self, slot: Slot, path: Sequence[int]) -> None:
        """Compact the path behind the prefix, in place."""
        self._pool.commit([kv_slot(slot)], [path])

    def commit_many(self, slots: Sequence[Slot], paths: Sequence[Sequence[int]]) -> None:
        """Compact the paths behind the prefixes, in place."""
        self._pool.commit([kv_slot(slot) for slot in slots], paths)

    def prune(self, slot: Slot, keep: Sequence[int]) -> None:
        """Compact the kept nodes behind the prefix, still tentative."""
        self._pool.prune(kv_slot(slot), keep)

    def truncate(self, slot: Slot, length: int) -> None:
        """Forget where the prefix went on; what is stored there is written over."""
        self._pool.truncate(kv_slot(slot), length)

    def fork(self, slot: Slot, length: int | None = None) -> KVSlot:
        """Copy the prefix, or the beginning of it, into a new slot."""
        return self._pool.fork(kv_slot(slot), length)

    def close(self, slot: Slot) -> None:
        """Free the slot's place."""
        self._pool.close(kv_slot(slot))


def asked_rows(jobs: Sequence[Extend], order: Sequence[int]) -> list[int]:
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
