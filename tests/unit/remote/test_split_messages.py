"""Messages of a split by layers: what is packed is read again, small, and everything else is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.core.errors import ConfigurationError, InvalidRequestError
from draftree.remote.address import RemoteAddress
from draftree.remote.errors import FrameError
from draftree.remote.protocol import encode, read_request
from draftree.remote.split.messages import SPLIT_REQUESTS, RowsEdit, SentRows, pack_rows, probe_tokens
from draftree.remote.split.sampling import text_free_params
from draftree.sampling.params import SamplingParams


@st.composite
def sent_rows(draw: st.DrawFn) -> SentRows:
    count = draw(st.integers(0, 20))
    parents = tuple(draw(st.integers(-1, node - 1)) for node in range(count))
    if draw(st.booleans()):
        parents = tuple(range(-1, count - 1))
    path, keep = (tuple(draw(st.lists(st.integers(0, 30), max_size=9))) for _ in range(2))
    edit = draw(st.sampled_from([None, RowsEdit(()), RowsEdit(tuple(range(5))), RowsEdit(path, keep)]))
    return SentRows(
        draw(st.integers(0, 9)), draw(st.integers(0, 999)), edit, parents, draw(st.integers(0, count)), b"ab"
    )


@given(sent_rows())
def test_rows_survive_a_frame(rows: SentRows) -> None:
    frame = encode({"t": "rows", "id": 3, "x": [pack_rows(rows)], "layers": []})
    assert read_request(frame, more=SPLIT_REQUESTS)["x"] == [rows]
    with pytest.raises(FrameError, match="known: hello"):
        read_request(encode({"t": "join", "id": 3}))


def test_a_chain_costs_few_bytes_besides_its_states() -> None:
    rows = SentRows(3, 400, RowsEdit(tuple(range(6))), tuple(range(-1, 7)), 8, b"x" * 100)
    assert len(encode({"t": "rows", "id": 3, "x": [pack_rows(rows)], "layers": [30]})) < 100 + 40


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=4)
    | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=6), max_leaves=20,
)  # fmt: skip


@given(VALUES, st.sampled_from(sorted(SPLIT_REQUESTS)), st.data())
def test_any_values_of_fields_are_read_or_refused(value: Any, kind: str, data: st.DataObject) -> None:
    good = {
        "join": {"id": 1, "split": 2, "states": "int8", "picks": "device"},
        "begin": {"id": 1, "text": 2, "limit": 3, "seed": 4, "params": {}, "ends": []},
        "rows": {"id": 1, "x": [[1, 0, None, 2, 1, b""]], "layers": [4]},
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
        ([1, 0, None, 2, 3, b""], "2 nodes were sent"),
        ([1, 0, None, 2, 1, "text"], "must be bytes"),
        ([1, 0, [1], 2, 1, b""], "list of 2 values"),
        ([1, 0, None, -1, 0, b""], "whole numbers"),
        ([1, 0, None, True, 0, b""], "whole numbers"),
        ([1, 0, None, 2**20, 0, b""], "whole numbers"),
    ],
)
def test_wrong_rows_are_refused(rows: list[Any], text: str) -> None:
    with pytest.raises(FrameError, match=text):
        read_request(encode({"t": "rows", "id": 1, "x": [rows], "layers": []}), more=SPLIT_REQUESTS)
    with pytest.raises(FrameError, match="twice"):
        read_request(
            encode({"t": "rows", "id": 1, "x": [[1, 0, None, 2, 1, b""]] * 2, "layers": []}), more=SPLIT_REQUESTS
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
