"""Model of another process: passes and edits go through a pipe, logits come back.

Both sides are processes of one program, so values are pickled. Slots travel as their ids: the other process opens slots
in the same order, so its slots have the same ids.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, final

import torch

from draftree.core.errors import DraftreeError
from draftree.models.base import (
    Close,
    Commit,
    CountedSlot,
    Edit,
    Fork,
    LanguageModel,
    Pass,
    PassResult,
    Slot,
    SlotIds,
    Truncate,
)
from draftree.models.memory import Footprint
from draftree.sampling.logits import TensorLogits


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> int | None:
        return value.id if isinstance(value, Slot) else None


class _Unpickler(pickle.Unpickler):
    slots: Mapping[int, Slot]

    def persistent_load(self, number: int) -> Slot:
        return self.slots[number]


def encode(value: Any) -> bytes:
    """Encode passes or edits; edits before they are applied, because closed slots have no id."""
    stream = io.BytesIO()
    _Pickler(stream).dump(value)
    return stream.getvalue()


def decode(data: bytes, slots: Mapping[int, Slot]) -> Any:
    """Decode passes or edits on these slots. An edit must not use a slot that an earlier one of them opens."""
    unpickler = _Unpickler(io.BytesIO(data))
    unpickler.slots = slots
    return unpickler.load()


FACTS = ("vocab_size", "max_length", "supports_trees", "fingerprint", "is_exact", "dtype")


class ProcessEndedError(DraftreeError):
    """The process of a model has ended, or failed in a pass."""


@final
class ProcessModel(LanguageModel):
    """Model that another process runs with `serve_model`. One thread at a time uses it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        facts = self._received()
        for name in FACTS:
            setattr(self, name, facts[name])
        self.device = torch.device("cpu")
        self._footprint = Footprint(weights=facts["weights"], token=0, logits=0, row=0, state=facts["state"])
        self._ids = SlotIds()

    @property
    def footprint(self) -> Footprint:
        return self._footprint

    @property
    def num_open(self) -> int:
        return self._ids.num_taken

    def reserve(self, num_slots: int, length: int) -> None:
        self._asked("reserve", num_slots, length)

    def open(self) -> CountedSlot:
        return self._opened(self._asked("open"))

    def cut_length(self, slot: Slot, length: int) -> int:
        return self._asked("cut_length", slot, length) if self._footprint.state else length

    def run(self, pass_: Pass) -> PassResult:
        rows = torch.from_numpy(self._asked("run", pass_))
        for job in pass_.jobs:
            _counted(job.slot).num_tentative += len(job.tokens)
        return PassResult.of_jobs(pass_.jobs, TensorLogits(rows.view(-1, self.vocab_size)))

    def apply(self, edits: Sequence[Edit]) -> list[Slot]:
        numbers = iter(self._asked("apply", edits))
        opened: list[Slot] = []
        for edit in edits:
            slot = _counted(edit.slot)
            match edit:
                case Commit() | Truncate():
                    slot.note(edit)
                case Fork(_, length):
                    opened.append(self._opened(next(numbers), length))
                case Close():
                    self._ids.free(slot.id)
        return opened

    def _opened(self, number: int, length: int = 0) -> CountedSlot:
        assert self._ids.take() == number, "both processes open slots in the same order"
        return CountedSlot(number, length)

    def _asked(self, *request: Any) -> Any:
        try:
            self._connection.send_bytes(encode(request))
        except (OSError, ValueError) as error:
            raise ProcessEndedError(f"the process of the model has ended: {error}") from error
        return self._received()

    def _received(self) -> Any:
        try:
            reply = self._connection.recv()
        except (OSError, EOFError) as error:
            raise ProcessEndedError("the process of the model has ended") from error
        if isinstance(reply, ProcessEndedError):
            raise reply
        return reply


def _counted(slot: Slot) -> CountedSlot:
    assert isinstance(slot, CountedSlot), "the slot is of this model"
    return slot


def serve_model(connection: Connection, model: LanguageModel) -> None:
    """Answer the requests of a `ProcessModel` until its side is closed."""
    slots: dict[int, Slot] = {}
    with contextlib.suppress(EOFError, OSError):
        facts = {name: getattr(model, name) for name in FACTS}
        connection.send(facts | {"weights": model.footprint.weights, "state": model.footprint.state})
        while True:
            data = connection.recv_bytes()
            try:
                reply = _answered(decode(data, slots), model, slots)
            except Exception as error:  # the other side decides; this process goes on
                reply = ProcessEndedError(f"the process of the model failed: {type(error).__name__}: {error}")
            connection.send(reply)


def _answered(request: Sequence[Any], model: LanguageModel, slots: dict[int, Slot]) -> Any:
    match request:
        case "reserve", num_slots, length:
            model.reserve(num_slots, length)
            return None
        case ("open",):
            slot = model.open()
            slots[slot.id] = slot
            return slot.id
        case "apply", edits:
            closed = [edit.slot.id for edit in edits if isinstance(edit, Close)]  # a closed slot has lost its id
            opened = model.apply(edits)
            for number in closed:
                del slots[number]
            slots.update({slot.id: slot for slot in opened})
            return [slot.id for slot in opened]
        case "cut_length", slot, length:
            return model.cut_length(slot, length)
        case "run", pass_:
            logits = model.run(pass_).logits
            rows = logits.tensor() if logits.num_rows else torch.empty(0)
            return (rows if rows.dtype == torch.float64 else rows.float()).contiguous().numpy()
    raise ValueError(f"unknown request '{request[0]}'")
