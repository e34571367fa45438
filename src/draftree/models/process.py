"""Model of another process: encoded passes and edits go through a pipe, logits come back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, final

import torch

from draftree.core.errors import DraftreeError
from draftree.models.base import (
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
    SlotIds,
    Truncate,
)
from draftree.models.memory import Footprint
from draftree.sampling.logits import TensorLogits


def encode_pass(pass_: Pass) -> dict[str, Any]:
    """Encode a pass.

    Slots are encoded by id, everything as lists, dictionaries, integers and strings, as in JSON. The other process
    opens slots in the same order, so its slots have the same ids.
    """
    layers = pass_.layers
    return {
        "jobs": [
            [
                job.slot.id,
                _numbers(job.tokens),
                _numbers(job.parents),
                None if job.logits_at is None else _numbers(job.logits_at),
            ]
            for job in pass_.jobs
        ],
        "layers": [layers.end, sorted(layers.attention), sorted(layers.mlp)],
        "capture": list(pass_.capture),
    }


def decode_pass(data: Mapping[str, Any], slots: Mapping[int, Slot]) -> Pass:
    end, attention, mlp = data["layers"]
    jobs = [Extend(slots[slot], tokens, parents, logits_at) for slot, tokens, parents, logits_at in data["jobs"]]
    return Pass(jobs, LayerSubset(end, frozenset(attention), frozenset(mlp)), tuple(data["capture"]))


def encode_edits(edits: Sequence[Edit]) -> list[list[Any]]:
    """Encode edits, each as its name, the slot's id and its arguments."""
    return [_encode_edit(edit) for edit in edits]


def decode_edits(data: Sequence[Sequence[Any]], slots: Mapping[int, Slot]) -> list[Edit]:
    """Decode edits on these slots. An edit must not use a slot that an earlier one of them opens."""
    kinds: dict[str, type[Commit | Truncate | Fork | Close]] = {
        "commit": Commit,
        "truncate": Truncate,
        "fork": Fork,
        "close": Close,
    }
    return [kinds[name](slots[slot], *rest) for name, slot, *rest in data]


def _encode_edit(edit: Edit) -> list[Any]:
    match edit:
        case Commit(slot, path, keep):
            return ["commit", slot.id, _numbers(path), _numbers(keep)]
        case Truncate(slot, length):
            return ["truncate", slot.id, length]
        case Fork(slot, length):
            return ["fork", slot.id, length]
        case Close(slot):
            return ["close", slot.id]


def _numbers(values: Sequence[int]) -> list[int]:
    return [int(value) for value in values]


FACTS = ("vocab_size", "max_length", "supports_trees", "fingerprint", "is_exact")


class ProcessEndedError(DraftreeError):
    """The process of a model has ended, or failed in a pass."""


@final
class ProcessSlot(Slot):
    """Numbers of a slot in the other process. Mutated by `ProcessModel` only."""

    def __init__(self, number: int, length: int = 0) -> None:
        self._number = number
        self.kept, self.tentative = length, 0

    @property
    def id(self) -> int:
        return self._number

    @property
    def length(self) -> int:
        return self.kept

    @property
    def num_tentative(self) -> int:
        return self.tentative


@final
class ProcessModel(LanguageModel):
    """Model that another process runs with `serve_model`. One thread at a time uses it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        facts = self._received()
        for name in FACTS:
            setattr(self, name, facts[name])
        self.device, self.dtype = torch.device("cpu"), getattr(torch, facts["dtype"])
        self._weights = int(facts["weights"])
        self._ids = SlotIds()

    @property
    def footprint(self) -> Footprint:
        return Footprint(weights=self._weights, token=0, logits=0, row=0)

    @property
    def num_open(self) -> int:
        return self._ids.num_taken

    def reserve(self, num_slots: int, length: int) -> None:
        self._asked({"do": "reserve", "slots": num_slots, "length": length})

    def open(self) -> ProcessSlot:
        return self._opened(self._asked({"do": "open"})["slot"])

    def run(self, pass_: Pass) -> PassResult:
        reply = self._asked({"do": "run", "pass": encode_pass(pass_)})
        raw = bytearray(self._raw())
        kind = getattr(torch, reply["dtype"])
        rows = torch.frombuffer(raw, dtype=kind) if raw else torch.empty(0, dtype=kind)
        for job in pass_.jobs:
            _own(job.slot).tentative += len(job.tokens)
        return PassResult.of_jobs(pass_.jobs, TensorLogits(rows.view(-1, self.vocab_size)))

    def apply(self, edits: Sequence[Edit]) -> list[Slot]:
        numbers = iter(self._asked({"do": "apply", "edits": encode_edits(edits)})["slots"])
        opened: list[Slot] = []
        for edit in edits:
            slot = _own(edit.slot)
            match edit:
                case Commit(_, path, keep):
                    slot.kept, slot.tentative = slot.kept + len(path), len(keep)
                case Truncate(_, length):
                    slot.kept, slot.tentative = length, 0
                case Fork(_, length):
                    opened.append(self._opened(next(numbers), length))
                case Close():
                    self._ids.free(slot.id)
        return opened

    def _opened(self, number: int, length: int = 0) -> ProcessSlot:
        own = self._ids.take()
        assert own == number, "both processes open slots in the same order"
        return ProcessSlot(own, length)

    def _asked(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            self._connection.send_bytes(json.dumps(request).encode())
        except (OSError, ValueError) as error:
            raise ProcessEndedError(f"the process of the model has ended: {error}") from error
        return self._received()

    def _received(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._raw())
        if "error" in found:
            raise ProcessEndedError(f"the process of the model failed: {found['error']}")
        return found

    def _raw(self) -> bytes:
        try:
            return self._connection.recv_bytes()
        except (OSError, EOFError) as error:
            raise ProcessEndedError("the process of the model has ended") from error


def _own(slot: Slot) -> ProcessSlot:
    assert isinstance(slot, ProcessSlot), "the slot is of this model"
    return slot


def serve_model(connection: Connection, model: LanguageModel) -> None:
    """Answer the requests of a `ProcessModel` until its side is closed."""
    facts = {name: getattr(model, name) for name in FACTS}
    facts |= {"dtype": str(model.dtype).removeprefix("torch."), "weights": model.footprint.weights}
    slots: dict[int, Slot] = {}
    try:
        connection.send_bytes(json.dumps(facts).encode())
        while True:
            request = json.loads(connection.recv_bytes())
            try:
                reply, raw = _answered(request, model, slots)
            except Exception as error:  # the other side decides; this process goes on
                reply, raw = {"error": f"{type(error).__name__}: {error}"}, None
            connection.send_bytes(json.dumps(reply).encode())
            if raw is not None:
                connection.send_bytes(raw)
    except (EOFError, OSError):
        return


def _answered(
    request: Mapping[str, Any], model: LanguageModel, slots: dict[int, Slot]
) -> tuple[dict[str, Any], bytes | None]:
    match request["do"]:
        case "reserve":
            model.reserve(request["slots"], request["length"])
            return {}, None
        case "open":
            slot = model.open()
            slots[slot.id] = slot
            return {"slot": slot.id}, None
        case "apply":
            opened = model.apply(decode_edits(request["edits"], slots))
            for number in [number for name, number, *_ in request["edits"] if name == "close"]:
                del slots[number]  # a closed slot has lost its id
            slots.update({slot.id: slot for slot in opened})
            return {"slots": [slot.id for slot in opened]}, None
        case "run":
            result = model.run(decode_pass(request["pass"], slots))
            rows = result.logits.tensor() if result.logits.num_rows else torch.empty(0)
            rows = rows if rows.dtype == torch.float64 else rows.float()
            return {"dtype": str(rows.dtype).removeprefix("torch.")}, rows.contiguous().numpy().tobytes()
        case other:
            raise ValueError(f"unknown request '{other}'")
