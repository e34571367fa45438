"""The device's messages of a split: texts begin with the states of their prefix, and passes send new nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
from torch import Tensor

from draftree.core.errors import GenerationError
from draftree.remote.address import RemoteAddress
from draftree.remote.errors import FrameError, RefusedError, SessionLostError
from draftree.remote.link import Link
from draftree.remote.protocol import MAX_FRAME_BYTES
from draftree.remote.replies import results_of, times_of
from draftree.remote.split.messages import RowsEdit, SentRows, pack_rows
from draftree.remote.split.probe import Probe
from draftree.remote.split.sampling import text_free_params
from draftree.remote.split.slots import SplitSlot
from draftree.remote.split.states import StateFormat

__all__ = ["Exchange", "Turn"]

MAX_REOPENED = 3
"""Attempts of one exchange whose texts the server lost."""
MAX_ROWS = 256
"""Nodes of one frame at most: a prompt of another device waits no longer than for one such pass."""
LEAST_LIMIT = 1024
"""Tokens for which there is room in a text at first, if its length is unknown; doubled when they are too few."""
SPARE_BYTES = 1 << 14
"""Bytes of a frame for everything but states."""


@dataclass(slots=True)
class Turn:
    """New nodes of one text, and their results.

    Attributes:
        slot: of the text.
        parents: of the nodes.
        packed: their packed states, shape (nodes, row_bytes).
        wanted: how many of the last nodes have results.
        lower: outputs of earlier layers of the device, shape (nodes, layers, hidden); None if none are asked for.
        results: states of these, shape (nodes, layers, hidden), or picks, in parts.
    """

    slot: SplitSlot
    parents: Sequence[int]
    packed: np.ndarray
    wanted: int
    lower: Tensor | None = None
    results: list[Any] = field(default_factory=list)


@final
class Exchange:
    """A session that sends hidden states. For one thread.

    Args:
        link: session with the server.
        address: options of the split.
        limit: most tokens of a text.

    Attributes:
        format: of states in both directions.
        num_layers: layers of the whole model.
        probe: states of the server to compare with.
        keeps: whether the server says that its states are unchanged by the format.

    Raises:
        RefusedError: the server has another split, or none.
        FrameError: its reply cannot be read.
    """

    def __init__(self, link: Link, address: RemoteAddress, *, limit: int) -> None:
        self.link, self._address, self._limit = link, address, limit
        self._texts = 0
        self._num_runs = 0
        self._ended: list[int] = []
        self.slots: dict[int, SplitSlot] = {}
        """Open slots by id."""
        reply = self._join()
        hidden, layers = reply.get("hidden"), reply.get("layers")
        if not isinstance(hidden, int) or not isinstance(layers, int) or not address.split < layers:
            raise FrameError("the server's reply to 'join' has no sizes")
        self.probe, self.num_layers, self.keeps = Probe.read(reply, hidden), layers, bool(reply.get("lossless"))
        self.format = StateFormat(address.states, hidden)
        self._last = [layers] if address.picks == "device" else []
        self._rows = max(1, min(MAX_ROWS, (MAX_FRAME_BYTES - SPARE_BYTES) // self.format.row_bytes))

    def _join(self) -> dict[str, Any]:
        where = self._address
        join = {"t": "join", "split": where.split, "states": where.states, "picks": where.picks}
        try:
            reply = self.link.request(join)
            self.link.traffic()  # the states that are compared count for no token
            return reply
        except RefusedError as error:
            if error.code == "unknown_type":
                raise RefusedError(
                    "the server takes no hidden states: start it with 'draftree verify-server MODEL --split "
                    f"{where.split}'",
                    code=error.code,
                ) from error
            raise

    def run(self, turns: Sequence[Turn], layers: Sequence[int]) -> tuple[float, float]:
        """Send the nodes of all turns and fill their results; returns the server's seconds of queue and passes.

        Args:
            turns: the nodes.
            layers: as for `Pass.capture`: states that are returned, those of the last layer among them; none for picks.

        Raises:
            UnreachableError: the server does not answer.
            RefusedError: it refuses the nodes.
            GenerationError: it loses its texts again and again.
        """
        return self._retried(lambda: self._run(turns, layers))

    def _retried(self, action: Callable[[], tuple[float, float]]) -> tuple[float, float]:
        for attempt in range(1 + MAX_REOPENED):
            try:
                if attempt:
                    self.link.begin()
                    self._join()
                return action()
            except SessionLostError as error:
                self._ended.clear()
                for slot in self.slots.values():
                    slot.text = 0  # sent again when it is next used
                if attempt == MAX_REOPENED:
                    raise GenerationError(f"the server loses its texts again and again: {error}") from error
        raise AssertionError("the last attempt returns or raises")

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
            for turn, _ in frame:
                turn.slot.edit = None
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
        """Open a text on the server with the states of its prefix; returns how many kept nodes it needs again.

        Args:
            slot: of the text.
            num_tokens: tokens for which there must be room now.
        """
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
        slot.text, slot.was_open, slot.edit, slot.limit = self._texts, True, None, limit
        start = 0
        while start < slot.length:
            count = min(self._rows, slot.length - start)
            data = slot.rows(start, start + count)
            rows = SentRows(slot.text, start, slot.edit, tuple(range(-1, count - 1)), 0, data)
            self.link.request({"t": "rows", "x": [pack_rows(rows)], "layers": self._last})
            slot.edit = RowsEdit(tuple(range(count)))
            start += count
        return len(slot.parents)

    def _frames(self, turns: Sequence[Turn], kept: dict[int, int]) -> Iterator[list[tuple[Turn, SentRows]]]:
        """Divide nodes into frames; a text that does not fit into one goes on in the next."""
        frame: list[tuple[Turn, SentRows]] = []
        room = self._rows
        for turn in turns:
            slot, again = turn.slot, kept.get(id(turn), 0)
            parents = [*slot.parents[:again], *turn.parents]
            data = b"".join([*slot.packed[:again], turn.packed.tobytes()])
            start, size = 0, self.format.row_bytes
            while start < len(parents) or not parents:
                count = min(room, len(parents) - start)
                stop = start + count
                wanted = max(0, min(count, stop - (len(parents) - turn.wanted)))
                edit = slot.edit if start == 0 else None
                part = data[start * size : stop * size]
                frame.append((turn, SentRows(slot.text, slot.length, edit, tuple(parents[start:stop]), wanted, part)))
                start, room = stop, room - count
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
        """End the session and its texts."""
        for slot in self.slots.values():
            slot.text = 0
        self._ended.clear()
        self.link.close()


def _tokens_of(turn: Turn) -> int:
    """Return the tokens that a text has after a pass, if its tree is a chain."""
    return turn.slot.length + len(turn.slot.parents) + len(turn.parents)
