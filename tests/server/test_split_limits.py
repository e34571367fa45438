"""Refusals of a server that takes hidden states: wrong frames change nothing, and other devices go on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from test_verify_limits import Raw

from draftree.remote.split import exchange
from serving import Running
from split_devices import SPLIT, save_split_model, split_device, split_server, whole_texts
from verify_clients import PARAMS, PROMPTS, service_of, texts_of

HIDDEN, ROW = 64, 256


@pytest.fixture
def folder(split_folder: Path) -> Path:
    return split_folder


@pytest.fixture
def server(layers_server: Running) -> Running:
    return layers_server


def data(rows: int, value: float = 0.25) -> bytes:
    return np.full((rows, HIDDEN), value, dtype="<f4").tobytes()


@pytest.fixture
def raw(server: Running) -> Any:
    """A session with a text of five committed tokens and a tentative tree of three."""
    found = Raw(server)
    found.begin()
    assert found.send({"t": "join", "id": 1, "split": SPLIT, "states": "float32", "picks": "device"})["t"] == "joined"
    assert (
        found.send({"t": "begin", "id": 2, "text": 1, "limit": 20, "seed": 0, "params": {}, "ends": []})["t"] == "begun"
    )
    assert found.send(rows([1, 0, None, 5, 1, 0, data(5)], number=3))["t"] == "passed"
    reply = found.send(rows([1, 5, [5, []], [0, 0, 1], 3, 0, data(3)], number=4))
    assert (reply["t"], len(reply["x"][0])) == ("passed", 3 * ROW)
    yield found
    found.close()


def rows(*each: list[Any], number: int = 5) -> dict[str, Any]:
    return {"t": "rows", "id": number, "x": list(each), "layers": [4]}


@pytest.mark.parametrize(
    ("message", "code", "text"),
    [
        (rows([9, 0, None, 1, 1, 0, data(1)]), "text_lost", "begin it again"),
        (rows([1, 5, None, 2, 1, 0, data(1)]), "bad_states", "2 rows of 64 states in float32 have 512 bytes"),
        (rows([1, 5, None, 1, 1, 0, data(1, float("nan"))]), "bad_states", "not finite"),
        (rows([1, 5, None, 1, 1, 0, data(1, float("inf"))]), "bad_states", "not finite"),
        (rows([1, 6, None, 1, 1, 0, data(1)]), "out_of_step", "has 5 tokens here"),
        (rows([1, 4, None, 1, 1, 0, data(1)]), "out_of_step", "has 5 tokens here"),
        (rows([1, 6, [[2], []], 1, 1, 0, data(1)]), "out_of_step", "none of its tree"),
        (rows([1, 6, [[7], []], 1, 1, 0, data(1)]), "out_of_step", "none of its tree"),
        (rows([1, 6, [[0], [1]], 1, 1, 0, data(1)]), "out_of_step", "none of its tree"),
        (rows([1, 7, [[0], []], 1, 1, 0, data(1)]), "out_of_step", "has 6 tokens here"),
        (rows([1, 5, None, [9], 1, 0, data(1)]), "bad_frame", "no tree"),
        (rows([1, 5, None, [5], 1, 0, data(1)]), "bad_frame", "no tree"),
        (rows([1, 5, [[], []], 16, 1, 0, data(16)]), "too_deep", "20 tokens"),
        (rows([1, 5, None, 1025, 1, 0, b""]), "too_many_nodes", "at most 1024"),
        (rows([1, 5, None, 1, 1, 0, data(1)], [1, 5, None, 1, 1, 0, data(1)]), "bad_frame", "twice"),
        (rows([1, 5, None, 1, 1, 0, data(1)], [2, 5, None, 1, 1, 0, data(1)]), "text_lost", "text 2"),
        (rows([1, 5, None, 1, 1, 0, data(1)]) | {"layers": []}, "bad_frame", "from 3 to 4"),
        (rows([1, 5, None, 1, 1, 0, data(1)]) | {"layers": [2]}, "bad_frame", "from 3 to 4"),
        (rows([1, 5, None, 1, 1, 0, data(1)]) | {"layers": [5]}, "bad_frame", "from 3 to 4"),
        (rows([1, 5, None, 1, 1, 0, data(1)]) | {"layers": [4, 4]}, "bad_frame", "different"),
        ({"t": "rows", "id": 5, "x": [], "layers": [4]}, "bad_frame", "1 to 256 texts"),
        (
            {"t": "begin", "id": 5, "text": 1, "limit": 20, "seed": 0, "params": {}, "ends": []},
            "bad_frame",
            "open already",
        ),
        ({"t": "begin", "id": 5, "text": 2, "limit": 0, "seed": 0, "params": {}, "ends": []}, "refused", "from 1 to"),
        (
            {"t": "begin", "id": 5, "text": 2, "limit": 10**6, "seed": 0, "params": {}, "ends": []},
            "refused",
            "from 1 to",
        ),
        (
            {"t": "begin", "id": 5, "text": 2, "limit": 9, "seed": 0, "params": {"top_k": 3}, "ends": []},
            None,
            "device picks",
        ),
        ({"t": "join", "id": 5, "split": SPLIT, "states": "int8", "picks": None}, "bad_frame", "joins once"),
        ({"t": "join", "id": 5, "split": 3, "states": None, "picks": None}, "wrong_split", "split=2"),
    ],
)
def test_wrong_frames_are_refused_and_change_nothing(raw: Raw, message: Any, code: str | None, text: str) -> None:
    reply = raw.send(message)
    assert reply["t"] == "error"
    assert code is None or reply["code"] == code
    assert text in reply["message"]
    number = 6 if reply["id"] == 5 else 5
    good = rows([1, 7, [[0, 2], []], 2, 2, 0, data(2)], number=number)
    first = raw.send(good)
    assert first["t"] == "passed"
    assert raw.send(good) == first, "a repeated frame is answered from memory"


def test_states_are_not_cut_and_move_over_settled_nodes(tmp_path: Path) -> None:
    with split_server(save_split_model(tmp_path, family="lfm2")) as server:
        found = Raw(server)
        found.begin()
        assert found.send({"t": "join", "id": 1, "split": SPLIT, "states": None, "picks": None})["recurrent"] is True
        begin = {"t": "begin", "id": 2, "text": 1, "limit": 20, "seed": 0, "params": {}, "ends": []}
        assert found.send(begin)["t"] == "begun"
        assert found.send(rows([1, 0, None, 5, 0, 4, data(5)], number=3))["t"] == "passed"
        for number, row, code, text in (
            (4, [1, 3, [[0, 1, 2], []], 1, 1, 0, data(1)], "out_of_step", "not cut"),
            (5, [1, 3, [[0, 1, 2, 3], []], 1, 1, 0, data(1)], "out_of_step", "not cut"),
            (6, [1, 4, [[0, 1, 2, 3], [4]], 1, 1, 1, data(1)], "bad_frame", "follow a tree"),
            (7, [1, 4, [[0, 1, 2, 3], []], [0, 0], 1, 2, data(2)], "bad_frame", "no chain"),
        ):
            refused = found.send(rows(row, number=number))
            assert (refused["code"], text in refused["message"]) == (code, True)
        good = found.send(rows([1, 4, [[0, 1, 2, 3], []], 2, 2, 1, data(2)], number=7))
        assert (good["t"], len(good["x"][0])) == ("passed", 2 * ROW)
        ((passes, _, _),) = service_of(server).layers._passes.values()
        assert passes.num_passes == 2
        found.close()


def test_sessions_have_to_join_first(server: Running) -> None:
    found = Raw(server)
    found.begin()
    for kind, more in (
        ("begin", {"text": 1, "limit": 5, "seed": 0, "params": {}, "ends": []}),
        ("rows", {"x": [[1, 0, None, 0, 0, 0, b""]], "layers": []}),
    ):
        reply = found.send({"t": kind, "id": 1 if kind == "begin" else 2, **more})
        assert "join first" in reply["message"]
    assert found.send({"t": "join", "id": 3, "split": SPLIT, "states": "int4", "picks": None})["code"] == "bad_frame"
    assert found.send({"t": "join", "id": 4, "split": SPLIT, "states": None, "picks": "server"})["t"] == "joined"
    refused = {"t": "begin", "id": 5, "text": 1, "limit": 5, "seed": 0, "params": {"presence_penalty": 0.5}, "ends": []}
    assert "picks=device" in found.send(refused)["message"]
    assert found.send(refused | {"id": 6, "params": {"temperature": -1}})["t"] == "error"
    for number in range(8):
        opened = found.send(
            {"t": "begin", "id": 7 + number, "text": number, "limit": 20, "seed": 0, "params": {}, "ends": []}
        )
        assert opened["t"] == "begun"
    full = found.send({"t": "begin", "id": 15, "text": 99, "limit": 20, "seed": 0, "params": {}, "ends": []})
    assert full["code"] == "too_many_texts"
    picks = found.send(rows([1, 0, None, 3, 2, 0, data(3)], number=16) | {"layers": []})["x"][0]
    assert len(picks) == 2
    assert all(isinstance(pick, int) for pick in picks)
    assert found.send({"t": "close", "id": 17, "texts": [1, 2, 77]})["t"] == "closed"
    assert found.send({"t": "bye", "id": 18})["t"] == "closed"
    found.close()


def test_texts_need_memory(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.llm.llm.engine, "num_slots", lambda length: 3)
    found = Raw(server)
    found.begin()
    found.send({"t": "join", "id": 1, "split": SPLIT, "states": None, "picks": None})
    begin = {"t": "begin", "limit": 20, "seed": 0, "params": {}, "ends": []}
    assert found.send(begin | {"id": 2, "text": 1})["t"] == "begun"
    full = found.send(begin | {"id": 3, "text": 2})
    assert (full["code"], full["status"]) == ("texts_full", 429)
    assert full["retry_ms"] > 0
    found.send({"t": "bye", "id": 4})
    found.close()


def test_texts_that_grow_begin_again_with_more_room(
    server: Running, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server counts memory by the tokens for which a text may need room, which the device does not know before."""
    expected = whole_texts(folder, PROMPTS, PARAMS)
    monkeypatch.setattr(exchange, "LEAST_LIMIT", 12)
    for draft in (f"early-exit:{SPLIT},tree=best-8", None):
        with split_device(server, folder, draft, plan=None if draft is None else "fixed") as llm:
            assert texts_of(llm) == expected
            assert llm.model.link.latency.reopened
            assert all(slot.limit <= 512 for slot in llm.model._exchange.slots.values())


def test_short_and_long_texts_share_the_memory(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the memory is for texts of devices: one of 40 tokens takes as much as two of 20."""
    monkeypatch.setattr(server.llm.llm.engine, "num_slots", lambda length: 160 // length)
    found = Raw(server)
    found.begin()
    found.send({"t": "join", "id": 1, "split": SPLIT, "states": None, "picks": None})
    begin = {"t": "begin", "limit": 20, "seed": 0, "params": {}, "ends": []}
    assert found.send(begin | {"id": 2, "text": 1, "limit": 40})["t"] == "begun"
    assert found.send(begin | {"id": 3, "text": 2})["t"] == "begun"
    assert found.send(begin | {"id": 4, "text": 3, "limit": 40})["code"] == "texts_full"
    assert found.send(begin | {"id": 5, "text": 4})["t"] == "begun"
    assert found.send(begin | {"id": 6, "text": 5})["code"] == "texts_full"
    assert found.send(begin | {"id": 7, "text": 6, "limit": 40, "ends": [1]})["t"] == "begun"
    found.send({"t": "bye", "id": 8})
    found.close()


def test_random_frames_never_hurt_other_devices(server: Running, folder: Path) -> None:
    """Mutations of good frames, by a fixed seed: every reply is a reply, and a device beside them gets its texts."""
    chooser = random.Random(5)
    good = [
        {"t": "join", "id": 1, "split": SPLIT, "states": "float32", "picks": "device"},
        {"t": "begin", "id": 2, "text": 1, "limit": 20, "seed": 0, "params": {}, "ends": []},
        rows([1, 0, None, 5, 1, 0, data(5)], number=3),
        rows([1, 5, [5, []], [0, 0, 1], 3, 0, data(3)], number=4),
        {"t": "close", "id": 5, "texts": [1]},
    ]
    odd = [None, -1, 0, 2**64 - 1, float("nan"), "x" * 300, b"", b"\x7f" * 64, [], {}, [[[]]], True, [2**40] * 7]

    def mutated(message: dict[str, Any]) -> bytes:
        changed = dict(message)
        if "x" in changed and chooser.random() < 0.7:
            row = list(changed["x"][0])
            row[chooser.randrange(len(row))] = chooser.choice(odd)
            changed["x"] = [row]
        else:
            changed[chooser.choice([*changed, "zz"])] = chooser.choice(odd)
        frame = bytearray(msgpack.packb(changed))
        if chooser.random() < 0.3:
            frame[chooser.randrange(len(frame))] ^= 1 << chooser.randrange(8)
        return bytes(frame)

    wanted = whole_texts(folder, PROMPTS, PARAMS)
    with split_device(server, folder, plan="fixed") as llm:
        for turn in range(40):
            client = Raw(server)
            client.begin()
            for message in good:
                wrong = chooser.random() < 0.3
                reply = client.send(mutated(message) if wrong else message)
                assert isinstance(reply["t"], str)
            client.close()
            if turn % 20 == 0:
                assert texts_of(llm) == wanted
        assert texts_of(llm) == wanted
