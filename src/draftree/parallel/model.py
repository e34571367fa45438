"""The model on rank 0: its own share, and every operation repeated by the other ranks."""

from __future__ import annotations

import contextlib
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from draftree.core.errors import DraftreeError, RankError, UnsupportedModelError
from draftree.models.base import (
    Close,
    Commit,
    Edit,
    EmbeddingFacts,
    Fork,
    LanguageModel,
    LayerSubset,
    Pass,
    PassResult,
    Slot,
    Truncate,
)
from draftree.models.kv.slotted import SlottedModel
from draftree.models.memory import Footprint
from draftree.parallel.channel import (
    Leader,
    Member,
    MessageError,
    MessageReader,
    MessageWriter,
    Operation,
    ending_with,
)

Found = TypeVar("Found")


@final
class ParallelModel(LanguageModel):
    """Model that several processes compute together, as rank 0 uses it.

    Edits are applied here at once and sent with the next pass, so a round needs one message.
    """

    def __init__(
        self,
        shard: SlottedModel,
        leader: Leader,
        *,
        has_embeddings: bool = True,
        has_parts: bool = False,
        state: int = 0,
        node: int = 0,
    ) -> None:
        self.own = shard
        self.kind = shard.kind
        self.vocab_size, self.max_length = shard.vocab_size, shard.max_length
        self.supports_trees, self.is_exact = shard.supports_trees, shard.is_exact
        self.device, self.dtype = shard.device, shard.dtype
        self.fingerprint, self.num_layers, self.self_check = shard.fingerprint, shard.num_layers, shard.self_check
        self._leader, self._writer = leader, MessageWriter()
        self._has_embeddings = has_embeddings  # whether rank 0 can return embedding, head, norm and hidden states
        self._has_parts = has_parts  # whether embedding and head of a share are its rows, which the others report
        self._state, self._node = state, node  # bytes of states of a slot and of a node, of the rank with most
        self._knows_norm = False
        self._lock = threading.RLock()
        self._ending = weakref.finalize(self, _stop, leader, self._writer, self._lock)

    @property
    def num_bytes_sent(self) -> int:
        """Bytes of all messages so far, to one rank."""
        return self._leader.num_bytes

    @property
    def num_messages(self) -> int:
        return self._leader.num_messages

    @property
    def footprint(self) -> Footprint:
        return replace(self.own.footprint, state=self._state, node=self._node)

    @property
    def num_warm_ups(self) -> int:
        return self.own.num_warm_ups

    @property
    def num_open(self) -> int:
        return self.own.num_open

    def check_integrity(self) -> None:
        self.own.check_integrity()

    def reserve(self, num_slots: int, length: int) -> None:
        with self._lock:
            self._writer.add("reserve", num_slots, length)
            self.own.reserve(num_slots, length)

    def open(self) -> Slot:
        """Return an empty slot; it has the same id in all processes."""
        with self._lock:
            self._writer.add("open")
            return self.own.open()

    def cut_length(self, slot: Slot, length: int) -> int:
        return self.own.cut_length(slot, length)

    def run(self, pass_: Pass) -> PassResult:
        with self._lock:
            if pass_.capture:
                self.require_capture(pass_.capture)
            self._writer.run(pass_, self.own.num_open)
            return self._together(lambda: self.own.run(pass_))

    def apply(self, edits: Sequence[Edit]) -> list[Slot]:
        """Apply edits here; the other ranks apply them before the next pass."""
        with self._lock:
            self._writer.edits(edits)
            return self.own.apply(edits)

    def require_part(self, part: LayerSubset) -> None:
        self._require_embeddings("run a part of its layers")
        self.own.require_part(part, whole=self)

    def require_capture(self, layers: Sequence[int]) -> None:
        if layers:
            self._require_embeddings("return hidden states of all layers")
        self.own.require_capture(layers)

    def input_embedding(self) -> Tensor:
        self._require_embeddings("return its embedding")
        return self._ask("input_embedding", lambda: self._gathered(self.own.input_embedding()))

    def output_head(self) -> Tensor:
        self._require_embeddings("return its head")
        return self._ask("output_head", lambda: self._gathered(self.own.output_head()))

    def embedding_facts(self) -> EmbeddingFacts:
        self._require_embeddings("return its head")
        return self._ask("embedding_facts", self.own.embedding_facts)

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Return hidden states after the final norm; the first call runs a pass in all processes."""
        self._require_embeddings("return its final norm")
        if not self._knows_norm:
            probe = torch.zeros(1, hidden.shape[-1], device=hidden.device)
            self._ask("final_norm", lambda: self.own.final_norm(probe), width=probe.shape[1])
            self._knows_norm = True
        return self.own.final_norm(hidden)

    def on_loss(self, callback: Callable[[RankError], bool]) -> Callable[[], None]:
        """Call a function, on another thread, when a rank ends; a pass may never return then.

        Unless it returns that nothing uses the model any more, this process ends after some seconds.
        """

        def lose(reason: str) -> None:
            if callback(RankError(ending_with(reason))):
                self._leader.drop()

        return self._leader.lifelines.on_failure(lose)

    def stop(self) -> None:
        """End the other ranks; idempotent. The model cannot be used afterwards."""
        self._ending()

    def _require_embeddings(self, what: str) -> None:
        if not self._has_embeddings:
            raise UnsupportedModelError(
                f"{self.kind} is divided into stages, so one process cannot {what}: use tp and no pp, or a drafter "
                "that needs nothing of the target"
            )

    def _gathered(self, rows: Tensor) -> Tensor:
        if not self._has_parts:
            return rows
        others = [
            torch.frombuffer(bytearray(data), dtype=torch.uint8).view(rows.dtype) for data in self._leader.reports()
        ]
        return torch.cat([rows, *(other.view(-1, rows.shape[1]) for other in others)])

    def _ask(self, method: str, compute: Callable[[], Found], *, width: int = 0) -> Found:
        with self._lock:
            self._writer.add("ask", method, width)
            return self._together(compute)

    def _together(self, compute: Callable[[], Found]) -> Found:
        """Send what was written, and compute what the other ranks compute as well; all raise the same of our errors."""
        try:
            self._leader.send(self._writer.take())
            result = compute()
            if self._leader.lifelines.failure is not None:  # a released pass has computed nothing of use
                self._leader.give_up(None)
            return result
        except DraftreeError:
            raise
        except Exception as error:
            self._leader.give_up(error)
        except BaseException:  # the pass is not complete here, so the others cannot go on
            self._leader.drop()
            raise


def _stop(leader: Leader, writer: MessageWriter, lock: threading.RLock) -> None:
    if not leader.is_open or leader.lifelines.failure is not None:
        return  # a pass that waits for an ended rank keeps the lock
    with lock:
        try:
            leader.send(writer.take(is_last=True))
        except DraftreeError:
            return
        leader.close()


def follow(model: SlottedModel, member: Member, *, has_parts: bool = False) -> None:
    """Repeat the operations of rank 0 on this rank's share until it stops."""
    replay, reader = _Replay(model, member if has_parts else None), MessageReader()
    while True:
        header, rest = member.receive()
        is_last, operations = reader.read(header, rest, replay.slots)
        replay.apply_all(operations)
        if is_last:
            return


class _Replay:
    """Slots of this rank, by id."""

    def __init__(self, model: SlottedModel, reports_to: Member | None) -> None:
        self._model, self._reports_to = model, reports_to
        self.slots: dict[int, Slot] = {}
        self._commits: list[Commit] = []

    def apply_all(self, operations: Iterator[Any]) -> None:
        for operation in operations:
            if isinstance(operation, Commit):
                self._commits.append(operation)  # successive commits are one operation
                continue
            self._flush()
            self._apply(operation)
        self._flush()

    def _flush(self) -> None:
        if self._commits:
            self._model.apply(self._commits)
            self._commits = []

    def _apply(self, operation: Operation) -> None:
        match operation:
            case ("open",):
                slot = self._model.open()
                self.slots[slot.id] = slot
            case "reserve", num_slots, length:
                self._model.reserve(num_slots, length)
            case Fork():
                (slot,) = self._model.apply([operation])  # type: ignore[assignment]
                self.slots[slot.id] = slot
            case Truncate():
                self._model.apply([operation])
            case Close(slot):
                number = slot.id
                self._model.apply([operation])
                del self.slots[number]
            case "run", pass_, num_open:
                if self._model.num_open != num_open:
                    raise MessageError(f"{self._model.num_open} slots are open and not {num_open} as on rank 0")
                self._model.run(pass_)
            case "ask", method, width:
                self._answer(method, width)

    @torch.inference_mode()
    def _answer(self, method: str, width: int) -> None:
        model = self._model
        with contextlib.suppress(UnsupportedModelError):  # rank 0 raises it as well
            match method:
                case "input_embedding":
                    self._report(model.input_embedding())
                case "output_head":
                    self._report(model.output_head())
                case "embedding_facts":
                    model.embedding_facts()
                case "final_norm":
                    model.final_norm(torch.zeros(1, width, device=model.device))
                case _:
                    raise MessageError(f"a message asks for '{method}', which does not exist")

    def _report(self, rows: Tensor) -> None:
        if self._reports_to is not None:
            self._reports_to.report(rows.contiguous().view(torch.uint8).numpy().tobytes())


@contextmanager
def signals_ignored() -> Iterator[None]:
    """Ignore Ctrl-C and SIGTERM: a rank ends when rank 0 has ended, which may have requests to finish."""
    numbers = [signal.SIGINT, signal.SIGTERM] if threading.current_thread() is threading.main_thread() else []
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
