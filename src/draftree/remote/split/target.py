"""A target whose first layers run here and whose others run on a verify server, as a `LanguageModel`.

The device holds the embedding, the first layers, the final norm and the output head. Token ids stay here; the server
gets hidden states, positions and parents. Drafts with the first layers (`early-exit:N`) are reused by the pass of the
target: only layers that ran nowhere yet are run.

Where the logits are computed is a choice. On the device: the server returns outputs of the last layer, and every
sampling parameter, log-probabilities and all verifiers work. On the server: it returns picks, which are a few bytes,
and knows the tokens of the text that it picks.
"""

from __future__ import annotations

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
from draftree.remote.split.messages import StateFormat, text_free_params
from draftree.sampling.logits import Logits, PickedRows, TensorLogits


def read_out(local: SlottedModel, jobs: Sequence[Extend], states: Sequence[Tensor]) -> Logits:
    """Return the requested nodes' logits from the last layer's outputs for each job's last nodes, (nodes, hidden)."""
    rows: list[Tensor] = []
    for job, own in zip(jobs, states, strict=True):
        first = len(job.tokens) - len(own)
        rows += [own[row - first] for row in job.rows]
    if not rows:
        return TensorLogits(torch.empty(0, local.vocab_size))
    return local.read_out(torch.stack(rows))


def picked_rows(jobs: Sequence[Extend], results: Sequence[Sequence[Any]], vocab: int) -> PickedRows:
    found: list[int] = []
    for job, parts in zip(jobs, results, strict=True):
        picks = [pick for part in parts for pick in part]
        if not all(0 <= pick < vocab for pick in picks):
            raise RefusedError("the server picked a token beyond the vocabulary", code="bad_reply")
        first = len(job.tokens) - len(picks)
        found += [picks[row - first] for row in job.rows]
    return PickedRows(found, vocab)


def make_turns(
    local: LanguageModel, form: StateFormat, jobs: Sequence[Extend], *, capture: Sequence[int]
) -> list[tuple[Turn, list[int]]]:
    """Return for each job what is sent, and its nodes in the local slot.

    With `capture` all nodes have results, else those from the first with logits on.
    """
    lower = tuple(layer for layer in capture if layer < local.num_layers)
    found: list[tuple[SplitSlot, Extend, list[int]]] = []
    late: list[tuple[SplitSlot, Extend]] = []
    for job in jobs:
        slot = split_slot(job.slot)
        # nodes of drafts have no states of lower layers
        nodes, missing = slot.find(job.tokens, job.parents, is_new=bool(lower))
        found.append((slot, job, nodes))
        if missing:
            known = [*slot.nodes, *nodes]
            above = [ROOT if job.parents[place] == ROOT else known[job.parents[place]] for place in missing]
            late.append((slot, Extend(slot.local, [job.tokens[place] for place in missing], above, logits_at=())))
    below: dict[int, Tensor] = {}
    if late:
        result = local.run(Pass([extend for _, extend in late], capture=(*lower, local.num_layers)))
        for index, (slot, extend) in enumerate(late):
            slot.note_local(extend.tokens, extend.parents, result.hidden_of(index)[:, -1])
            below[id(slot)] = result.hidden_of(index)[:, :-1]
    turns = []
    for slot, job, nodes in found:
        wanted = len(nodes) if capture else len(nodes) - min(job.rows, default=len(nodes))
        packed = form.pack(slot.states_of(nodes))
        turn = Turn(slot, tuple(job.parents), packed, wanted, below[id(slot)].float().cpu() if lower else None)
        turns.append((turn, nodes))
    return turns


def captured_states(
    capture: Sequence[int],
    turns: Sequence[tuple[Turn, list[int]]],
    *,
    split: int,
    returned: Mapping[int, Tensor],
) -> Tensor:
    """Return captured states of all nodes, shape (nodes, captured layers, hidden), float32."""
    each = dict(returned)
    lower = [layer for layer in capture if layer < split]
    if lower:
        below = torch.cat([turn.lower for turn, _ in turns if turn.lower is not None])
        each |= {layer: below[:, place] for place, layer in enumerate(lower)}
    if split in capture:
        each[split] = torch.cat([turn.slot.states_of(nodes) for turn, nodes in turns]).float().cpu()
    return torch.stack([each[layer] for layer in capture], dim=1)


def note_pass(
    link: Link,
    turns: Sequence[tuple[Turn, list[int]]],
    jobs: Sequence[Extend],
    *,
    row_bytes: int,
    times: tuple[float, float, float],
) -> None:
    """Note times and bytes of a pass; states of nodes without logits are those of prompts, and do not count."""
    up, down = link.traffic()
    latency = link.latency
    read = [min(job.rows, default=len(job.tokens)) for job in jobs]
    for (turn, _), job, count in zip(turns, jobs, read, strict=True):
        turn.slot.num_read = count if job.num_logits else None
    num_decoding = sum(bool(job.num_logits) for job in jobs)
    prompts = sum(read) * row_bytes
    latency.prompt_bytes += prompts if num_decoding else up
    if not num_decoding:
        return
    latency.bytes_up += max(0, up - prompts)
    latency.bytes_down += down
    seconds, queue, passed = times
    latency.seconds += seconds
    latency.note_round(seconds, queue=queue, passed=passed, texts=num_decoding, tokens=0)


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
        self._nodes = welcome.nodes
        self._exchange = Exchange(link, address, limit=self.max_length)
        self.num_layers = self._exchange.num_layers
        kind = self._exchange.format
        found = self._exchange.probe.compare(local, kind, reads_out=not self.applies_controls)
        self.is_same = found.is_same  # whether states and logits of a few tokens have the server's bits
        # whether the format of states keeps them
        self.is_lossless = found.is_lossless and (self.applies_controls or self._exchange.keeps)
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
        trip = self.link.latency.trip_seconds
        return self.link.latency.costs() or {1: trip, max_rows: trip}

    def reserve(self, num_slots: int, length: int) -> None:
        self.local.reserve(num_slots, length)

    def open(self) -> Slot:
        """Return an empty slot; its text begins on the server with its first pass."""
        if self.applies_controls:
            raise UnsupportedModelError(
                "a server that picks writes texts of requests only: use generate, chat or stream, or picks=device"
            )
        return self._opened(None)

    def _opened(self, request: SlotRequest | None) -> SplitSlot:
        slot = SplitSlot(self.local.open(), self._exchange.format.row_bytes, request)
        self._exchange.slots[slot.id] = slot
        return slot

    def opener(self, request: SlotRequest) -> Callable[[], Slot] | None:
        if not self.applies_controls:
            return None
        params = request.controls.params
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(params, name) is not None:
                raise InvalidRequestError(f"{name} needs logits: use picks=device in the address", param=name)
        text_free_params(params)
        return lambda: self._opened(request)

    def run(self, pass_: Pass) -> PassResult:
        if pass_.layers != ALL_LAYERS:
            return self._run_first(pass_)
        self.require_capture(pass_.capture)
        start, capture = self._clock(), pass_.capture
        turns = make_turns(self.local, self._exchange.format, pass_.jobs, capture=capture)
        # layers whose states the server returns, the last one last
        layers = (
            ()
            if self.applies_controls
            else tuple(sorted({at for at in capture if at > self.split} | {self.num_layers}))
        )
        try:
            queue, passed = self._exchange.run([turn for turn, _ in turns], layers)
        except FrameError as error:
            raise RefusedError(f"the server's reply cannot be used: {error}", code=error.code) from error
        for turn, nodes in turns:
            turn.slot.append(turn.parents, nodes, turn.packed)
        seconds = self._clock() - start
        note_pass(
            self.link, turns, pass_.jobs, row_bytes=self._exchange.format.row_bytes, times=(seconds, queue, passed)
        )
        results = [turn.results for turn, _ in turns]
        if self.applies_controls:
            return PassResult.of_jobs(pass_.jobs, picked_rows(pass_.jobs, results, self.vocab_size))
        none = torch.empty(0, len(layers), self._exchange.format.hidden)
        states = [torch.cat(parts) if parts else none for parts in results]
        logits = read_out(self.local, pass_.jobs, [own[:, -1] for own in states])
        if not capture:
            return PassResult.of_jobs(pass_.jobs, logits)
        hidden = captured_states(
            capture, turns, split=self.split, returned=dict(zip(layers, torch.cat(states).unbind(1), strict=True))
        )
        return PassResult.of_jobs(pass_.jobs, logits, hidden.to(self.device))

    def _run_first(self, pass_: Pass) -> PassResult:
        """Run a draft pass through the first layers; a whole pass continues from its nodes."""
        self.require_part(pass_.layers)
        slots = [split_slot(job.slot) for job in pass_.jobs]
        assert not any(slot.parents for slot in slots), "a slot with partial nodes has no tentative tree"
        jobs = [replace(job, slot=slot.local) for job, slot in zip(pass_.jobs, slots, strict=True)]
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
                    self.local.truncate(slot.local, length)
                case Fork(_, length):
                    opened.append(self._forked(slot, length))
                case Close():
                    self._closed(slot)
        return opened

    def _forked(self, slot: SplitSlot, length: int) -> SplitSlot:
        if self.applies_controls:
            raise UnsupportedModelError("texts that the server picks cannot be copied")
        copy = SplitSlot(self.local.fork(slot.local, length), self._exchange.format.row_bytes, None)
        copy.sent += slot.rows(0, length)
        self._exchange.slots[copy.id] = copy
        return copy

    def _closed(self, slot: SplitSlot) -> None:
        del self._exchange.slots[slot.id]
        self.link.latency.tokens += slot.num_read is not None  # a round whose path was not committed
        self.local.close(slot.local)
        self._exchange.end(slot)

    def disconnect(self) -> None:
        self._exchange.close()
