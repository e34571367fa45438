"""The device's messages of a split: texts begin with the states of their prefix, and passes send new nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from draftree.core.errors import ModelLoadError
from draftree.core.tree import ROOT
from draftree.models.base import Extend, LanguageModel, Pass, Slot, SlotRequest
from draftree.models.kv.slotted import SlottedModel
from draftree.remote.address import FrameError, RefusedError, RemoteAddress
from draftree.remote.link import Link
from draftree.remote.protocol import MAX_FRAME_BYTES, results_of, times_of
from draftree.remote.split.messages import (
    PROBE_TOKENS,
    RowsEdit,
    SentRows,
    StateFormat,
    pack_rows,
    probe_tokens,
    text_free_params,
)


@final
class SplitSlot(Slot):
    """One text. Mutated by `SplitModel` only.

    `row_bytes`: bytes of a packed state. `request`: what the server needs to pick; None if the device picks. `text`:
    number of the text on the server; 0 if it is not there. `was_open`: whether it has been there. `used`: number of the
    last pass with it. `limit`: tokens for which the server has room.
    """

    def __init__(self, local: Slot, row_bytes: int, request: SlotRequest | None) -> None:
        self.local, self.request, self._row_bytes = local, request, row_bytes
        self.text, self.was_open, self.used, self.limit = 0, False, 0, 0
        self.sent = bytearray()  # packed states of the committed tokens
        self.parents: list[int] = []  # of the tentative nodes
        self.nodes: list[int] = []  # for each tentative node its node in the local slot
        self.packed: list[bytes] = []  # packed states of the tentative nodes
        self.edit: RowsEdit | None = None  # of the server's slot, not sent yet; None for none
        self.ahead = 0  # first tentative nodes, all settled, that are in the server's prefix already
        # nodes of the last pass before its root, until they are committed; None after a pass of a prompt only
        self.num_read: int | None = None
        self._places: dict[tuple[int, int], int] = {}
        self._states: list[Tensor] = []

    @property
    def id(self) -> int:
        return self.local.id

    @property
    def length(self) -> int:
        return len(self.sent) // self._row_bytes

    @property
    def num_tentative(self) -> int:
        return len(self.parents)

    def note_local(self, tokens: Sequence[int], parents: Sequence[int], states: Tensor) -> None:
        """Add nodes of the local slot, with the output of the first layers, shape (nodes, hidden)."""
        for token, parent, state in zip(tokens, parents, states, strict=True):
            self._places.setdefault((parent, int(token)), len(self._states))
            self._states.append(state)

    def find(
        self, tokens: Sequence[int], parents: Sequence[int], *, is_new: bool = False
    ) -> tuple[list[int], list[int]]:
        """Return for each new tentative node its node in the local slot, and which are not there yet.

        Nodes that are not there are numbered as if they were appended in order; with `is_new` none is.
        """
        used, local_nodes = set(self.nodes), list(self.nodes)
        missing: list[int] = []
        for place, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            above = ROOT if parent == ROOT else local_nodes[parent]
            node = self._places.get((above, int(token)))
            if is_new or node is None or node in used:
                node = len(self._states) + len(missing)
                missing.append(place)
            used.add(node)
            local_nodes.append(node)
        return local_nodes[len(self.nodes) :], missing

    def states_of(self, nodes: Sequence[int]) -> Tensor:
        """Return the states of nodes of the local slot, shape (nodes, hidden)."""
        return torch.stack([self._states[node] for node in nodes])

    def append(self, parents: Sequence[int], nodes: Sequence[int], packed: np.ndarray) -> None:
        """Add tentative nodes, with their nodes in the local slot and their packed states."""
        self.parents += parents
        self.nodes += nodes
        self.packed += [row.tobytes() for row in packed]

    def drop_local(self) -> None:
        self._places.clear()
        self._states.clear()

    def commit(self, path: Sequence[int], keep: Sequence[int]) -> tuple[list[int], list[int]]:
        """Move a path into the prefix; returns path and kept nodes, ascending, of the local slot."""
        local_path, local_keep = [self.nodes[node] for node in path], [self.nodes[node] for node in keep]
        self._note_edit(tuple(path), tuple(keep))
        for node in path:
            self.sent += self.packed[node]
        order = sorted(local_keep)
        last = path[-1] if path else ROOT
        places = {node: place for place, node in enumerate(keep)} | {last: ROOT}
        self.parents = [places[self.parents[node]] for node in keep]
        self.packed = [self.packed[node] for node in keep]
        self.nodes = [order.index(node) for node in local_keep]
        states = [self._states[node] for node in order]
        self.drop_local()
        self._states = states
        return local_path, order

    def _note_edit(self, path: tuple[int, ...], keep: tuple[int, ...]) -> None:
        """Join an edit with those that the server does not have yet."""
        if before := self.edit:
            path, keep = (tuple(before.keep[node] for node in nodes) for nodes in (path, keep))
            path = before.path + path
        self.edit = RowsEdit(path, keep)

    def truncate(self, length: int) -> None:
        if self.parents or length < self.length:
            self._note_edit((), ())
        del self.sent[length * self._row_bytes :]
        self.parents, self.nodes, self.packed = [], [], []
        self.drop_local()

    def rows(self, start: int, stop: int) -> bytes:
        """Return the packed states of committed tokens."""
        return bytes(self.sent[start * self._row_bytes : stop * self._row_bytes])


def split_slot(slot: Slot) -> SplitSlot:
    assert isinstance(slot, SplitSlot), "a split target has slots of its own"
    return slot


MAX_HIDDEN = 1 << 16
ACCEPTED = {torch.float32: 1e-3, torch.bfloat16: 6e-2, torch.float16: 1e-2}
"""Largest difference of states that is rounding, by the dtype of the weights."""
LARGEST = 0.95
"""Larger values of a row, by share of its values, do not count: a few of them are many times as large as all others."""


@dataclass(frozen=True, slots=True)
class Probe:
    middle: Tensor  # output of the device's layers, shape (tokens, hidden), float32
    last: Tensor  # output of the last layer, shape (tokens, hidden), float32
    best: Tensor  # largest logit of each token, shape (tokens,), float32

    @property
    def hidden(self) -> int:
        return self.middle.shape[1]

    @classmethod
    def of_whole(cls, model: LanguageModel, split: int) -> Probe:
        """Return the states of a model with all layers."""
        hidden, logits = _run(model, (split, model.num_layers))
        return cls(hidden[:, 0], hidden[:, 1], logits.amax(dim=-1))

    def fields(self, kind: StateFormat) -> dict[str, Any]:
        """Return the fields of a reply, in float32, and whether the format keeps the server's states."""
        names = {"middle": self.middle, "last": self.last, "best": self.best}
        content = {name: value.numpy().astype("<f4").tobytes() for name, value in names.items()}
        return {**content, "lossless": kind.keeps(self.last)}

    @classmethod
    def read(cls, reply: Mapping[str, Any], hidden: int) -> Probe:
        if not 0 < hidden <= MAX_HIDDEN:
            raise FrameError("the server's states have a size that no model has")
        rows = StateFormat("float32", hidden)
        each = {name: reply.get(name) for name in ("middle", "last", "best")}
        if not all(isinstance(value, bytes) for value in each.values()):
            raise FrameError("the server's reply has no states to compare")
        best = StateFormat("float32", 1).unpack(each["best"] or b"", PROBE_TOKENS)[:, 0]
        return cls(
            rows.unpack(each["middle"] or b"", PROBE_TOKENS), rows.unpack(each["last"] or b"", PROBE_TOKENS), best
        )

    def compare(self, local: SlottedModel, kind: StateFormat, *, reads_out: bool) -> tuple[bool, bool]:
        """Compare these states with those of a device's layers, and the output head with the device's.

        Returns whether all states and logits have the same bits, and whether the format keeps the device's states.
        """
        hidden, _ = _run(local, (local.num_layers,))
        accepted, mine = ACCEPTED[local.dtype], hidden[:, 0]
        error = _difference(mine, self.middle)
        is_same, is_lossless = torch.equal(mine, self.middle), kind.keeps(mine)
        if reads_out and error <= accepted:
            best = local.read_out(self.last).tensor().float().amax(dim=-1).cpu()
            error = float((best - self.best).abs().max()) / (float(self.best.abs().max()) or 1.0)
            is_same = is_same and torch.equal(best, self.best)
        if not error <= accepted:
            raise ModelLoadError(
                f"the first {local.num_layers} layers or the output head of this device are not those of the server's "
                f"model (they differ by {error:.1e} of their size, and rounding by at most {accepted:.0e}): name the "
                "same weights as the server's, and the same dtype and quantization"
            )
        return is_same, is_lossless


@torch.inference_mode()
def _run(model: LanguageModel, capture: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return captured states, shape (tokens, layers, hidden), and logits of the probe's tokens."""
    tokens = probe_tokens(model.vocab_size)
    slot = model.open_probe()
    try:
        result = model.run(Pass([Extend(slot, tokens, range(-1, len(tokens) - 1))], capture=capture))
        assert result.hidden is not None, "states were captured"
        return result.hidden.float().cpu().clone(), result.logits.tensor().float().cpu().clone()
    finally:
        model.close(slot)


def _difference(states: Tensor, wanted: Tensor) -> float:
    """Return the relative difference of states in the row where it is largest, without the largest values."""
    if states.shape != wanted.shape:
        return float("inf")
    counts = wanted.abs() <= wanted.abs().quantile(LARGEST, dim=-1, keepdim=True)
    error, size = ((states - wanted) * counts).norm(dim=-1), (wanted * counts).norm(dim=-1)
    return float((error / size.clamp(min=1e-30)).amax())


MAX_ROWS = 256  # nodes of one frame at most: a prompt of another device waits no longer than for one such pass
LEAST_LIMIT = 1024
"""Tokens for which there is room in a text at first, if its length is unknown; doubled when they are too few."""
SPARE_BYTES = 1 << 14  # bytes of a frame for everything but states


@dataclass(slots=True)
class Turn:
    slot: SplitSlot  # of the text
    job: Extend  # of the new nodes
    nodes: Sequence[int]  # in the local slot
    packed: np.ndarray  # their packed states, shape (nodes, row_bytes)
    wanted: int  # how many of the last nodes have results
    # outputs of earlier layers of the device, shape (nodes, layers, hidden); None if none are asked for
    lower: Tensor | None = None
    # states of these, shape (nodes, layers, hidden), or picks, in parts
    results: list[Any] = field(default_factory=list)


@final
class Exchange:
    """A session that sends hidden states. For one thread.

    `num_layers`: layers of the whole model. `probe`: states of the server to compare with. `is_recurrent`: whether the
    server's layers have states, which it cannot cut. `keeps`: whether the server says that its states are unchanged by
    the format.
    """

    def __init__(self, link: Link, address: RemoteAddress, *, limit: int) -> None:
        self.link, self._address, self._limit = link, address, limit
        self._texts = 0
        self._num_runs = 0
        self._ended: list[int] = []
        self.slots: dict[int, SplitSlot] = {}  # open slots by id
        reply = self._join()
        hidden, layers = reply.get("hidden"), reply.get("layers")
        if not isinstance(hidden, int) or not isinstance(layers, int) or not address.split < layers:
            raise FrameError("the server's reply to 'join' has no sizes")
        self.probe, self.num_layers, self.keeps = Probe.read(reply, hidden), layers, bool(reply.get("lossless"))
        self.is_recurrent = bool(reply.get("recurrent"))
        self.format = StateFormat(address.states, hidden)  # of states in both directions
        self._last = [layers] if address.picks == "device" else []
        self._rows = max(1, min(MAX_ROWS, (MAX_FRAME_BYTES - SPARE_BYTES) // self.format.row_bytes))

    def _join(self) -> dict[str, Any]:
        split = self._address.split
        states = self._address.states
        picks = self._address.picks
        try:
            reply = self.link.request({"t": "join", "split": split, "states": states, "picks": picks})
        except RefusedError as error:
            if error.code != "unknown_type":
                raise
            advice = f"start it with 'draftree verify-server MODEL --split {split}'"
            raise RefusedError(f"the server takes no hidden states: {advice}", code=error.code) from error
        self.link.traffic()  # the states that are compared count for no token
        return reply

    def run(self, turns: Sequence[Turn], layers: Sequence[int]) -> tuple[float, float]:
        """Send the nodes of all turns and fill their results; returns the server's seconds of queue and passes."""
        return self.link.retried(lambda: self._run(turns, layers), self._reopen)

    def _reopen(self) -> None:
        self._ended.clear()
        for slot in self.slots.values():
            slot.text = 0  # sent again when it is next used
        self.link.begin()
        self._join()

    def _run(self, turns: Sequence[Turn], layers: Sequence[int]) -> tuple[float, float]:
        self._num_runs += 1
        for turn in turns:
            turn.slot.used = self._num_runs
            if self._outgrows(turn):
                self.end(turn.slot)
        kept = {id(turn): self._begin(turn.slot, _tokens_of(turn)) for turn in turns if not turn.slot.text}
        queue = passed = 0.0
        for turn in turns:
            turn.results = []
        for frame in self._frames(turns, kept):
            reply = self.link.request(
                {"t": "rows", "x": [pack_rows(rows) for _, rows in frame], "layers": list(layers)}
            )
            for turn, rows in frame:
                turn.slot.edit, turn.slot.ahead = None, rows.length - turn.slot.length
            results = results_of(reply)
            if len(results) != len(frame):
                raise RefusedError("the server's reply has another number of texts than the request", code="bad_reply")
            for (turn, rows), result in zip(frame, results, strict=True):
                if rows.wanted:
                    turn.results.append(self._checked(result, rows.wanted, len(layers)))
            times = times_of(reply)
            queue, passed = queue + times[0], passed + times[1]
        return queue, passed

    def _checked(self, result: Any, wanted: int, num_layers: int) -> Any:
        """Return states, shape (nodes, layers, hidden), or picks."""
        if self._address.picks == "device":
            states = self.format.unpack(result if isinstance(result, bytes) else b"", wanted * num_layers)
            return states.unflatten(0, (wanted, num_layers))
        if not isinstance(result, list) or len(result) != wanted or not all(isinstance(pick, int) for pick in result):
            raise FrameError("the server's picks cannot be read", code="bad_reply")
        return result

    def _outgrows(self, turn: Turn) -> bool:
        """Return whether a text needs more room than it has on the server: it begins again there, with more."""
        slot = turn.slot
        return bool(slot.text) and slot.request is None and slot.limit < min(self._limit, _tokens_of(turn))

    def _begin(self, slot: SplitSlot, num_tokens: int) -> int:
        """Open a text on the server with its prefix's states; returns how many kept nodes it needs again."""
        self._make_room()
        self._texts += 1
        request = slot.request
        params = {} if request is None else text_free_params(request.controls.params)
        seed = 0 if request is None else request.controls.noise.seed
        # the length of a text without a request is unknown, and the server counts memory by limits
        limit = min(self._limit, max(LEAST_LIMIT, 2 * num_tokens) if request is None else request.limit)
        self.link.latency.reopened += slot.was_open
        ends, self._ended = self._ended, []
        self.link.request(
            {"t": "begin", "text": self._texts, "limit": limit, "seed": seed, "params": params, "ends": ends}
        )
        slot.text, slot.was_open, slot.edit, slot.ahead, slot.limit = self._texts, True, None, 0, limit
        start = 0
        while start < slot.length:
            count = min(self._rows, slot.length - start)
            data = slot.rows(start, start + count)
            rows = SentRows(slot.text, start, slot.edit, tuple(range(-1, count - 1)), 0, count, data)
            self.link.request({"t": "rows", "x": [pack_rows(rows)], "layers": self._last})
            slot.edit = RowsEdit(tuple(range(count)))
            start += count
        return len(slot.parents)

    def _frames(self, turns: Sequence[Turn], kept: dict[int, int]) -> Iterator[list[tuple[Turn, SentRows]]]:
        """Divide nodes into frames; a text that does not fit into one goes on in the next.

        Settled nodes of a frame are in the server's prefix before those of the next one follow.
        """
        frame: list[tuple[Turn, SentRows]] = []
        room = self._rows
        for turn in turns:
            slot, again = turn.slot, kept.get(id(turn), 0)
            parents = [*slot.parents[:again], *turn.job.parents]
            data = b"".join([*slot.packed[:again], turn.packed.tobytes()])
            settled = 0 if slot.parents else turn.job.settled
            edit, ahead = slot.edit, slot.ahead
            if edit is not None:
                edit, ahead = edit.after(ahead), 0
            start, size = 0, self.format.row_bytes
            while start < len(parents) or not parents:
                count = min(room, len(parents) - start)
                stop = start + count
                wanted = max(0, min(count, stop - (len(parents) - turn.wanted)))
                if 0 < start <= settled:
                    edit, ahead = RowsEdit(tuple(range(start - ahead))), start
                above = tuple(max(ROOT, parent - ahead) for parent in parents[start:stop])
                part, certain = data[start * size : stop * size], max(0, min(count, settled - start))
                frame.append((turn, SentRows(slot.text, slot.length + ahead, edit, above, wanted, certain, part)))
                edit, start, room = None, stop, room - count
                if not room or start < len(parents):
                    yield frame
                    frame, room = [], self._rows
                if not parents:
                    break
        if frame:
            yield frame

    def _make_room(self) -> None:
        """End the text that was not used for the longest time if the server has as many as it takes of a session."""
        there = [slot for slot in self.slots.values() if slot.text]
        if len(there) >= self.link.welcome.texts:
            self.end(min(there, key=lambda slot: slot.used))

    def end(self, slot: SplitSlot) -> None:
        """End a text on the server, with the next text that begins."""
        if slot.text:
            self._ended.append(slot.text)
            slot.text = 0

    def close(self) -> None:
        for slot in self.slots.values():
            slot.text = 0
        self._ended.clear()
        self.link.close()


def _tokens_of(turn: Turn) -> int:
    """Return the tokens that a text has after a pass, if its tree is a chain."""
    return turn.slot.length + len(turn.slot.parents) + len(turn.job.parents)
