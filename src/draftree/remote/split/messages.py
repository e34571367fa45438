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
from typing import Any

from draftree.core.tree import ROOT, is_chain
from draftree.remote.errors import FrameError
from draftree.remote.fields import (
    MAX_TOKENS,
    Check,
    read_number,
    read_numbers,
    read_params,
    read_seed,
    read_token,
    read_values,
)

__all__ = ["NO_EDIT", "SPLIT_REQUESTS", "RowsEdit", "SentRows", "pack_rows", "probe_tokens", "unpack_rows"]

MAX_JOBS = 256
"""Most texts of one frame."""
PROBE_TOKENS = 16
"""Tokens whose states device and server compare before the first text."""


@dataclass(frozen=True, slots=True)
class RowsEdit:
    """What happens to a text's slot before its pass.

    Attributes:
        path: tentative nodes that become prefix, from the prefix down.
        keep: nodes that stay tentative, ascending; all others are dropped.
    """

    path: tuple[int, ...]
    keep: tuple[int, ...] = ()


NO_EDIT = None
"""The tentative tree stays as it is."""


@dataclass(frozen=True, slots=True)
class SentRows:
    """New nodes of one text.

    Attributes:
        text: number of the text in its session.
        length: committed tokens after the edit; a prefix that is longer is cut to it.
        edit: of the slot; None for none.
        parents: for each node the tentative node before it, or ROOT.
        wanted: how many of the last nodes have results.
        data: packed states of the nodes.
    """

    text: int
    length: int
    edit: RowsEdit | None
    parents: tuple[int, ...]
    wanted: int
    data: bytes


def pack_rows(rows: SentRows) -> list[Any]:
    """Return nodes as plain values; a path 0, 1, 2, … as its length, a chain without parents."""
    edit = None
    if rows.edit is not None:
        path = rows.edit.path
        is_first = path == tuple(range(len(path)))
        edit = [len(path) if is_first else list(path), list(rows.edit.keep)]
    parents = len(rows.parents) if is_chain(rows.parents) else [parent + 1 for parent in rows.parents]
    return [rows.text, rows.length, edit, parents, rows.wanted, rows.data]


def unpack_rows(name: str, given: Any) -> SentRows:
    """Return nodes from their plain values.

    Raises:
        FrameError: another shape.
    """
    text, length, edit, parents, wanted, data = read_values(name, given, 6)
    above = _counted(f"{name}.parents", parents)
    if isinstance(parents, list):
        above = tuple(parent - 1 for parent in above)
    elif above:
        above = tuple(range(ROOT, len(above) - 1))
    if not isinstance(data, bytes):
        raise FrameError(f"'{name}.data' must be bytes")
    if read_number(f"{name}.wanted", wanted) > len(above):
        raise FrameError(f"'{name}.wanted' is {wanted}, and {len(above)} nodes were sent")
    return SentRows(
        read_number(f"{name}.text", text), read_number(f"{name}.length", length), _edit(name, edit), above, wanted, data
    )


def _edit(name: str, given: Any) -> RowsEdit | None:
    if given is None:
        return None
    path, keep = read_values(f"{name}.edit", given, 2)
    return RowsEdit(_counted(f"{name}.path", path), read_numbers(f"{name}.keep", keep))


def _counted(name: str, given: Any) -> tuple[int, ...]:
    """Return a list of numbers, or the first `given` ones from 0 on."""
    if isinstance(given, int) and not isinstance(given, bool) and 0 <= given <= MAX_TOKENS:
        return tuple(range(given))
    return read_numbers(name, given)


def _all_rows(name: str, given: Any) -> list[SentRows]:
    if not isinstance(given, list) or not 0 < len(given) <= MAX_JOBS:
        raise FrameError(f"'{name}' must be a list of the nodes of 1 to {MAX_JOBS} texts")
    found = [unpack_rows(name, one) for one in given]
    if len({rows.text for rows in found}) < len(found):
        raise FrameError(f"'{name}' names a text twice")
    return found


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
        "params": read_params,
        "ends": read_numbers,
    },
    "rows": {"id": read_number, "x": _all_rows, "layers": read_numbers},
}
"""Fields of the requests, each with its check."""
