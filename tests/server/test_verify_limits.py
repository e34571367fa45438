"""Refusals of a verify server: keys, limits, and frames that are wrong. Other sessions go on."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgpack
import pytest
from websockets.sync.client import connect

from draftree import SamplingParams
from draftree.core.errors import ConfigurationError, GenerationError, InvalidRequestError, VocabularyMismatchError
from draftree.loading.loaded import require_same_tokenizer
from draftree.remote.address import RefusedError, RemoteAddress
from draftree.remote.link import Link, Patience
from draftree.remote.protocol import VERSION
from draftree.serve.access import KeyRing
from draftree.serve.records import ApiKey
from draftree.serve.verify import VerifySettings
from draftree.serve.verify.sessions import Talk
from draftree.text.tokenizer import Tokenizer
from serving import HTTP, Running, running_server
from text_backends import byte_level
from verify_clients import PARAMS, PROMPTS, device, plain_texts, texts_of

HELLO = {"t": "hello", "v": VERSION, "model": None}
QUICK = Patience(reply=10.0, total=0.02, first_pause=0.001, longest_pause=0.01)


@pytest.fixture
def server(verify_server: Running) -> Running:
    return verify_server


class Raw:
    """A client that sends any frames."""

    def __init__(self, server: Running, headers: dict[str, str] | None = None) -> None:
        self._connecting = connect(f"ws{server.url.removeprefix('http')}/v1/verify", additional_headers=headers or {})
        self.socket = self._connecting.__enter__()

    def send(self, message: Any) -> dict[str, Any]:
        self.socket.send(message if isinstance(message, bytes) else msgpack.packb(message))
        found: dict[str, Any] = msgpack.unpackb(self.socket.recv())
        return found

    def begin(self) -> dict[str, Any]:
        welcome = self.send(HELLO)
        assert welcome["t"] == "welcome"
        return welcome

    def open(self, number: int = 1, **given: Any) -> dict[str, Any]:
        message = {"t": "open", "id": 1, "text": number, "prompt": [5, 6, 7], "output": [], "params": {}, "seed": 1}
        return self.send(message | {"limit": 20, "plain": False} | given)

    def close(self) -> None:
        self._connecting.__exit__(None, None, None)


@pytest.fixture
def raw(server: Running) -> Any:
    found = Raw(server)
    yield found
    found.close()


def crc(tokens: list[int]) -> int:
    import zlib

    return zlib.crc32(b"".join(token.to_bytes(4, "little") for token in tokens))


def verify(tokens: list[int], parents: list[int] | None = None, *, number: int = 2, **given: Any) -> dict[str, Any]:
    base = [5, 6, 7]
    return {"t": "verify", "id": number, "x": [[1, len(base), crc(base), tokens, parents]]} | given


def test_a_round_by_hand(raw: Raw) -> None:
    raw.begin()
    assert raw.open()["t"] == "opened"
    first = raw.send(verify([9, 10, 9], [0, 0, 1]))
    assert first["t"] == "walk"
    assert raw.send(verify([9, 10, 9], [0, 0, 1])) == first, "a repeated round is answered from memory"
    assert raw.send({"t": "ping", "id": 3}) == {"t": "pong", "id": 3}
    assert raw.send({"t": "close", "id": 4, "texts": [1]})["t"] == "closed"
    assert raw.send({"t": "bye", "id": 5})["t"] == "closed"
    assert raw.send({"t": "ping", "id": 6})["code"] == "session_lost"


@pytest.mark.parametrize(
    ("message", "code", "text"),
    [
        (b"\xc1", "bad_frame", "not a msgpack map"),
        (b"[1]", "bad_frame", "not"),
        (msgpack.packb([1, 2]), "bad_frame", "one msgpack map"),
        (msgpack.packb({1: 2}), "bad_frame", "msgpack map"),
        (msgpack.packb({"t": "hello", "v": msgpack.ExtType(5, b"x")}), "bad_frame", "msgpack map"),
        (msgpack.packb({"t": "hello", "v": b"1"}), "bad_frame", "msgpack map"),
        ({"t": "nothing"}, "unknown_type", "known: hello"),
        ({"t": "hello", "v": 99, "model": None}, "version_mismatch", "same version"),
        ({"t": "verify", "id": 2}, "bad_frame", "'verify.x' must be a list"),
        (verify([9], extra=1), "bad_frame", "no field 'extra'"),
        (verify([9, 9], [0, 2]), "bad_frame", "no tree"),
        (verify([9, 9], [0]), "bad_frame", "no tree"),
        (verify([-1]), "bad_frame", "whole numbers"),
        (verify([True]), "bad_frame", "whole numbers"),
        (verify([1.5]), "bad_frame", "whole numbers"),
        (verify([9], id=-3), "bad_frame", "'verify.id'"),
        (verify([9], number=7), "out_of_order", "2 is the next"),
        (verify([9] * 65), "too_many_nodes", "at most 64"),
        (verify([100_000]), "bad_token", "vocabulary"),
        (verify([9] * 20), "too_deep", "the bonus needs room"),
        ({"t": "verify", "id": 2, "x": [[1, 4, 0, [], None]]}, "out_of_step", "open the text again"),
        ({"t": "verify", "id": 2, "x": [[1, 3, 0, [], None]]}, "out_of_step", "open the text again"),
        ({"t": "verify", "id": 2, "x": [[8, 3, 0, [], None]]}, "text_lost", "no open text 8"),
        ({"t": "verify", "id": 2, "x": [[1, 3, 0, [], None]] * 2}, "bad_frame", "twice"),
        ({"t": "read", "id": 2, "text": 1, "start": 0}, "bad_frame", "other kind"),
        ({"t": "open", "id": 2, "text": 1}, "bad_frame", "'open.prompt'"),
    ],
)
def test_wrong_frames_are_refused(raw: Raw, message: Any, code: str, text: str) -> None:
    raw.begin()
    raw.open()
    reply = raw.send(message)
    assert (reply["t"], reply["code"]) == ("error", code)
    assert text in reply["message"]
    number = 3 if reply["id"] == 2 and code != "out_of_order" else 2
    assert raw.send(verify([9], number=number))["t"] == "walk", "the session goes on"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"params": {"temperature": -1}}, "temperature"),
        ({"params": {"n": 2}}, "cannot be sent"),
        ({"params": {"__class__": 2}}, "cannot be sent"),
        ({"params": {"logit_bias": [[1]]}}, "logit_bias"),
        ({"params": {"regex": "(" * 5000}}, "regex"),
        ({"prompt": []}, "empty"),
        ({"prompt": [10**6]}, "vocabulary"),
        ({"output": [10**6]}, "vocabulary"),
        ({"prompt": [5] * 600}, "context"),
        ({"limit": 0}, "max_tokens"),
        ({"params": {"stop": ["a"] * 50_000}}, "stop has 50000 strings: at most 64"),
        ({"params": {"stop_token_ids": [5] * 200_000}}, "stop_token_ids has 200000 token ids: at most 4096"),
        ({"output": [5, 6], "limit": 2}, "it has ended, so it cannot be opened"),
        ({"limit": 10**6}, "max_tokens"),
    ],
)
def test_wrong_texts_are_refused(raw: Raw, given: dict[str, Any], text: str) -> None:
    raw.begin()
    reply = raw.open(**given)
    assert reply["t"] == "error"
    assert text in reply["message"]
    assert raw.open(id=2)["t"] == "opened"


def test_text_frames_and_many_bad_frames_end_a_connection(server: Running) -> None:
    client = Raw(server)
    client.socket.send("text")
    with pytest.raises(Exception, match="1003"):
        client.socket.recv()
    client.close()
    client = Raw(server)
    for _ in range(8):
        assert client.send(b"\xc1")["code"] == "bad_frame"
    with pytest.raises(Exception, match="1008"):
        client.socket.recv()
    client.close()


def test_frames_that_are_too_large_end_a_connection_or_are_refused(server: Running) -> None:
    frame = msgpack.packb({"t": "open", "params": "x" * (1 << 20)})
    headers = {"content-type": "application/msgpack"}
    found = msgpack.unpackb(HTTP.post(f"{server.url}/v1/verify", content=frame, headers=headers).content)
    assert found["code"] == "frame_too_large"
    assert HTTP.post(f"{server.url}/v1/verify", content=b"x").status_code == 415


def test_random_frames_never_hurt_other_sessions(server: Running) -> None:
    """Mutations of good frames, by a fixed seed: every reply is a reply, and a device beside them gets its texts."""
    chooser = random.Random(5)
    good = [
        HELLO,
        {"t": "open", "id": 1, "text": 1, "prompt": [5, 6, 7], "output": [], "params": {}, "seed": 1, "limit": 20,
         "plain": False},
        verify([9, 10, 9], [0, 0, 1]),
        {"t": "read", "id": 3, "text": 1, "start": 0},
        {"t": "close", "id": 3, "texts": [1]},
    ]  # fmt: skip
    odd = [None, -1, 0, 2**64 - 1, 1e308, float("nan"), "", "x" * 300, b"", [], {}, [[[]]], True, [2**40] * 70]

    def mutated(message: dict[str, Any]) -> bytes:
        changed = dict(message)
        for _ in range(chooser.randint(1, 2)):
            changed[chooser.choice([*changed, "x", "zz"])] = chooser.choice(odd)
        frame = bytearray(msgpack.packb(changed))
        if chooser.random() < 0.3:
            for _ in range(chooser.randint(1, 4)):
                frame[chooser.randrange(len(frame))] = chooser.randrange(256)
        return bytes(frame)

    expected = plain_texts()
    service = server.server.verify
    assert service is not None
    with device(server) as llm:

        def disturb(update: Any) -> None:
            talk = Talk(ApiKey("anonymous"))

            async def send() -> None:
                for message in good:
                    frame = mutated(message) if chooser.random() < 0.7 else msgpack.packb(message)
                    if chooser.random() < 0.05:
                        frame = chooser.randbytes(chooser.randint(0, 200))
                    reply = msgpack.unpackb(await service.answer(frame, talk))
                    assert reply["t"] in ("welcome", "opened", "walk", "tokens", "closed", "error")
                    assert reply.get("code") != "internal_error", reply
                if talk.session is not None:
                    await service._drop(talk.session)

            for _ in range(3):
                asyncio.run_coroutine_threadsafe(send(), server.loop).result()

        found = llm.generate(list(PROMPTS), list(PARAMS), on_update=disturb)
        assert [list(one.token_ids) for one in found] == expected
    server.llm._driver.call(server.llm.llm.engine.check_integrity).result()


def test_keys_are_needed_and_sessions_belong_to_them() -> None:
    keys = KeyRing({"secret-one": ApiKey("one"), "secret-two": ApiKey("two")})
    with running_server(verify=VerifySettings(), keys=keys) as server:
        with device(server, key="secret-one") as llm:
            assert texts_of(llm) == plain_texts()
            other = Raw(server, {"Authorization": "Bearer secret-two"})
            token = llm.model.link._session
            assert other.send({"t": "ping", "id": 1, "s": token})["code"] == "session_lost"
            other.close()
        for key, reason in ((None, "needs an API key"), ("secret-three", "refuses the API key")):
            with pytest.raises(RefusedError, match=reason), device(server, key=key):
                pass
            headers = {"content-type": "application/msgpack"} | ({} if key is None else {"Authorization": key})
            assert HTTP.post(f"{server.url}/v1/verify", content=b"", headers=headers).status_code == 401
            assert HTTP.get(f"{server.url}/v1/verify/tokenizer").status_code == 401


def test_keys_are_sent_encrypted_only() -> None:
    with pytest.raises(ConfigurationError, match="unencrypted"):
        Link(RemoteAddress.parse("remote:http://example.org"), "secret")


def test_sessions_and_texts_are_limited() -> None:
    with running_server(verify=VerifySettings(max_sessions=1, max_texts=2)) as server:
        with device(server) as llm:
            assert texts_of(llm) == plain_texts(), "four texts, two at a time"
            with pytest.raises(GenerationError, match="1 sessions are open"), device(server, patience=QUICK):
                pass
        client = Raw(server)
        client.begin()
        assert client.open(1)["t"] == client.open(2, id=2)["t"] == "opened"
        assert client.open(3, id=3)["code"] == "too_many_texts"
        client.close()


def test_a_busy_server_asks_for_smaller_drafts() -> None:
    drafted = []
    with running_server(verify=VerifySettings(max_rows=8)) as server:
        server.llm.on_round(lambda record: drafted.append([row.num_drafted for row in record.sequences]))
        params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
        with device(server, "suffix,min=1", plan="fixed") as llm:
            assert texts_of(llm, PROMPTS, [params] * 4) == plain_texts(PROMPTS, [params] * 4)
    busy = [row for rows in drafted[1:] if len(rows) == 4 for row in rows]
    assert busy
    assert max(busy) == 2, "eight rows for four texts"


def test_methods_that_need_logits_are_refused(server: Running) -> None:
    with pytest.raises(ConfigurationError, match="verifies drafts itself"), device(server, None, verify="token"):
        pass
    needs = {"lookahead,window=4": "beside the accepted path", "head:smollm2-135m-instruct": "hidden states"}
    for draft, text in needs.items():
        with pytest.raises(ConfigurationError, match=text), device(server, draft):
            pass
    with device(server) as llm:
        with pytest.raises(InvalidRequestError, match="logprobs"):
            llm.generate("The", SamplingParams(logprobs=1))
        assert texts_of(llm) == plain_texts()


def test_another_tokenizer_is_refused(server: Running) -> None:
    with device(server) as llm:
        wanted = llm.model.link.welcome.tokenizer
        require_same_tokenizer(llm.tokenizer, wanted)
        other = byte_level()
        other.add_tokens(["another"])
        with pytest.raises(VocabularyMismatchError, match="not the one"):
            require_same_tokenizer(Tokenizer(other), wanted)
