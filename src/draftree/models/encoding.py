"""Encoding of passes and edits for a process that replays them.

Slots are encoded by id, everything as lists, dictionaries, integers and strings, as in JSON. The other process opens
slots in the same order, so its slots have the same ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftree.models.base import Close, Commit, Edit, Extend, Fork, LayerSubset, Pass, Slot, Truncate


def encode_pass(pass_: Pass) -> dict[str, Any]:
    """Encode a pass."""
    layers = pass_.layers
    return {
        "jobs": [_encode_job(job) for job in pass_.jobs],
        "layers": [layers.end, sorted(layers.attention), sorted(layers.mlp)],
        "capture": list(pass_.capture),
    }


def decode_pass(data: Mapping[str, Any], slots: Mapping[int, Slot]) -> Pass:
    """Decode a pass on these slots.

    Raises:
        KeyError: the pass names an unknown slot.
    """
    end, attention, mlp = data["layers"]
    jobs = [Extend(slots[slot], tokens, parents, logits_at) for slot, tokens, parents, logits_at in data["jobs"]]
    return Pass(jobs, LayerSubset(end, frozenset(attention), frozenset(mlp)), tuple(data["capture"]))


def encode_edits(edits: Sequence[Edit]) -> list[list[Any]]:
    """Encode edits, each as its name, the slot's id and its arguments."""
    return [_encode_edit(edit) for edit in edits]


def decode_edits(data: Sequence[Sequence[Any]], slots: Mapping[int, Slot]) -> list[Edit]:
    """Decode edits on these slots. An edit must not use a slot that an earlier one of them opens.

    Raises:
        KeyError: an edit names an unknown slot, or has an unknown name.
    """
    kinds: dict[str, type[Commit | Truncate | Fork | Close]] = {
        "commit": Commit,
        "truncate": Truncate,
        "fork": Fork,
        "close": Close,
    }
    return [kinds[name](slots[slot], *rest) for name, slot, *rest in data]


def _encode_job(job: Extend) -> list[Any]:
    logits_at = None if job.logits_at is None else _numbers(job.logits_at)
    return [job.slot.id, _numbers(job.tokens), _numbers(job.parents), logits_at]


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
