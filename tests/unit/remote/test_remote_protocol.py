"""Frames, of a split by layers too: what is encoded is read again, small, and everything else is refused."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftree.core.errors import ConfigurationError, GenerationError, InvalidRequestError
from draftree.core.tree import TokenTree
from draftree.remote.address import FrameError, RemoteAddress
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
from draftree.remote.split.messages import (
    SPLIT_REQUESTS,
    RowsEdit,
    SentRows,
    StateFormat,
    pack_rows,
    probe_tokens,
    text_free_params,
)
from draftree.sampling.params import SamplingParams


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


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=4)
    | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=6), max_leaves=20,
)  # fmt: skip


@given(VALUES, st.sampled_from(sorted(REQUESTS)), st.data())
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


@st.composite
def sent_rows(draw: st.DrawFn) -> SentRows:
    count = draw(st.integers(0, 20))
    parents = tuple(draw(st.integers(-1, node - 1)) for node in range(count))
    if draw(st.booleans()):
        parents = tuple(range(-1, count - 1))
    path, keep = (tuple(draw(st.lists(st.integers(0, 30), max_size=9))) for _ in range(2))
    edit = draw(st.sampled_from([None, RowsEdit(()), RowsEdit(tuple(range(5))), RowsEdit(path, keep)]))
    chain = next((node for node, parent in enumerate(parents) if parent != node - 1), count)
    wanted, settled = draw(st.integers(0, count)), draw(st.integers(0, chain))
    return SentRows(draw(st.integers(0, 9)), draw(st.integers(0, 999)), edit, parents, wanted, settled, b"ab")


@given(sent_rows())
def test_rows_survive_a_frame(rows: SentRows) -> None:
    frame = encode({"t": "rows", "id": 3, "x": [pack_rows(rows)], "layers": []})
    assert read_request(frame, more=SPLIT_REQUESTS)["x"] == [rows]
    with pytest.raises(FrameError, match="known: hello"):
        read_request(encode({"t": "join", "id": 3}))


def test_a_chain_costs_few_bytes_besides_its_states() -> None:
    rows = SentRows(3, 400, RowsEdit(tuple(range(6))), tuple(range(-1, 7)), 8, 0, b"x" * 100)
    assert len(encode({"t": "rows", "id": 3, "x": [pack_rows(rows)], "layers": [30]})) < 100 + 40


@given(VALUES, st.sampled_from(sorted(SPLIT_REQUESTS)), st.data())
def test_any_values_of_a_split_are_read_or_refused(value: Any, kind: str, data: st.DataObject) -> None:
    good = {
        "join": {"id": 1, "split": 2, "states": "int8", "picks": "device"},
        "begin": {"id": 1, "text": 2, "limit": 3, "seed": 4, "params": {}, "ends": []},
        "rows": {"id": 1, "x": [[1, 0, None, 2, 1, 0, b""]], "layers": [4]},
    }[kind]
    read_request(encode({"t": kind, **good}), more=SPLIT_REQUESTS)
    field = data.draw(st.sampled_from(sorted(good)))
    try:
        found = read_request(encode({"t": kind, **good, field: value}), more=SPLIT_REQUESTS)
    except FrameError:
        return
    assert found["t"] == kind


@given(VALUES)
def test_any_rows_are_read_or_refused(value: Any) -> None:
    try:
        found = read_request(encode({"t": "rows", "id": 1, "x": [value], "layers": []}), more=SPLIT_REQUESTS)
    except FrameError:
        return
    assert isinstance(found["x"][0], SentRows)


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([1, 0, None, 2, 3, 0, b""], "has 2 nodes, of which 3"),
        ([1, 0, None, [0, 0], 0, 2, b""], "the first nodes are no chain"),
        ([1, 0, None, 2, 1, 0, "text"], "must be bytes"),
        ([1, 0, [1], 2, 1, 0, b""], "list of 2 values"),
        ([1, 0, None, -1, 0, 0, b""], "whole numbers"),
        ([1, 0, None, True, 0, 0, b""], "whole numbers"),
        ([1, 0, None, 2**20, 0, 0, b""], "whole numbers"),
    ],
)
def test_wrong_rows_are_refused(rows: list[Any], text: str) -> None:
    with pytest.raises(FrameError, match=text):
        read_request(encode({"t": "rows", "id": 1, "x": [rows], "layers": []}), more=SPLIT_REQUESTS)
    with pytest.raises(FrameError, match="twice"):
        read_request(
            encode({"t": "rows", "id": 1, "x": [[1, 0, None, 2, 1, 0, b""]] * 2, "layers": []}), more=SPLIT_REQUESTS
        )


def test_binary_values_are_refused_in_all_other_frames() -> None:
    for message in ({"t": "ping", "id": 1, "x": b"a"}, {"t": "hello", "v": 1, "model": b"a"}):
        with pytest.raises(FrameError, match="msgpack map"):
            read_request(encode(message), more=SPLIT_REQUESTS)


def test_addresses_name_a_split() -> None:
    found = RemoteAddress.parse("remote:https://host?split=4&weights=a/b&states=int8&picks=server")
    assert (found.split, found.weights, found.states, found.picks) == (4, "a/b", "int8", "server")
    plain = RemoteAddress.parse("remote:https://host")
    assert (plain.split, plain.states, plain.picks) == (0, "float32", "device")


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("split=0&weights=a", "split=0"),
        ("split=x&weights=a", "split=x"),
        ("split=-1&weights=a", "split=-1"),
        ("split=3", "without weights"),
        ("weights=a", "without split=N"),
        ("states=int8", "without split=N"),
        ("split=2&weights=a&states=int4", "states=int4"),
        ("split=2&weights=a&picks=me", "picks=me"),
        ("splits=2", "splits"),
    ],
)
def test_wrong_addresses_are_refused(query: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        RemoteAddress.parse(f"remote:https://host?{query}")


def test_only_parameters_without_tokens_are_sent() -> None:
    params = SamplingParams(temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, stop=["x"], seed=3, ignore_eos=True)
    assert text_free_params(params) == {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1}
    assert text_free_params(SamplingParams()) == {}
    for name, value in (("frequency_penalty", 0.5), ("regex", "a+"), ("bad_words", ["a"]), ("min_tokens", 3)):
        with pytest.raises(InvalidRequestError, match=name):
            text_free_params(SamplingParams(**{name: value}))  # type: ignore[arg-type]


def test_probe_tokens_are_in_every_vocabulary() -> None:
    for vocab in (2, 17, 300, 49152, 151936):
        assert all(0 <= token < vocab for token in probe_tokens(vocab))
    assert len(set(probe_tokens(49152))) == 16


KINDS = ("float32", "bfloat16", "int8")
STEPS = {"float32": 0.0, "bfloat16": 2**-8, "int8": 0.5 / 127}
"""Largest error of a value, relative to the value for bfloat16 and to the largest of its row for int8."""


def states(rows: int, hidden: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, hidden, generator=generator) * torch.logspace(-2, 3, rows)[:, None]


@pytest.mark.parametrize(("kind", "size"), [("float32", 40), ("bfloat16", 20), ("int8", 62)])
def test_sizes(kind: str, size: int) -> None:
    form = StateFormat(kind, 10)
    assert form.row_bytes == size
    assert form.pack(states(3, 10, 1)).shape == (3, size)
    assert form.pack(torch.empty(0, 10)).shape == (0, size)
    assert form.unpack(b"", 0).shape == (0, 10)


@given(st.integers(1, 6), st.integers(1, 40), st.integers(0, 99), st.sampled_from(KINDS))
def test_values_are_near_and_rounding_again_changes_nothing(rows: int, hidden: int, seed: int, kind: str) -> None:
    form, given_states = StateFormat(kind, hidden), states(rows, hidden, seed)
    found = form.unpack(form.pack(given_states).tobytes(), rows)
    size = given_states.abs() if kind == "bfloat16" else given_states.abs().amax(dim=1, keepdim=True)
    assert bool(((found - given_states).abs() <= STEPS[kind] * size * (1 + 1e-5)).all())
    if kind != "int8":
        assert form.keeps(found)
    assert form.keeps(given_states) == (kind == "float32" or torch.equal(found, given_states))


@given(st.integers(1, 8), st.integers(0, 99), st.sampled_from(KINDS))
def test_a_row_does_not_depend_on_others(rows: int, seed: int, kind: str) -> None:
    form, given_states = StateFormat(kind, 12), states(rows, 12, seed)
    together = form.pack(given_states)
    for row in range(rows):
        assert np.array_equal(form.pack(given_states[row : row + 1])[0], together[row])


def test_the_largest_values_of_an_int8_row_are_kept() -> None:
    form, values = StateFormat("int8", 40), states(3, 40, 5)
    values[:, [3, 17]] *= 1e4
    found = form.unpack(form.pack(values).tobytes(), 3)
    assert torch.equal(found[:, [3, 17]], values[:, [3, 17]])
    others = [place for place in range(40) if place not in (3, 17)]
    assert float((found - values)[:, others].abs().max()) <= 0.004 * float(values[:, others].abs().max())


def test_places_beyond_a_row_are_refused() -> None:
    form = StateFormat("int8", 9)
    data = bytearray(form.pack(torch.ones(1, 9)).tobytes())
    data[36] = 9
    with pytest.raises(FrameError, match="beyond its 9 values"):
        form.unpack(bytes(data), 1)


def test_zeros_stay_zeros() -> None:
    form = StateFormat("int8", 5)
    assert not form.unpack(form.pack(torch.zeros(2, 5)).tobytes(), 2).any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused_on_both_sides(kind: str, value: float) -> None:
    form, bad = StateFormat(kind, 4), torch.tensor([[1.0, value, 2.0, 3.0]])
    with pytest.raises(GenerationError, match="not finite"):
        form.pack(bad)
    if kind == "int8":
        good = form.pack(torch.ones(1, 4))[0].tobytes()
        data = np.float32(value).tobytes() + good[4:]
        with pytest.raises(FrameError, match="not finite"):
            form.unpack(good[:4] + np.float32(value).tobytes() + good[8:], 1)
    else:
        data = bad.numpy().tobytes() if kind == "float32" else bad.bfloat16().view(torch.int16).numpy().tobytes()
    with pytest.raises(FrameError, match="not finite"):
        form.unpack(data, 1)


def test_other_sizes_are_refused() -> None:
    form = StateFormat("bfloat16", 4)
    for data, rows in ((b"x" * 7, 1), (b"x" * 8, 2), (b"", 1), (b"x" * 16, 1)):
        with pytest.raises(FrameError, match="bytes"):
            form.unpack(data, rows)
