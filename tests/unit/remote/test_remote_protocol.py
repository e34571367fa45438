"""Frames: what is encoded is read again, small, and everything else is refused."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.core.tree import TokenTree
from draftree.remote.errors import FrameError
from draftree.remote.protocol import (
    REQUESTS,
    DraftedText,
    WalkedText,
    decode,
    encode,
    pack_draft,
    pack_walk,
    read_request,
    unpack_draft,
    unpack_walk,
)


@st.composite
def trees(draw: st.DrawFn) -> TokenTree:
    tokens = draw(st.lists(st.integers(0, 2**31), max_size=64))
    parents = [draw(st.integers(-1, node - 1)) for node in range(len(tokens))]
    return TokenTree(tuple(tokens), tuple(parents))


@given(st.integers(0, 9), st.integers(1, 9999), st.integers(0, 2**32 - 1), trees())
def test_drafts_survive_a_frame(text: int, length: int, crc: int, tree: TokenTree) -> None:
    draft = DraftedText(text, length, crc, tree)
    frame = encode({"t": "verify", "id": 3, "x": [pack_draft(draft)]})
    assert read_request(frame)["x"] == [draft]


@given(st.lists(st.integers(0, 300), max_size=64), st.integers(0, 2**31), st.booleans())
def test_verdicts_survive_a_frame(path: list[int], bonus: int, is_done: bool) -> None:
    walk = WalkedText(4, tuple(path), bonus, is_done)
    assert unpack_walk(decode(encode({"x": pack_walk(walk)}))["x"]) == walk


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_or_refused(frame: bytes) -> None:
    try:
        found = read_request(frame)
    except FrameError:
        return
    assert found["t"] in REQUESTS


@given(st.recursive(st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=4)
                    | st.binary(max_size=4), lambda inner: st.lists(inner, max_size=6), max_leaves=20),
       st.sampled_from(sorted(REQUESTS)), st.data())  # fmt: skip
def test_any_values_of_fields_are_read_or_refused(value: Any, kind: str, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([*REQUESTS[kind], "t", "s", "x"]))
    message = {"t": kind, "id": 1, "v": 1, "text": 1, "start": 0, "texts": [], "x": [[1, 2, 3, [4], None]]}
    message = {key: item for key, item in message.items() if key == "t" or key in REQUESTS[kind]} | {name: value}
    try:
        found = read_request(msgpack.packb(message))
    except FrameError as error:
        found = {"t": kind, "error": str(error)}
    assert found["t"] == kind or name == "t"
    assert len(found.get("error", "")) < 400


def test_a_round_of_a_long_chain_is_one_small_packet() -> None:
    chain = DraftedText(1, 1000, 2**32 - 1, TokenTree(tuple(range(40_000, 40_024)), tuple(range(-1, 23))))
    up = encode({"t": "verify", "id": 1000, "x": [pack_draft(chain)]})
    down = encode({"t": "walk", "id": 1000, "x": [pack_walk(WalkedText(1, tuple(range(20)), 40_000, False))],
                   "us": [200, 30_000]})  # fmt: skip
    assert len(up) + len(down) < 200


def test_a_round_of_a_tree_of_48_nodes_is_below_300_bytes() -> None:
    tree = TokenTree(tuple(range(30_000, 30_048)), tuple(max(-1, node // 2 - 1) for node in range(48)))
    up = encode({"t": "verify", "id": 1000, "x": [pack_draft(DraftedText(1, 1000, 2**32 - 1, tree))]})
    walk = pack_walk(WalkedText(1, (0, 2, 6, 14), 40_000, False))
    down = encode({"t": "walk", "id": 1000, "x": [walk], "us": [200, 30_000]})
    assert len(up) + len(down) < 300


def test_frames_hold_no_objects() -> None:
    for value in (msgpack.ExtType(1, b"x"), msgpack.Timestamp(1), b"tensor"):
        with pytest.raises(FrameError):
            decode(msgpack.packb({"t": value}))
    with pytest.raises(FrameError, match="5 values"):
        unpack_draft("x", [1, 2, 3])
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(FrameError):
        decode(b"\x81\xa1t" + b"\x91" * 5000 + b"\x90")
