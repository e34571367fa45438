"""The loop of all ranks but rank 0: repeat what rank 0 does."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from draftree.core.errors import UnsupportedModelError
from draftree.models.base import Close, Commit, Edit, Fork, Slot, Truncate
from draftree.models.kv.slotted import SlottedModel
from draftree.parallel.channel import Member
from draftree.parallel.messages import Ask, Flag, MessageError, MessageReader, Open, Question, Reserve, Run

__all__ = ["follow", "signals_ignored"]


def follow(model: SlottedModel, member: Member, *, has_parts: bool = False) -> None:
    """Repeat the operations of rank 0 until it stops.

    Args:
        model: this rank's share.
        member: connection to rank 0.
        has_parts: as for `ParallelModel`.

    Raises:
        RankError: rank 0 ended without a stop.
        MessageError: a message is malformed, or its slots differ from ours.
    """
    replay, reader = _Replay(model, member if has_parts else None), MessageReader()
    while True:
        header, rest = member.receive()
        flag, operations = reader.read(header, rest, replay.slots)
        replay.apply_all(operations)
        if flag is Flag.STOP:
            return


class _Replay:
    """Slots of this rank, by id.

    Args:
        model: this rank's share.
        reports_to: gets this share's rows of embedding and head; None if the model gathers them.
    """

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

    def _apply(self, operation: Open | Reserve | Run | Ask | Edit) -> None:
        match operation:
            case Open():
                slot = self._model.open()
                self.slots[slot.id] = slot
            case Reserve(num_slots, length):
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
            case Run(pass_, num_open):
                if self._model.num_open != num_open:
                    raise MessageError(f"{self._model.num_open} slots are open and not {num_open} as on rank 0")
                self._model.run(pass_)
            case Ask():
                self._answer(operation)

    @torch.inference_mode()
    def _answer(self, ask: Ask) -> None:
        model = self._model
        with contextlib.suppress(UnsupportedModelError):  # rank 0 raises it as well
            match ask.question:
                case Question.INPUT_EMBEDDING:
                    self._report(model.input_embedding())
                case Question.OUTPUT_HEAD:
                    self._report(model.output_head())
                case Question.EMBEDDING_FACTS:
                    model.embedding_facts()
                case Question.FINAL_NORM:
                    model.final_norm(torch.zeros(1, ask.width, device=model.device))

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
