"""A target whose first layers run here and whose others run on a verify server, as a `LanguageModel`.

The device holds the embedding, the first layers, the final norm and the output head. Token ids stay here; the server
gets hidden states, positions and parents. Drafts with the first layers (`early-exit:N`) are reused by the pass of the
target: only layers that ran nowhere yet are run.

Where the logits are computed is a choice. On the device: the server returns outputs of the last layer, and every
sampling parameter, log-probabilities and all verifiers work. On the server: it returns picks, which are a few bytes,
and knows the tokens of the text that it picks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor

from draftree.core.errors import InvalidRequestError, UnsupportedModelError, VocabularyMismatchError
from draftree.core.host import SYSTEM_CLOCK, Clock
from draftree.core.tree import ROOT
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
    SlotRequest,
    Truncate,
)
from draftree.models.kv.slotted import SlottedModel
from draftree.models.memory import Footprint
from draftree.remote.address import FrameError, RefusedError, RemoteAddress
from draftree.remote.link import Link
from draftree.remote.split.exchange import Exchange, SplitSlot, Turn, split_slot
from draftree.remote.split.messages import text_free_params
from draftree.sampling.logits import PickedRows, TensorLogits


def requested(turns: Sequence[Turn], results: Sequence[Any]) -> list[Any]:
    """Return the results of nodes with logits; `results` has those of each turn's last nodes."""
    return [
        turn_results[row + len(turn_results) - len(turn.job.tokens)]
        for turn, turn_results in zip(turns, results, strict=True)
        for row in turn.job.rows
    ]


@final
class SplitModel(LanguageModel):
    """The first layers of a model here, the others on a server."""

    def __init__(self, link: Link, local: SlottedModel, address: RemoteAddress, *, clock: Clock = SYSTEM_CLOCK) -> None:
        welcome = link.welcome
        if welcome.vocab_size != local.vocab_size:
            raise VocabularyMismatchError(
                f"the server's model has {welcome.vocab_size} tokens, and weights={address.weights} has "
                f"{local.vocab_size}: name the server's model"
            )
        if local.dtype == torch.float64:
            raise UnsupportedModelError("hidden states are sent in float32 at most: choose dtype float32")
        self.link, self.local, self.split, self._clock = link, local, address.split, clock
        self.vocab_size, self.device, self.dtype = local.vocab_size, local.device, local.dtype
        self.max_length = min(welcome.context, local.max_length)
        self.supports_trees = welcome.supports_trees and local.supports_trees
        self.is_exact = welcome.is_exact and local.is_exact
        self.max_open = welcome.texts
        self.applies_controls = address.picks == "server"
        self._exchange = Exchange(link, address, limit=self.max_length)
        self.num_layers = self._exchange.num_layers
        kind = self._exchange.format
        # whether states and logits of a few tokens have the server's bits, and whether the format of states keeps them
        self.is_same, is_lossless = self._exchange.probe.compare(local, kind, reads_out=not self.applies_controls)
        self.is_lossless = is_lossless and (self.applies_controls or self._exchange.keeps)
        link.latency.can_stream = False

    @property
    def here(self) -> LanguageModel:
        return self.local

    @property
    def footprint(self) -> Footprint:
        return self.local.footprint

    @property
    def note(self) -> str:
        report = self.link.latency.report()
        same = "the server's bits" if self.is_same else "the server's values up to rounding"
        kind = "kept" if self.is_lossless else "rounded, so texts are those of another function than the model"
        return report and f"{report}; states of {self.split} layers in {self._exchange.format.kind}: {same}, {kind}"

    @property
    def num_open(self) -> int:
        return len(self._exchange.slots)

    def check_integrity(self) -> None:
        self.local.check_integrity()
        for slot in self._exchange.slots.values():
            assert slot.local.length == slot.length, "both parts of a slot have one prefix"
            assert len(slot.parents) == len(slot.nodes) == len(slot.packed), "every node has states"

    def known_costs(self, max_rows: int) -> Mapping[int, float]:
        return self.link.latency.costs(max_rows)

    def reserve(self, num_slots: int, length: int) -> None:
        self.local.reserve(num_slots, length)

    def open(self) -> Slot:
        """Return an empty slot; its text begins on the server with its first pass."""
        if self.applies_controls:
            raise UnsupportedModelError(
                "a server that picks writes texts of requests only: use generate, chat or stream, or picks=device"
            )
        return self._opened(self.local.open(), None)

    def _opened(self, local: Slot, request: SlotRequest | None) -> SplitSlot:
        slot = SplitSlot(local, self._exchange.format.row_bytes, request)
        self._exchange.slots[slot.id] = slot
        return slot

    def cut_length(self, slot: Slot, length: int) -> int:
        """Return where the device's part can be cut; the server's begins again with the prefix's states."""
        return self.local.cut_length(split_slot(slot).local, length)

    def opener(self, request: SlotRequest) -> Callable[[], Slot] | None:
        if not self.applies_controls:
            return None
        params = request.controls.params
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(params, name) is not None:
                raise InvalidRequestError(f"{name} needs logits: use picks=device in the address", param=name)
        text_free_params(params)
        return lambda: self._opened(self.local.open(), request)

    def run(self, pass_: Pass) -> PassResult:
        if pass_.layers != ALL_LAYERS:
            return self._run_first(pass_)
        self.require_capture(pass_.capture)
        start, capture = self._clock(), pass_.capture
        turns = self._turns(pass_.jobs, capture)
        # layers whose states the server returns, the last one last
        above = sorted({layer for layer in capture if layer > self.split} | {self.num_layers})
        layers = [] if self.applies_controls else above
        try:
            queue, passed = self._exchange.run(turns, layers)
        except FrameError as error:
            raise RefusedError(f"the server's reply cannot be used: {error}", code=error.code) from error
        for turn in turns:
            turn.slot.append(turn.job.parents, turn.nodes, turn.packed)
        self._note_pass(turns, self._clock() - start, queue, passed)
        if self.applies_controls:
            picks = [list(itertools.chain(*turn.results)) for turn in turns]
            if not all(0 <= pick < self.vocab_size for turn_picks in picks for pick in turn_picks):
                raise RefusedError("the server picked a token beyond the vocabulary", code="bad_reply")
            return PassResult.of_jobs(pass_.jobs, PickedRows(requested(turns, picks), self.vocab_size))
        none = torch.empty(0, len(layers), self._exchange.format.hidden)
        states = [torch.cat([none, *turn.results]) for turn in turns]
        outputs = requested(turns, [turn_states[:, -1] for turn_states in states])
        logits = self.local.read_out(torch.stack(outputs)) if outputs else TensorLogits(torch.empty(0, self.vocab_size))
        if not capture:
            return PassResult.of_jobs(pass_.jobs, logits)
        captured = dict(zip(layers, torch.cat(states).unbind(1), strict=True))
        if lower := [layer for layer in capture if layer < self.split]:
            below = torch.cat([turn.lower for turn in turns if turn.lower is not None])
            captured |= zip(lower, below.unbind(1), strict=True)
        if self.split in capture:
            captured[self.split] = torch.cat([turn.slot.states_of(turn.nodes) for turn in turns]).float().cpu()
        hidden = torch.stack([captured[layer] for layer in capture], dim=1)
        return PassResult.of_jobs(pass_.jobs, logits, hidden.to(self.device))

    def _turns(self, jobs: Sequence[Extend], capture: Sequence[int]) -> list[Turn]:
        """Run the device's layers on nodes that lack their states, and return for each job what is sent.

        With `capture` all nodes have results, else those from the first with logits on.
        """
        lower = tuple(layer for layer in capture if layer < self.split)
        places: list[list[int]] = []
        late: list[tuple[SplitSlot, Extend]] = []
        for job in jobs:
            slot = split_slot(job.slot)
            # nodes of drafts have no states of lower layers
            nodes, missing = slot.find(job.tokens, job.parents, is_new=bool(lower))
            places.append(nodes)
            if missing:
                known = [*slot.nodes, *nodes]
                above = [ROOT if job.parents[place] == ROOT else known[job.parents[place]] for place in missing]
                tokens = [job.tokens[place] for place in missing]
                settled = 0 if slot.local.num_tentative else job.settled
                late.append((slot, Extend(slot.local, tokens, above, logits_at=(), settled=settled)))
        below: dict[int, Tensor] = {}
        if late:
            result = self.local.run(Pass([extend for _, extend in late], capture=(*lower, self.split)))
            for index, (slot, extend) in enumerate(late):
                slot.note_local(extend.tokens, extend.parents, result.hidden_of(index)[:, -1])
                below[id(slot)] = result.hidden_of(index)[:, :-1]
        turns = []
        for job, nodes in zip(jobs, places, strict=True):
            slot = split_slot(job.slot)
            wanted = len(nodes) if capture else len(nodes) - min(job.rows, default=len(nodes))
            packed = self._exchange.format.pack(slot.states_of(nodes))
            turns.append(Turn(slot, job, nodes, packed, wanted, below[id(slot)].float().cpu() if lower else None))
        return turns

    def _note_pass(self, turns: Sequence[Turn], seconds: float, queue: float, passed: float) -> None:
        """Note times and bytes of a pass; states of nodes without logits are those of prompts, and do not count."""
        up, down = self.link.traffic()
        latency = self.link.latency
        prompts = num_decoding = 0
        for turn in turns:
            count = min(turn.job.rows, default=len(turn.job.tokens))
            turn.slot.num_read = count if turn.job.num_logits else None
            num_decoding += bool(turn.job.num_logits)
            prompts += count * self._exchange.format.row_bytes
        latency.prompt_bytes += prompts if num_decoding else up
        if not num_decoding:
            return
        latency.bytes_up += max(0, up - prompts)
        latency.bytes_down += down
        latency.seconds += seconds
        latency.note_round(seconds, queue=queue, passed=passed, texts=num_decoding, tokens=0)

    def _run_first(self, pass_: Pass) -> PassResult:
        """Run a draft pass through the first layers; a whole pass continues from its nodes."""
        self.require_part(pass_.layers)
        slots = [split_slot(job.slot) for job in pass_.jobs]
        assert not any(slot.parents for slot in slots), "a slot with partial nodes has no tentative tree"
        # the next whole pass may follow another draft
        jobs = [replace(job, slot=slot.local, settled=0) for job, slot in zip(pass_.jobs, slots, strict=True)]
        result = self.local.run(Pass(jobs, capture=(self.split,)))
        for index, (job, slot) in enumerate(zip(jobs, slots, strict=True)):
            slot.note_local(job.tokens, job.parents, result.hidden_of(index)[:, 0])
        return PassResult.of_jobs(pass_.jobs, result.logits, result.hidden if pass_.capture else None)

    def require_part(self, part: LayerSubset) -> None:
        if part != LayerSubset(end=self.split):
            raise UnsupportedModelError(
                f"this device has the first {self.split} layers of the model: draft with 'early-exit:{self.split}', or "
                "with a drafter that runs no part of the target"
            )

    def require_capture(self, layers: Sequence[int]) -> None:
        if layers and self.applies_controls:
            raise UnsupportedModelError(
                "hidden states are asked for, and the server returns picks: use picks=device in the address"
            )
        if any(not 0 <= layer <= self.num_layers for layer in layers):
            raise UnsupportedModelError(f"the model has {self.num_layers} layers: choose from 0 to {self.num_layers}")

    def apply(self, edits: Sequence[Edit]) -> list[Slot]:
        """Edit the slots of the first layers; the server's follow with the next pass or text."""
        opened: list[Slot] = []
        for edit in edits:
            slot = split_slot(edit.slot)
            match edit:
                case Commit(_, path, keep):
                    if slot.num_read is not None:
                        self.link.latency.tokens += len(path) - slot.num_read
                    slot.num_read = None
                    self.local.commit(slot.local, *slot.commit(path, keep))
                case Truncate(_, length):
                    slot.truncate(length)
                    if self._exchange.is_recurrent:
                        self._exchange.end(slot)
                    self.local.truncate(slot.local, length)
                case Fork(_, length):
                    if self.applies_controls:
                        raise UnsupportedModelError("texts that the server picks cannot be copied")
                    copy = self._opened(self.local.fork(slot.local, length), None)
                    copy.sent += slot.rows(0, length)
                    opened.append(copy)
                case Close():
                    del self._exchange.slots[slot.id]
                    self.link.latency.tokens += slot.num_read is not None  # a round whose path was not committed
                    self.local.close(slot.local)
                    self._exchange.end(slot)
        return opened

    def disconnect(self) -> None:
        self._exchange.close()
