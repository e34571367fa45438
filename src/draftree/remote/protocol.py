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

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgpack

from draftree.core.errors import InvalidRequestError, suggestion
from draftree.core.tree import TokenTree, is_chain
from draftree.remote.address import FrameError, RefusedError
from draftree.sampling.params import SamplingParams

T = TypeVar("T")
Check = Callable[[str, Any], Any]  # returns the checked value of a field with this name
MAX_TOKENS = 1 << 18  # most entries of any list in a frame
MAX_ID = 2**53
MAX_NAME = 256


def read_number(name: str, value: Any, *, low: int = 0, high: int = MAX_ID) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise FrameError(f"'{name}' is {value!r:.60}: it must be a whole number from {low} to {high}")
    return value


read_seed = partial(read_number, low=-(2**63), high=2**64 - 1)


def read_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise FrameError(f"'{name}' is {value!r:.60}: it must be true or false")
    return value


def read_token(name: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > MAX_NAME:
        raise FrameError(f"'{name}' must be a text of at most {MAX_NAME} characters, or nothing")
    return value


def read_numbers(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise FrameError(f"'{name}' must be a list of whole numbers")
    if any(isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= MAX_ID for item in value):
        raise FrameError(f"'{name}' must be a list of whole numbers of at least 0")
    return tuple(value)


def pack_run(numbers: tuple[int, ...]) -> int | list[int]:
    """Return numbers as plain values; 0, 1, 2, … as their count."""
    return len(numbers) if numbers == tuple(range(len(numbers))) else list(numbers)


def read_run(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKENS:
        return tuple(range(value))
    return read_numbers(name, value)


def read_texts(name: str, value: Any, unpack: Callable[[str, Any], T], *, most: int, what: str) -> list[T]:
    """Return a list with an entry for each of several texts."""
    if not isinstance(value, list) or not 0 < len(value) <= most:
        raise FrameError(f"'{name}' must be a list of {what.format(f'1 to {most}')}")
    entries: list[Any] = [unpack(name, item) for item in value]
    if len({entry.text for entry in entries}) < len(entries):
        raise FrameError(f"'{name}' names a text twice")
    return entries


def read_values(name: str, value: Any, length: int) -> Sequence[Any]:
    if not isinstance(value, list) or len(value) != length:
        raise FrameError(f"'{name}' must be a list of {length} values")
    return value


def params_field(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FrameError(f"'{name}' must be a map of sampling parameters")
    return value


VERSION = 1  # version of the protocol; both sides must have the same
MAX_FRAME_BYTES = 1 << 20  # largest frame from a client: a prompt of some hundred thousand tokens
MAX_REPLY_BYTES = 1 << 22  # largest frame from a server that a client reads
MAX_TEXTS = 256  # most texts of one frame
NO_REQUESTS: Mapping[str, Mapping[str, Check]] = {}


@dataclass(frozen=True, slots=True)
class DraftedText:
    text: int  # number of the text in its session
    length: int  # tokens of prompt and text so far, the root included
    crc: int  # CRC-32 of these tokens as little-endian 32-bit integers
    tree: TokenTree  # drafted tokens and parents; may be empty


@dataclass(frozen=True, slots=True)
class WalkedText:
    text: int
    path: tuple[int, ...]  # accepted nodes from the root down
    bonus: int  # the token after them
    is_done: bool  # whether the text has ended on the server


def encode(message: Mapping[str, Any]) -> bytes:
    return msgpack.packb(message, use_bin_type=True)


def decode(frame: bytes, *, max_bytes: int = MAX_FRAME_BYTES, takes_bytes: bool = False) -> dict[str, Any]:
    """Return the message of a frame, its fields unchecked; only messages with hidden states have binary values."""
    if len(frame) > max_bytes:
        raise FrameError(f"the frame has {len(frame)} bytes: at most {max_bytes} are allowed", code="frame_too_large")
    try:
        message = msgpack.unpackb(
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
    if not isinstance(message, dict) or not all(isinstance(key, str) for key in message):
        raise FrameError("the frame is not one msgpack map with text keys")
    return message


def read_request(
    frame: bytes, *, max_bytes: int = MAX_FRAME_BYTES, more: Mapping[str, Mapping[str, Check]] = NO_REQUESTS
) -> dict[str, Any]:
    """Return a request whose fields have the protocol's types and ranges; `more` types may have binary values."""
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
    request = {name: check(f"{kind}.{name}", message.get(name)) for name, check in fields.items()}
    request["t"], request["s"] = kind, read_token(f"{kind}.s", message.get("s"))
    return request


def pack_draft(draft: DraftedText) -> list[Any]:
    """Return a draft as plain values; a chain has no list of parents."""
    tree = draft.tree
    parents = None if is_chain(tree.parents) else [parent + 1 for parent in tree.parents]
    return [draft.text, draft.length, draft.crc, list(tree.tokens), parents]


def unpack_draft(name: str, values: Any) -> DraftedText:
    text, length, crc, tokens, parents = read_values(name, values, 5)
    drafted = read_numbers(f"{name}.tokens", tokens)
    above = range(len(drafted)) if parents is None else read_numbers(f"{name}.parents", parents)
    if len(above) != len(drafted) or any(parent > node for node, parent in enumerate(above)):
        raise FrameError(f"'{name}' has parents that are no tree: one earlier node, or 0 for the root, per token")
    return DraftedText(
        read_number(f"{name}.text", text),
        read_number(f"{name}.length", length),
        read_number(f"{name}.crc", crc),
        TokenTree(drafted, tuple(parent - 1 for parent in above)),
    )


def pack_walk(walk: WalkedText) -> list[Any]:
    return [walk.text, pack_run(walk.path), walk.bonus, walk.is_done]


def unpack_walk(values: Any) -> WalkedText:
    text, path, bonus, is_done = read_values("walk", values, 4)
    return WalkedText(
        read_number("walk.text", text),
        read_run("walk.path", path),
        read_number("walk.bonus", bonus),
        read_flag("walk.done", is_done),
    )


REQUESTS: dict[str, dict[str, Check]] = {
    "hello": {"v": read_number, "model": read_token},
    "open": {
        "id": read_number,
        "text": read_number,
        "prompt": read_numbers,
        "output": read_numbers,
        "params": params_field,
        "seed": read_seed,
        "limit": read_number,
        "plain": read_flag,
    },
    "verify": {"id": read_number, "x": partial(read_texts, unpack=unpack_draft, most=MAX_TEXTS, what="{} drafts")},
    "read": {"id": read_number, "text": read_number, "start": read_number},
    "close": {"id": read_number, "texts": read_numbers},
    "ping": {"id": read_number},
    "bye": {"id": read_number},
}
"""Fields of every request, each with its check; `s`, the session's token, is in frames over POST."""


def results_of(reply: Mapping[str, Any]) -> list[Any]:
    results = reply.get("x")
    if not isinstance(results, list):
        raise RefusedError("the server's reply has no results: it is no verify server", code="bad_reply")
    return results


def times_of(reply: Mapping[str, Any]) -> tuple[float, float]:
    """Return the server's seconds before the pass and in it."""
    values = reply.get("us")
    if not isinstance(values, list) or len(values) != 2 or not all(isinstance(value, int) for value in values):
        raise FrameError("the server's reply has no times")
    return values[0] * 1e-6, values[1] * 1e-6


LOCAL = frozenset(
    {"n", "seed", "max_tokens", "prediction", "logprobs", "prompt_logprobs", "truncate_prompt_tokens", "detokenize"}
)
"""Parameters that the device applies, or that the request has in fields of its own."""
SENT = tuple(field.name for field in dataclasses.fields(SamplingParams) if field.name not in LOCAL)
"""Parameters on which the text depends."""


def sendable_params(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters that differ from the defaults; mappings as lists of pairs."""
    sent: dict[str, Any] = {}
    for field in dataclasses.fields(SamplingParams):
        value = getattr(params, field.name)
        if field.name not in LOCAL and value != field.default and value is not None:
            value = map(list, value.items()) if isinstance(value, Mapping) else value
            sent[field.name] = list(value) if isinstance(value, tuple | map) else value
    return sent


def read_params(params: Mapping[str, Any], *, seed: int, max_tokens: int) -> SamplingParams:
    """Return checked parameters of a request; `max_tokens` includes the tokens that are written already."""
    values = dict(params)
    if unknown := [name[:60] for name in values if name not in SENT]:
        raise InvalidRequestError(f"parameter {unknown[0]!r} cannot be sent: {suggestion(unknown[0], SENT)}")
    bias = values.get("logit_bias")
    if isinstance(bias, list):
        if not all(isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], int) for pair in bias):
            raise InvalidRequestError("logit_bias must be a list of pairs of token id and number", param="logit_bias")
        values["logit_bias"] = dict(bias)
    try:
        return SamplingParams(**values, seed=seed, max_tokens=max_tokens)
    except (TypeError, RecursionError) as error:
        raise InvalidRequestError(f"the parameters cannot be read ({type(error).__name__})") from error
