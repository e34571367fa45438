"""Frames of the verify protocol: msgpack maps of plain numbers and texts, checked field by field.

One request has one reply. A request of a session has a number `id`, which grows by one; a repeated one is answered from
memory. Requests, by their type `t`:

    hello   begins a session, or resumes one by its token
    open    begins a text: prompt, tokens written so far, sampling parameters and seed
    verify  one round: for each text the drafted tokens and their parents
    read    tokens of a text that the server writes alone
    close   ends texts
    ping    renews the lease, and measures the round trip
    bye     ends the session

Replies: welcome, opened, walk, tokens, closed, pong, error. Frames hold no tensors, no masks and no objects: msgpack's
extension types are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgpack

from draftree.core.tree import ROOT, TokenTree, is_chain
from draftree.remote.errors import FrameError
from draftree.remote.fields import (
    MAX_TOKENS,
    Check,
    read_flag,
    read_number,
    read_numbers,
    read_params,
    read_seed,
    read_token,
    read_values,
)

__all__ = [
    "MAX_FRAME_BYTES",
    "MAX_TEXTS",
    "MAX_TOKENS",
    "VERSION",
    "DraftedText",
    "WalkedText",
    "decode",
    "encode",
    "pack_draft",
    "pack_walk",
    "read_request",
    "unpack_draft",
    "unpack_walk",
]

VERSION = 1
"""Version of the protocol; both sides must have the same."""
MAX_FRAME_BYTES = 1 << 20
"""Largest frame from a client: a prompt of some hundred thousand tokens."""
MAX_REPLY_BYTES = 1 << 22
"""Largest frame from a server that a client reads."""
MAX_TEXTS = 256
"""Most texts of one frame."""
NO_REQUESTS: Mapping[str, Mapping[str, Check]] = {}


@dataclass(frozen=True, slots=True)
class DraftedText:
    """The draft of one text in a round.

    Attributes:
        text: number of the text in its session.
        length: tokens of prompt and text so far, the root included.
        crc: CRC-32 of these tokens as little-endian 32-bit integers.
        tree: drafted tokens and parents; may be empty.
    """

    text: int
    length: int
    crc: int
    tree: TokenTree


@dataclass(frozen=True, slots=True)
class WalkedText:
    """The verdict on one text.

    Attributes:
        text: number of the text.
        path: accepted nodes from the root down.
        bonus: the token after them.
        is_done: whether the text has ended on the server.
    """

    text: int
    path: tuple[int, ...]
    bonus: int
    is_done: bool


def encode(message: Mapping[str, Any]) -> bytes:
    """Return the frame of a message."""
    packed: bytes = msgpack.packb(message, use_bin_type=True)
    return packed


def decode(frame: bytes, *, max_bytes: int = MAX_FRAME_BYTES, takes_bytes: bool = False) -> dict[str, Any]:
    """Return the message of a frame; its fields are not checked.

    Args:
        frame: from the other side.
        max_bytes: size of a frame at most.
        takes_bytes: whether binary values are allowed, which only messages with hidden states have.

    Raises:
        FrameError: too large, not msgpack, or not one map with text keys.
    """
    if len(frame) > max_bytes:
        raise FrameError(f"the frame has {len(frame)} bytes: at most {max_bytes} are allowed", code="frame_too_large")
    try:
        found = msgpack.unpackb(
            frame,
            raw=False,
            strict_map_key=True,
            max_str_len=max_bytes,
            max_bin_len=max_bytes if takes_bytes else 0,
            max_array_len=MAX_TOKENS,
            max_map_len=1024,
            max_ext_len=0,
        )
    except Exception as error:  # msgpack raises several types, among them RecursionError and UnicodeDecodeError
        reason = (str(error).splitlines() or [""])[0][:100] or type(error).__name__
        raise FrameError(f"the frame is not a msgpack map ({reason})") from error
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise FrameError("the frame is not one msgpack map with text keys")
    return found


def read_request(
    frame: bytes, *, max_bytes: int = MAX_FRAME_BYTES, more: Mapping[str, Mapping[str, Check]] = NO_REQUESTS
) -> dict[str, Any]:
    """Return a request whose fields have the types and ranges of the protocol; `t` is its type.

    Args:
        frame: from a client.
        max_bytes: size of a frame at most.
        more: types besides those of the protocol, with their fields; they may have binary values.

    Raises:
        FrameError: unreadable, unknown, or a field is missing, unknown or wrong.
    """
    message = decode(frame, max_bytes=max_bytes, takes_bytes=bool(more))
    kind = message.get("t")
    known = {**REQUESTS, **more}
    if not isinstance(kind, str) or kind not in known:
        raise FrameError(f"the frame has type {kind!r:.60}: known: {', '.join(known)}", code="unknown_type")
    if more and kind not in more:
        message = decode(frame, max_bytes=max_bytes)  # without binary values
    fields = known[kind]
    unknown = next((key for key in message if key not in fields and key not in ("t", "s")), None)
    if unknown is not None:
        raise FrameError(f"a frame of type '{kind}' has no field {unknown!r:.60}: leave it out")
    if kind == "hello" and message.get("v") != VERSION:
        raise FrameError(
            f"the frame has protocol version {message.get('v')!r:.20}, and this server has {VERSION}: use the same "
            "version of draftree on both sides",
            code="version_mismatch",
        )
    found = {name: check(f"{kind}.{name}", message.get(name)) for name, check in fields.items()}
    found["t"], found["s"] = kind, read_token(f"{kind}.s", message.get("s"))
    return found


def pack_draft(draft: DraftedText) -> list[Any]:
    """Return a draft as plain values; a chain has no list of parents."""
    tree = draft.tree
    parents = None if is_chain(tree.parents) else [parent + 1 for parent in tree.parents]
    return [draft.text, draft.length, draft.crc, list(tree.tokens), parents]


def unpack_draft(name: str, values: Any) -> DraftedText:
    """Return a draft from its plain values.

    Raises:
        FrameError: another shape, or parents that are no tree.
    """
    text, length, crc, tokens, parents = read_values(name, values, 5)
    given = read_numbers(f"{name}.tokens", tokens)
    if parents is None:
        tree = TokenTree(given, tuple(range(ROOT, len(given) - 1)))
    else:
        above = read_numbers(f"{name}.parents", parents)
        if len(above) != len(given) or any(parent > node for node, parent in enumerate(above)):
            raise FrameError(f"'{name}' has parents that are no tree: one earlier node, or 0 for the root, per token")
        tree = TokenTree(given, tuple(parent - 1 for parent in above))
    return DraftedText(
        read_number(f"{name}.text", text), read_number(f"{name}.length", length), read_number(f"{name}.crc", crc), tree
    )


def pack_walk(walk: WalkedText) -> list[Any]:
    """Return a verdict as plain values; the path as its length if it is 0, 1, 2, …."""
    is_first = walk.path == tuple(range(len(walk.path)))
    return [walk.text, len(walk.path) if is_first else list(walk.path), walk.bonus, walk.is_done]


def unpack_walk(values: Any) -> WalkedText:
    """Return a verdict from its plain values.

    Raises:
        FrameError: another shape.
    """
    text, path, bonus, is_done = read_values("walk", values, 4)
    if isinstance(path, int) and not isinstance(path, bool) and 0 <= path <= MAX_TOKENS:
        nodes = tuple(range(path))
    else:
        nodes = read_numbers("walk.path", path)
    return WalkedText(
        read_number("walk.text", text), nodes, read_number("walk.bonus", bonus), read_flag("walk.done", is_done)
    )


def _drafts(name: str, value: Any) -> list[DraftedText]:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_TEXTS:
        raise FrameError(f"'{name}' must be a list of 1 to {MAX_TEXTS} drafts")
    found = [unpack_draft(name, item) for item in value]
    if len({draft.text for draft in found}) < len(found):
        raise FrameError(f"'{name}' names a text twice")
    return found


REQUESTS: dict[str, dict[str, Check]] = {
    "hello": {"v": read_number, "model": read_token},
    "open": {
        "id": read_number,
        "text": read_number,
        "prompt": read_numbers,
        "output": read_numbers,
        "params": read_params,
        "seed": read_seed,
        "limit": read_number,
        "plain": read_flag,
    },
    "verify": {"id": read_number, "x": _drafts},
    "read": {"id": read_number, "text": read_number, "start": read_number},
    "close": {"id": read_number, "texts": read_numbers},
    "ping": {"id": read_number},
    "bye": {"id": read_number},
}
"""Fields of every request, each with its check; `s`, the session's token, is in frames over POST."""
