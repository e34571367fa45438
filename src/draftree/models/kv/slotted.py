"""Base classes of models with our own slots: all but the forward pass, and sources of encoder-decoder models."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from draftree.core.errors import UnsupportedModelError
from draftree.core.tensors import rows_of, to_device
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
from draftree.models.kv.slots import KVSlot, LayerRange, PartialTree, RangeOutput, SlotPool, kv_slot, require_capture
from draftree.models.memory import Footprint
from draftree.models.source import EncoderDecoder, FeatureSource, HiddenSource, Source
from draftree.models.torch.seq2seq.sources import require_source
from draftree.sampling.logits import Logits


class SlottedModel(LanguageModel):
    """Model whose keys and values are stored in our slots."""

    def __init__(self, kind: str, *, num_layers: int, pool: SlotPool) -> None:
        self.kind = kind
        self.num_layers = num_layers
        self._pool = pool
        self._checked_parts = False

    @abstractmethod
    def _pass(self, jobs: Sequence[Extend], nodes: Sequence[Sequence[int]], layers: LayerRange) -> RangeOutput:
        """Run a pass over `nodes`, the jobs' tokens; hidden states are in the order of the jobs."""

    @property
    @abstractmethod
    def footprint(self) -> Footprint:
        """Memory of weights, keys and values, and activations in bytes."""

    @property
    def _continues_partials(self) -> bool:
        """Whether whole passes continue from the hidden states of partial nodes."""
        return True

    def _require_layers(self, part: LayerSubset) -> None:
        """Check that this implementation can select the layers of a subset."""

    def reserve(self, num_slots: int, length: int) -> None:
        self._pool.reserve(num_slots, length)

    def open(self) -> KVSlot:
        """Return an empty slot: the free one with the lowest index, so that open slots stay neighbours."""
        return self._pool.open()

    def cut_length(self, slot: Slot, length: int) -> int:
        return self._pool.cut_length(kv_slot(slot), length)

    @property
    def num_open(self) -> int:
        return self._pool.num_open

    def check_integrity(self) -> None:
        self._pool.check_integrity()

    def run(self, pass_: Pass) -> PassResult:
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
        nodes = self._pool.append([kv_slot(job.slot) for job in jobs], jobs)
        partials = self._take_partials(jobs, capture)
        if partials:
            # a state moves over settled tokens in all layers at once: partial nodes have their own states
            jobs = [replace(job, settled=0) if index in partials else job for index, job in enumerate(jobs)]
        layers = self._resumed(jobs, nodes, partials) if partials else LayerRange(0, self.num_layers)
        return self._counted_pass(jobs, nodes, replace(layers, capture=capture) if capture else layers)

    def _counted_pass(self, jobs: Sequence[Extend], nodes: Sequence[Sequence[int]], layers: LayerRange) -> RangeOutput:
        self.num_sublayer_runs += sum(map(len, nodes)) * layers.num_sublayers
        return self._pass(jobs, nodes, layers)

    def require_capture(self, layers: Sequence[int]) -> None:
        require_capture(layers, first=0, end=self.num_layers)

    def require_part(self, part: LayerSubset, *, whole: LanguageModel | None = None) -> None:
        """Check that this model runs a subset of its layers, with correct logits.

        `whole`: the model of which this one is a share, whose passes are compared; None for this model.
        """
        end = self.num_layers if part.end is None else part.end
        strange = sorted(layer for layer in part.attention | part.mlp if layer >= self.num_layers)
        if strange or not 0 < end <= self.num_layers:
            raise UnsupportedModelError(
                f"{self.kind} has {self.num_layers} layers, numbered from 0: "
                f"layer {strange[0] if strange else end} does not exist"
            )
        self._require_layers(part)
        if not self._checked_parts:
            try:
                error = partial_error(whole or self)
            except AssertionError:
                raise  # a mistake of ours, not the model's
            except Exception as reason:  # a model's own code may raise anything
                raise UnsupportedModelError(
                    f"{self.kind} cannot run its layers in two parts: choose a drafter that runs no part of the model"
                ) from reason
            if not error <= TOLERANCE[self.dtype]:
                raise UnsupportedModelError(
                    f"{self.kind} gives other logits when its layers run in two parts "
                    f"(error {error:.1e} of their spread): choose a drafter that runs no part of the model"
                )
            self._checked_parts = True

    @torch.inference_mode()
    def _run_part(self, pass_: Pass) -> RangeOutput:
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
        keeps_hidden = self._continues_partials and part.is_beginning and end < self.num_layers
        layers = LayerRange(0, end, part, keeps_hidden=keeps_hidden, capture=pass_.capture)
        twins = [replace(job, slot=partial.nodes) for job, partial in zip(jobs, partials, strict=True)]
        output = self._counted_pass(twins, nodes, layers)
        counts = [len(job.tokens) for job in jobs]
        parts = [None] * len(jobs) if output.hidden is None else output.hidden.split(counts)
        for job, partial, hidden in zip(jobs, partials, parts, strict=True):
            partial.note(job.tokens, job.parents, hidden)
        return output

    def _take_partials(self, jobs: Sequence[Extend], capture: Sequence[int]) -> dict[int, PartialTree]:
        """Remove the jobs' partial nodes; return by job those that the pass can continue from, all of one subset."""
        partials: dict[int, PartialTree] = {}
        for index, job in enumerate(jobs):
            slot = kv_slot(job.slot)
            partial, slot.partial = slot.partial, None
            if partial is None or not partial.keeps_hidden or any(layer < partial.end for layer in capture):
                continue
            if not partials or next(iter(partials.values())).part == partial.part:
                partials[index] = partial
        return partials

    @torch.inference_mode()
    def _resumed(
        self, jobs: Sequence[Extend], nodes: Sequence[Sequence[int]], partials: Mapping[int, PartialTree]
    ) -> LayerRange:
        """Compute all nodes up to the layer where the partial nodes end; return the remaining layers."""
        first = next(iter(partials.values()))
        starts = [0, *accumulate(len(job.tokens) for job in jobs)]
        hidden = first.hidden().new_zeros(starts[-1], first.hidden().shape[1])
        # by job, nodes that are not computed yet
        late: dict[int, Sequence[int]] = {index: range(len(job.tokens)) for index, job in enumerate(jobs)}
        for index, partial in partials.items():
            known = partial.find(jobs[index].tokens, jobs[index].parents)
            places = list(known)
            sources = list(known.values())
            rows = to_device([starts[index] + place for place in places], self.device)
            hidden[rows] = rows_of(partial.hidden(), sources)
            self._pool.resume(kv_slot(jobs[index].slot), partial.nodes, sources, places, layers=range(first.end))
            late[index] = [place for place in late[index] if place not in known]
        late = {index: places for index, places in late.items() if places}
        if late:
            parts = [
                replace(jobs[i], tokens=[jobs[i].tokens[place] for place in places], logits_at=())
                for i, places in late.items()
            ]
            chosen = [[nodes[i][place] for place in places] for i, places in late.items()]
            output = self._counted_pass(parts, chosen, LayerRange(0, first.end, keeps_hidden=True))
            assert output.hidden is not None, "hidden states were requested"
            rest = [starts[i] + place for i, places in late.items() for place in places]
            hidden[to_device(rest, self.device)] = output.hidden
        return LayerRange(first.end, self.num_layers, hidden=hidden)

    @torch.inference_mode()
    def run_rest(
        self, jobs: Sequence[Extend], hidden: Tensor, *, first: int, capture: Sequence[int] = ()
    ) -> PassResult:
        """Append nodes whose first layers ran elsewhere, shape (rows, hidden), and run the layers from `first` on."""
        nodes = self._pool.append([kv_slot(job.slot) for job in jobs], jobs)
        states = hidden.to(self.device, torch.float64 if self.dtype == torch.float64 else torch.float32).contiguous()
        layers = LayerRange(first, self.num_layers, hidden=states, capture=tuple(capture))
        output = self._counted_pass(jobs, nodes, layers)
        return PassResult.of_jobs(jobs, output.logits, output.captured)

    @torch.inference_mode()
    def read_out(self, hidden: Tensor) -> Logits:
        """Return logits of the last layer's outputs before the norm, shape (rows, hidden), computed as in a pass."""
        slot = self._pool.open()
        try:
            result = self.run_rest(
                [Extend(slot, [0] * len(hidden), range(-1, len(hidden) - 1))], hidden, first=self.num_layers
            )
        finally:
            self._pool.close(slot)
        return result.logits

    def apply(self, edits: Sequence[Edit]) -> list[Slot]:
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


def requested_rows(jobs: Sequence[Extend]) -> list[int]:
    """Return the rows whose logits are requested in a pass with the jobs in their order."""
    starts = accumulate((len(job.tokens) for job in jobs), initial=0)
    return [start + node for job, start in zip(jobs, starts, strict=False) for node in job.rows]


class RowOrder:
    """Rows of a pass in the order of their slots, which attention takes."""

    def __init__(self, jobs: Sequence[Extend], nodes: Sequence[Sequence[int]]) -> None:
        self.jobs = sorted(range(len(jobs)), key=lambda job: kv_slot(jobs[job].slot).index)
        self.slots = [kv_slot(jobs[job].slot) for job in self.jobs]
        self.nodes = [nodes[job] for job in self.jobs]
        self.counts = [len(jobs[job].tokens) for job in self.jobs]
        self.settled = [jobs[job].settled for job in self.jobs]
        self.tokens = [token for job in self.jobs for token in jobs[job].tokens]
        self.positions = [
            slot.offset + slot.length - 1 + slot.depths[node]
            for slot, chosen in zip(self.slots, self.nodes, strict=True)
            for node in chosen
        ]
        starts = dict(zip(self.jobs, accumulate(self.counts, initial=0), strict=False))
        # place of each row, in the order of the jobs
        self.places = [starts[job] + row for job, extend in enumerate(jobs) for row in range(len(extend.tokens))]
        self.requested = [self.places[row] for row in requested_rows(jobs)]


WITHOUT_PARTS = "is an encoder-decoder model, of which no part runs alone: choose a drafter that runs no model"


class Encoded(Protocol):
    source: Source
    num_slots: int  # number of slots that refer to it


EncodedT = TypeVar("EncodedT", bound=Encoded)


class SourcedModel(SlottedModel, EncoderDecoder, Generic[EncodedT]):
    """Encoder-decoder model that encodes a source once and keeps it while slots refer to it."""

    def __init__(self, kind: str, *, num_layers: int, pool: SlotPool) -> None:
        super().__init__(kind, num_layers=num_layers, pool=pool)
        self._encoded: dict[Source, EncodedT] = {}
        self._attended: list[np.ndarray] | None = None  # cross-attention of each job of the current pass, if wanted
        self._source_of: dict[int, EncodedT] = {}  # source of each open slot, by its index

    @abstractmethod
    def _encode(self, source: Source) -> Tensor:
        """Return the encoder's output, shape (1, length, features)."""

    @abstractmethod
    def _keep(self, source: Source, hidden: Tensor) -> EncodedT:
        """Return a source with the keys and values of the encoder's output."""

    @property
    def num_sources(self) -> int:
        return len(self._encoded)

    def source_length(self, source: Source) -> int:
        if isinstance(source, HiddenSource):
            return int(source.hidden.shape[1])
        return self.max_source_length if isinstance(source, FeatureSource) else len(source.tokens)

    def open(self) -> KVSlot:
        EncoderDecoder.open(self)
        raise AssertionError("not reached")

    @torch.inference_mode()
    def open_on(self, source: Source) -> KVSlot:
        """Return an empty slot on a source; the encoder runs for a source that no open slot refers to."""
        require_source(source, self.feature_shape, kind=self.kind)
        known = self._encoded.get(source)
        if known is None:
            hidden = source.hidden if isinstance(source, HiddenSource) else self._encode(source)
            known = self._encoded[source] = self._keep(source, hidden)
        slot = self._pool.open()
        self._refer(slot.index, known)
        return slot

    def run_attending(self, pass_: Pass) -> tuple[PassResult, list[np.ndarray]]:
        attended = self._attended = []
        try:
            return self.run(pass_), attended
        finally:
            self._attended = None

    def _refer(self, index: int, source: EncodedT) -> None:
        source.num_slots += 1
        self._source_of[index] = source

    def apply(self, edits: Sequence[Edit]) -> list[Slot]:
        before = [(edit, kv_slot(edit.slot).index) for edit in edits if isinstance(edit, (Fork, Close))]
        opened = super().apply(edits)
        new = iter(opened)
        for edit, index in before:
            if isinstance(edit, Fork):
                self._refer(kv_slot(next(new)).index, self._source_of[index])
                continue
            source = self._source_of.pop(index)
            source.num_slots -= 1
            if not source.num_slots:
                del self._encoded[source.source]
        return opened

    def check_integrity(self) -> None:
        super().check_integrity()
        assert len(self._source_of) == self.num_open, "every open slot has a source"
        for source in self._encoded.values():
            count = sum(used is source for used in self._source_of.values())
            assert source.num_slots == count > 0, "references are counted, and a source without slots is dropped"

    def require_part(self, part: LayerSubset, *, whole: LanguageModel | None = None) -> None:
        raise UnsupportedModelError(f"{self.kind} {WITHOUT_PARTS}")

    def require_capture(self, layers: Sequence[int]) -> None:
        if layers:
            raise UnsupportedModelError(f"{self.kind} {WITHOUT_PARTS}")
