"""A target on a verify server, as a `LanguageModel`: passes send drafted trees, and return the accepted tokens.

The engine of the device runs as with any target: it plans, drafts, and writes what the target picks. The server holds
the model, the controls and the noise; a pass returns its picks on the accepted path, and no logits. A text without a
drafter is written by the server alone and read in pieces, so that its speed does not depend on the round trip.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import final

import torch

from draftree.core.errors import InvalidRequestError, UnsupportedModelError
from draftree.core.host import SYSTEM_CLOCK, Clock
from draftree.core.tree import TokenTree, is_path
from draftree.models.base import (
    Close,
    Commit,
    CountedSlot,
    Edit,
    Extend,
    Fork,
    LanguageModel,
    Pass,
    PassResult,
    Slot,
    SlotRequest,
    Truncate,
)
from draftree.remote.address import RefusedError, SessionLostError, UnreachableError
from draftree.remote.link import Link
from draftree.remote.protocol import (
    DraftedText,
    WalkedText,
    pack_draft,
    results_of,
    sendable_params,
    times_of,
    unpack_walk,
)
from draftree.sampling.history import History
from draftree.sampling.logits import PickedRows


def crc_of(history: History) -> int:
    """Return the CRC-32 of the tokens of prompt and text as little-endian 32-bit integers."""
    return zlib.crc32(history.tokens.astype("<i4").tobytes())


@final
@dataclass(slots=True, eq=False)
class RemoteSlot(CountedSlot):
    """The device's part of a text on the server. Mutated by `RemoteModel` only."""

    request: SlotRequest = field(kw_only=True)
    text: int = -1
    is_done: bool = False  # whether the text has ended on the server
    unread: list[int] = field(default_factory=list)  # tokens that the server wrote alone and the engine has not taken


@dataclass(slots=True)
class _Turn:
    slot: RemoteSlot
    tree: TokenTree
    num_rows: int
    path: tuple[int, ...] = ()
    bonus: int = -1

    def picks(self) -> list[int]:
        picks = [-1] * self.num_rows
        row = 0
        for node in self.path:
            picks[row], row = self.tree.tokens[node], node + 1
        picks[row] = self.bonus
        return picks


@final
@dataclass(eq=False)
class RemoteModel(LanguageModel):
    link: Link
    device: torch.device
    dtype: torch.dtype
    clock: Clock = SYSTEM_CLOCK
    _slots: dict[int, RemoteSlot] = field(default_factory=dict)
    _texts: int = 0
    _last: tuple[tuple[int, ...], float] = ((), 0.0)  # texts of the last round, and when it ended

    applies_controls = True

    def __post_init__(self) -> None:
        welcome = self.link.welcome
        self.vocab_size, self.max_length = welcome.vocab_size, welcome.context
        self.supports_trees, self.is_exact = welcome.supports_trees, welcome.is_exact
        self.max_open, self._nodes = welcome.texts, welcome.nodes

    @property
    def note(self) -> str:
        return self.link.latency.report()

    @property
    def num_open(self) -> int:
        return len(self._slots)

    def known_costs(self, max_rows: int) -> Mapping[int, float]:
        return self.link.latency.costs(max_rows)

    def reserve(self, num_slots: int, length: int) -> None:
        """Do nothing: the server makes room when texts need it."""

    def open(self) -> Slot:
        raise UnsupportedModelError(
            "a remote target writes texts of requests only, with its own sampling: use generate, chat or stream"
        )

    def opener(self, request: SlotRequest) -> Callable[[], Slot]:
        params = request.controls.params
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(params, name) is not None:
                raise InvalidRequestError(f"{name} needs logits, which a remote target does not send", param=name)
        return lambda: self._open(request)

    def _open(self, request: SlotRequest) -> RemoteSlot:
        number = next(number for number in range(len(self._slots) + 1) if number not in self._slots)
        slot = RemoteSlot(number, request=request)
        self.link.retried(partial(self._begin, slot), self._reopen)
        self._slots[number] = slot
        return slot

    def _begin(self, slot: RemoteSlot) -> None:
        """Open the text of a slot on the server, with what is written of it."""
        request = slot.request
        history, length = request.history, request.history.prompt_length
        self._texts += 1
        slot.text, slot.unread, slot.is_done = self._texts, [], False
        self.link.request(
            {
                "t": "open",
                "text": slot.text,
                "prompt": history.tokens[:length].tolist(),
                "output": history.output.tolist(),
                "params": sendable_params(request.controls.params),
                "seed": request.controls.noise.seed,
                "limit": request.limit - length,
                "plain": request.is_plain,
            }
        )
        self.link.traffic()  # prompts do not count as bytes of rounds

    def run(self, pass_: Pass) -> PassResult:
        """Send the drafts of all texts that decode, in one frame; prompts were sent when the texts were opened."""
        turns = [turn for job in pass_.jobs if (turn := self._turn(job)) is not None]
        drafted = [turn for turn in turns if not turn.slot.request.is_plain]
        plain = [turn for turn in turns if turn.slot.request.is_plain]
        if drafted:
            self.link.retried(partial(self._verify, drafted), self._reopen)
        for turn in plain:
            self.link.retried(partial(self._read, turn), self._reopen)
        for job in pass_.jobs:
            _remote(job.slot).num_tentative += len(job.tokens)
        rows = [pick for turn in turns for pick in turn.picks()]
        return PassResult.of_jobs(pass_.jobs, PickedRows(rows, self.vocab_size))

    def _turn(self, job: Extend) -> _Turn | None:
        """Return what a job drafts: the nodes after its first row with logits; None for a part of a prompt."""
        slot, rows = _remote(job.slot), job.num_logits
        if not rows:
            return None
        root = len(job.tokens) - rows
        kept = min(rows - 1, self._nodes)
        parents = [parent - root - 1 for parent in job.parents[root + 1 :]][:kept]
        return _Turn(slot, TokenTree(tuple(job.tokens[root + 1 :])[:kept], tuple(parents)), rows)

    def _reopen(self) -> None:
        """Begin a new session, and open all texts again with what is written of them."""
        self.link.begin()
        for slot in self._slots.values():
            if not slot.is_done:
                self._begin(slot)
                self.link.latency.reopened += 1

    def _verify(self, turns: Sequence[_Turn]) -> None:
        start = self.clock()
        drafts = [
            DraftedText(turn.slot.text, len(history), crc_of(history), turn.tree)
            for turn in turns
            for history in [turn.slot.request.history]
        ]
        reply = self.link.request({"t": "verify", "x": [pack_draft(draft) for draft in drafts]})
        queue, passed = times_of(reply)
        allowed = reply.get("n")
        if isinstance(allowed, int):  # a busy server asks for smaller drafts
            self._nodes = max(0, min(self.link.welcome.nodes, allowed))
        walks = {walk.text: walk for walk in map(unpack_walk, results_of(reply))}
        for turn in turns:
            self._accept(turn, walks.get(turn.slot.text))
        end, latency = self.clock(), self.link.latency
        tokens = sum(len(turn.path) + 1 for turn in turns)
        latency.note_round(end - start, queue=queue, passed=passed, texts=len(turns), tokens=tokens)
        texts = tuple(turn.slot.text for turn in turns)
        latency.seconds += end - (self._last[1] if texts == self._last[0] else start)
        self._last = texts, end
        self._count_bytes()

    def _accept(self, turn: _Turn, walk: WalkedText | None) -> None:
        """Take a verdict, which must be one on the tree that was sent."""
        tree = turn.tree
        if walk is None or not is_path(tree.parents, walk.path) or not 0 <= walk.bonus < self.vocab_size:
            raise RefusedError("the server's verdict is not one on the draft: it is no verify server", code="bad_reply")
        turn.path, turn.bonus, turn.slot.is_done = walk.path, walk.bonus, walk.is_done

    def _read(self, turn: _Turn) -> None:
        """Take the next token of a text that the server writes alone; wait for it if none is there."""
        slot, history = turn.slot, turn.slot.request.history
        while not slot.unread:
            start = history.num_output_tokens
            reply = self.link.request({"t": "read", "text": slot.text, "start": start})
            tokens = results_of(reply)
            slot.unread = [token for token in tokens if isinstance(token, int) and 0 <= token < self.vocab_size]
            slot.is_done = slot.is_done or bool(reply.get("done"))
            if slot.is_done and not slot.unread:
                raise RefusedError("the server ended the text before the device did", code="bad_reply")
            self.link.latency.streamed += len(slot.unread)
            self._count_bytes()
        turn.bonus = slot.unread.pop(0)

    def _count_bytes(self) -> None:
        up, down = self.link.traffic()
        self.link.latency.bytes_up += up
        self.link.latency.bytes_down += down

    def apply(self, edits: Sequence[Edit]) -> list[Slot]:
        ended: list[int] = []
        for edit in edits:
            slot = _remote(edit.slot)
            match edit:
                case Commit() | Truncate():
                    slot.note(edit)
                case Fork():
                    raise UnsupportedModelError("texts of a remote target cannot be copied")
                case Close():
                    del self._slots[slot.id]
                    if not slot.is_done:
                        ended.append(slot.text)
        if ended:
            # if it fails, the server ends them with their lease
            with contextlib.suppress(SessionLostError, RefusedError, UnreachableError):
                self.link.request({"t": "close", "texts": ended})
            self.link.traffic()
        return []

    def disconnect(self) -> None:
        self.link.close()


def _remote(slot: Slot) -> RemoteSlot:
    assert isinstance(slot, RemoteSlot), "a remote target has remote slots"
    return slot
