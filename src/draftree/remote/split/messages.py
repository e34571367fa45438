"""Messages of a target split by layers, within the sessions of the verify protocol.

    join    after hello: number of layers of the device, format of states, and what passes return
    begin   begins a text, and ends others: room, and noise and sampling parameters if the server picks
    rows    one pass: for each text an edit of its slot, parents and hidden states of new nodes; the layers whose
            input is returned, the number of layers for the output of the last

Replies: joined, begun, passed. The type `close` of the protocol ends texts of both kinds. Token ids are in no request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from draftree.core.errors import GenerationError, InvalidRequestError
from draftree.core.tree import is_chain
from draftree.remote.address import FrameError
from draftree.remote.protocol import (
    Check,
    pack_run,
    params_field,
    read_number,
    read_numbers,
    read_run,
    read_seed,
    read_texts,
    read_token,
    read_values,
    sendable_params,
)
from draftree.sampling.params import NEUTRAL, SamplingParams

MAX_JOBS = 256  # most texts of one frame
PROBE_TOKENS = 16  # tokens whose states device and server compare before the first text


@dataclass(frozen=True, slots=True)
class RowsEdit:
    path: tuple[int, ...]  # tentative nodes that become prefix, from the prefix down
    keep: tuple[int, ...] = ()  # nodes that stay tentative, ascending; all others are dropped

    def after(self, count: int) -> RowsEdit:
        """Return the edit of a slot whose first `count` nodes, the beginning of the path, are in the prefix already."""
        return RowsEdit(tuple(node - count for node in self.path[count:]), tuple(node - count for node in self.keep))


@dataclass(frozen=True, slots=True)
class SentRows:
    """New nodes of one text."""

    text: int  # number of the text in its session
    length: int  # committed tokens after the edit; a prefix that is longer is cut to it
    edit: RowsEdit | None  # of the slot; None for none
    parents: tuple[int, ...]  # for each node the tentative node before it, or ROOT
    wanted: int  # how many of the last nodes have results
    settled: int  # how many of the first nodes belong to the text whatever is accepted: a chain without a tree before
    data: bytes  # packed states of the nodes


def pack_rows(rows: SentRows) -> list[Any]:
    """Return nodes as plain values; a chain without parents."""
    edit = None if rows.edit is None else [pack_run(rows.edit.path), list(rows.edit.keep)]
    parents = len(rows.parents) if is_chain(rows.parents) else [parent + 1 for parent in rows.parents]
    return [rows.text, rows.length, edit, parents, rows.wanted, rows.settled, rows.data]


def unpack_rows(name: str, value: Any) -> SentRows:
    text, length, edit, parents, *counts, data = read_values(name, value, 7)
    above = read_run(f"{name}.parents", parents)
    above = tuple(parent - 1 for parent in above)
    if not isinstance(data, bytes):
        raise FrameError(f"'{name}.data' must be bytes")
    wanted, settled = (read_number(f"{name}.{what}", count) for what, count in zip(COUNTS, counts, strict=True))
    if max(wanted, settled) > len(above):
        raise FrameError(f"'{name}' has {len(above)} nodes, of which {wanted} have results and {settled} are settled")
    if not is_chain(above[:settled]):
        raise FrameError(f"'{name}.settled' is {settled}, and the first nodes are no chain")
    if edit is not None:
        path, keep = read_values(f"{name}.edit", edit, 2)
        edit = RowsEdit(read_run(f"{name}.path", path), read_numbers(f"{name}.keep", keep))
    number, before = read_number(f"{name}.text", text), read_number(f"{name}.length", length)
    return SentRows(number, before, edit, above, wanted, settled, data)


COUNTS = ("wanted", "settled")


def probe_tokens(vocab: int) -> Sequence[int]:
    """Return the tokens whose states device and server compare."""
    return [(3 + max(1, vocab // 17) * place + place * place) % vocab for place in range(PROBE_TOKENS)]


SPLIT_REQUESTS: Mapping[str, Mapping[str, Check]] = {
    "join": {"id": read_number, "split": read_number, "states": read_token, "picks": read_token},
    "begin": {
        "id": read_number,
        "text": read_number,
        "limit": read_number,
        "seed": read_seed,
        "params": params_field,
        "ends": read_numbers,
    },
    "rows": {
        "id": read_number,
        "x": partial(read_texts, unpack=unpack_rows, most=MAX_JOBS, what="the nodes of {} texts"),
        "layers": read_numbers,
    },
}
"""Fields of the requests, each with its check."""


# Hidden states on the way: one row of bytes per token, in float32, bfloat16 or int8 with a scale per row.
#
# A row's bytes depend on that row only, so a text does not depend on drafts in any of the formats.
#
# | format | bytes per row | values | | --- | --- | --- | | float32 | 4 * hidden | exact | | bfloat16 | 2 * hidden |
# rounded to nearest even; exact if the residual stream is bfloat16 | | int8 | 52 + hidden | the 8 largest values as
# they are; the others in steps of their largest size / 127 |
#
# A few values of a residual stream are many times as large as all others, which would have no bits left with one scale.

MOST = 127
NUM_LARGEST = 8  # values of an int8 row that are not rounded
VALUE_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
SCALE, LARGEST, PLACES = slice(0, 4), slice(4, 4 + 4 * NUM_LARGEST), slice(4 + 4 * NUM_LARGEST, 4 + 6 * NUM_LARGEST)
"""Bytes of an int8 row before its values: the scale, the largest values, and their places."""
HEAD_BYTES = PLACES.stop


@final
class StateFormat:
    def __init__(self, kind: str, hidden: int) -> None:
        self.kind, self.hidden = kind, hidden
        self.row_bytes = (HEAD_BYTES if kind == "int8" else 0) + VALUE_BYTES[kind] * hidden

    def pack(self, states: Tensor) -> np.ndarray:
        """Return rows of shape (rows, hidden) as bytes, shape (rows, row_bytes), uint8."""
        values = states.detach().to("cpu", torch.float32).contiguous()
        if not bool(values.isfinite().all()):
            raise GenerationError("the first layers gave hidden states that are not finite: the server cannot use them")
        if self.kind == "float32":
            packed = values.numpy().astype("<f4", copy=False)
        elif self.kind == "bfloat16":
            packed = values.to(torch.bfloat16).view(torch.int16).numpy().astype("<i2", copy=False)
        else:
            return self._pack_int8(values.numpy())
        return np.ascontiguousarray(packed).view(np.uint8).reshape(len(packed), self.row_bytes)

    def _pack_int8(self, values: np.ndarray) -> np.ndarray:
        packed = np.zeros((len(values), self.row_bytes), dtype=np.uint8)
        count = min(NUM_LARGEST, self.hidden)
        places = np.argsort(-np.abs(values), axis=1, kind="stable")[:, :count]
        largest, others = np.take_along_axis(values, places, axis=1), values.copy()
        np.put_along_axis(others, places, 0, axis=1)
        scales = (np.abs(others).max(axis=1, keepdims=True) / np.float32(MOST)).astype("<f4")
        divisors = np.where(scales > 0, scales, np.float32(1))
        packed[:, SCALE] = scales.view(np.uint8)
        packed[:, LARGEST][:, : 4 * count] = np.ascontiguousarray(largest.astype("<f4")).view(np.uint8)
        packed[:, PLACES][:, : 2 * count] = np.ascontiguousarray(places.astype("<u2")).view(np.uint8)
        packed[:, HEAD_BYTES:] = np.clip(np.rint(others / divisors), -MOST, MOST).astype(np.int8).view(np.uint8)
        return packed

    def _unpack_int8(self, content: np.ndarray) -> np.ndarray:
        count = min(NUM_LARGEST, self.hidden)

        def part(where: slice, kind: str, size: int) -> np.ndarray:
            return np.ascontiguousarray(content[:, where][:, : size * count]).view(kind)

        places = part(PLACES, "<u2", 2).astype(np.int64)
        if (places >= self.hidden).any():
            raise FrameError(f"a row of states has a place beyond its {self.hidden} values", code="bad_states")
        scales = np.ascontiguousarray(content[:, SCALE]).view("<f4").astype(np.float32)
        if not np.isfinite(scales).all():
            raise FrameError("the hidden states have values that are not finite", code="bad_states")
        with np.errstate(over="ignore"):
            values = np.ascontiguousarray(content[:, HEAD_BYTES:]).view(np.int8).astype(np.float32) * scales
        np.put_along_axis(values, places, part(LARGEST, "<f4", 4).astype(np.float32), axis=1)
        return values

    def unpack(self, data: bytes, rows: int) -> Tensor:
        """Return the states of rows from the other side, shape (rows, hidden), float32."""
        if len(data) != rows * self.row_bytes:
            raise FrameError(
                f"{rows} rows of {self.hidden} states in {self.kind} have {rows * self.row_bytes} bytes, and "
                f"{len(data)} were sent",
                code="bad_states",
            )
        content = np.frombuffer(data, dtype=np.uint8).reshape(rows, self.row_bytes)
        if self.kind == "float32":
            states = torch.from_numpy(content.view("<f4").astype(np.float32))
        elif self.kind == "bfloat16":
            states = torch.from_numpy(content.view("<i2").astype(np.int16)).view(torch.bfloat16).float()
        else:
            states = torch.from_numpy(self._unpack_int8(content))
        if not bool(states.isfinite().all()):
            raise FrameError("the hidden states have values that are not finite", code="bad_states")
        return states

    def keeps(self, states: Tensor) -> bool:
        """Return whether these states, shape (rows, hidden), are unchanged on the way."""
        values = states.detach().to("cpu", torch.float32)
        return torch.equal(self.unpack(self.pack(values).tobytes(), len(values)), values)


SENT = frozenset({"temperature", "top_p", "top_k", "min_p"})
DEVICE = frozenset(
    {
        "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens",
        "spaces_between_special_tokens",
    }
)  # fmt: skip
"""Parameters that only the device applies: when a text ends, and how it is shown."""


def text_free_params(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters that a server needs to pick."""
    sendable = {
        name: value
        for name, value in sendable_params(params).items()
        if name in SENT or not (name in DEVICE or value == [] or value == getattr(NEUTRAL, name, None))
    }
    require_sendable(sendable)
    return sendable


def require_sendable(params: Mapping[str, Any]) -> None:
    """Raise InvalidRequestError if picks with these parameters need the tokens of the text."""
    for name in params:
        if name not in SENT:
            raise InvalidRequestError(
                f"{str(name)[:60]} needs the tokens of the text, which a server that picks after a split does not "
                "have: use picks=device in the address, or leave it out",
                param=str(name)[:60],
            )
