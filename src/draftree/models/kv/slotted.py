"""What all models with slots of our own have in common: everything but the pass itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from draftree.core.errors import UnsupportedModelError
from draftree.models.base import (
    ALL_LAYERS,
    Close,
    Commit,
    Edit,
    Extend,
    Fork,
    LanguageModel,
    LayerSubset,
    Pass,
    PassResult,
    Slot,
    Truncate,
)
from draftree.models.check import TOLERANCE, partial_error
from draftree.models.kv.partial import LayerRange, PartialTree, RangeOutput, require_capture
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
    def _pass(self, jobs: Sequence[Extend], nodes: Sequence[Sequence[int]], layers: LayerRange) -> RangeOutput:
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

    def run(self, pass_: Pass) -> PassResult:
        """One forward pass over the new tokens of all jobs, side by side as (1, rows)."""
        if pass_.capture:
            self.require_capture(pass_.capture)
        jobs = pass_.jobs
        output = self._run_whole(jobs, pass_.capture) if pass_.layers == ALL_LAYERS else self._run_part(pass_)
        if pass_.capture and output.captured is None:
            raise UnsupportedModelError(
                f"{self.kind} does not return hidden states of its layers: choose a drafter that needs none"
            )
        return PassResult.of_jobs(jobs, output.logits, output.captured)

    def _run_whole(self, jobs: Sequence[Extend], capture: tuple[int, ...]) -> RangeOutput:
        partials = self._take_partials(jobs, capture)
        nodes = self._pool.append([kv_slot(job.slot) for job in jobs], jobs)
        layers = self._resumed(jobs, nodes, partials) if partials else LayerRange(0, self.num_layers)
        return self._counted_pass(jobs, nodes, replace(layers, capture=capture) if capture else layers)

    def _counted_pass(self, jobs: Sequence[Extend], nodes: Sequence[Sequence[int]], layers: LayerRange) -> RangeOutput:
        self.num_sublayer_runs += sum(map(len, nodes)) * layers.num_sublayers
        return self._pass(jobs, nodes, layers)

    def require_capture(self, layers: Sequence[int]) -> None:
        """Refuse layers that this model does not have."""
        require_capture(layers, first=0, end=self.num_layers)

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
    def _run_part(self, pass_: Pass) -> RangeOutput:
        """One pass through a part of the layers."""
        jobs, part = pass_.jobs, pass_.layers
        partials = []
        for job in jobs:
            slot = kv_slot(job.slot)
            assert not slot.num_tentative, "a slot with partial nodes has no tentative tree"
            if slot.partial is None or slot.partial.part != part:
                slot.partial = PartialTree(slot, part)
            partials.append(slot.partial)
        nodes = self._pool.append([partial.nodes for partial in partials], jobs)
        end = self.num_layers if part.end is None else part.end
        keeps_hidden = part.is_beginning and end < self.num_layers
        layers = LayerRange(0, end, part, keeps_hidden=keeps_hidden, capture=pass_.capture)
        twins = [replace(job, slot=partial.nodes) for job, partial in zip(jobs, partials, strict=True)]
        output = self._counted_pass(twins, nodes, layers)
        row = 0
        for job, partial in zip(jobs, partials, strict=True):
            end_row = row + len(job.tokens)
            partial.note(job.tokens, job.parents, None if output.hidden is None else output.hidden[row:end_row])
            row = end_row
        return output

    def _take_partials(self, jobs: Sequence[Extend], capture: Sequence[int]) -> dict[int, PartialTree]:
        """Partial nodes that a pass over these jobs can continue from, by job: all of one part."""
        found: dict[int, PartialTree] = {}
        for index, job in enumerate(jobs):
            slot = kv_slot(job.slot)
            partial, slot.partial = slot.partial, None
            if partial is None or not partial.keeps_hidden or any(layer < partial.end for layer in capture):
                continue
            if not found or next(iter(found.values())).part == partial.part:
                found[index] = partial
        return found

    @torch.inference_mode()
    def _resumed(
        self, jobs: Sequence[Extend], nodes: Sequence[Sequence[int]], partials: Mapping[int, PartialTree]
    ) -> LayerRange:
        """Bring all nodes to where the partial ones end; the layers that are left to run."""
        first = next(iter(partials.values()))
        starts = [0, *accumulate(len(job.tokens) for job in jobs)]
        hidden = first.hidden().new_zeros(starts[-1], first.hidden().shape[1])
        late = dict(
            enumerate(range(len(job.tokens)) for job in jobs)
        )  # by job, places of nodes that are not computed yet
        for index, partial in partials.items():
            found = partial.find(jobs[index].tokens, jobs[index].parents)
            late[index] = found.missing  # type: ignore[assignment]
            hidden[[starts[index] + place for place in found.places]] = partial.hidden()[found.sources]
            self._pool.memory.move(partial.nodes, found.sources, found.places, layers=range(first.end))
        late = {index: places for index, places in late.items() if places}
        if late:
            parts = [
                replace(jobs[i], tokens=[jobs[i].tokens[place] for place in places], logits_at=())
                for i, places in late.items()
            ]
            chosen = [[nodes[i][place] for place in places] for i, places in late.items()]
            output = self._counted_pass(parts, chosen, LayerRange(0, first.end, keeps_hidden=True))
            assert output.hidden is not None, "hidden states were asked for"
            hidden[[starts[i] + place for i, places in late.items() for place in places]] = output.hidden
        return LayerRange(first.end, self.num_layers, hidden=hidden)

    def apply(self, edits: Sequence[Edit]) -> list[Slot]:
        """Apply edits; what is dropped stays stored until it is overwritten."""
        opened: list[Slot] = []
        commits: dict[KVSlot, Commit] = {}
        for edit in edits:
            slot = kv_slot(edit.slot)
            if commits and (not isinstance(edit, Commit) or slot in commits):
                self._pool.commit(list(commits.values()))
                commits.clear()
            match edit:
                case Commit():
                    commits[slot] = edit
                case Truncate(_, length):
                    self._pool.truncate(slot, length)
                case Fork(_, length):
                    opened.append(self._pool.fork(slot, length))
                case Close():
                    self._pool.close(slot)
        if commits:
            self._pool.commit(list(commits.values()))
        return opened


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
