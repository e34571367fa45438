"""Devices that draft for a model on a server: texts, tokenizer files, admission, leases and the ends of sessions."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import os
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest

from draftree import LLM, SamplingParams
from draftree.cli.main import run
from draftree.core.errors import ModelLoadError
from draftree.core.types import RoundRecord
from draftree.remote import transport
from draftree.remote import transport as transports
from draftree.remote.address import ConnectionLostError, RemoteAddress
from draftree.remote.link import Patience
from draftree.remote.protocol import VERSION, encode
from draftree.remote.tokenizers import files_digest, install_files, kept_digests
from draftree.remote.transport import PostTransport, WebSocketTransport
from draftree.serve.app import create_app
from draftree.serve.pool import ModelPool, ServedModel
from draftree.serve.records import ApiKey
from draftree.serve.verify import VerifySettings
from draftree.serve.verify.service import VerifyService
from draftree.serve.verify.sessions import Talk
from operated import wait_for
from private_cache import private_cache
from serving import (
    ALIAS,
    HTTP,
    NAME,
    Running,
    _serving,
    running_server,
    settings,
    tiny_async_llm,
    tiny_model,
    tiny_tokenizer,
)
from verify_clients import PARAMS, PROMPTS, device, plain_texts, service_of, texts_of


@pytest.fixture
def server(verify_server: Running) -> Running:
    return verify_server


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTREE_CACHE", private_cache(tmp_path / "cache"))
    monkeypatch.delenv("DRAFTREE_API_KEY", raising=False)


@pytest.mark.parametrize("draft", ["suffix,min=1", "ngram", "ngram,min=1+suffix", None])
def test_texts_equal_plain_decoding(server: Running, draft: str | None) -> None:
    with device(server, draft, **({} if draft is None else {"plan": "fixed"})) as llm:
        assert texts_of(llm) == plain_texts()
        alone = [texts_of(llm, [prompt], [params])[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
        assert alone == plain_texts()
        llm.engine.check_integrity()
        if draft == "suffix,min=1":
            latency = llm.model.link.latency
            assert latency.rounds > 5
            assert (latency.bytes_up + latency.bytes_down) / latency.rounds < 300, "rounds are small"
    assert service_of(server).num_texts == 0


def test_a_plain_client_writes_more_texts_than_may_be_open(server: Running) -> None:
    expected = plain_texts(PROMPTS[:1], PARAMS[:1])
    with device(server, None) as llm:
        for _ in range(VerifySettings().max_texts + 2):
            assert texts_of(llm, PROMPTS[:1], PARAMS[:1]) == expected


def test_trees_of_several_devices_share_a_pass(server: Running) -> None:
    """Between rounds of two devices, another text waits in its round until both have sent their next trees."""
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    expected = plain_texts(PROMPTS[:2], [params] * 2)
    service, records, found, ended = service_of(server), [], {}, threading.Event()
    num_served = [0]
    before, opened, pause = service.counts["asked"], service.counts["opened"], threading.Event()

    def wait(record: RoundRecord) -> None:
        if any(row.request_id.startswith("verify-") for row in record.sequences):
            records.append(record)
            num_served[0] += sum(row.request_id.startswith("verify-") for row in record.sequences)
            return
        if service.counts["opened"] < opened + 2:
            pause.wait(0.05)  # the devices open their texts between rounds
            return
        for _ in range(3000):
            if ended.is_set() or service.counts["asked"] - before > num_served[0] + 1:
                return
            pause.wait(0.01)

    def run(place: int) -> None:
        try:
            with device(server, "suffix,min=1", plan="fixed") as llm:
                found[place] = texts_of(llm, [PROMPTS[place]], [params])[0]
        finally:
            ended.set()

    remove = server.llm.on_round(wait)
    long = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)
    other = asyncio.run_coroutine_threadsafe(server.llm.generate("the dog", long, draft="none"), server.loop)
    try:
        threads = [threading.Thread(target=run, args=(place,)) for place in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        ended.set()
        other.cancel()
        remove()
    assert [found[0], found[1]] == expected
    shared = [record for record in records if len(record.sequences) == 3]
    assert len(shared) > 3, "two devices and the other text in one pass"
    assert any(sum(row.num_drafted > 0 for row in record.sequences) == 2 for record in shared)


def test_devices_and_plain_requests_share_the_server(server: Running) -> None:
    body = {"model": NAME, "prompt": PROMPTS[0], "max_tokens": 24, "temperature": 0}
    with device(server) as llm:
        found = []

        def ask(update: Any) -> None:
            if len(found) < 3:
                found.append(HTTP.post(f"{server.url}/v1/completions", json=body).json()["choices"][0])

        texts = llm.generate(list(PROMPTS), list(PARAMS), on_update=ask)
        assert [list(one.token_ids) for one in texts] == plain_texts()
        assert {one["text"] for one in found} == {texts[0].text}
        shown = HTTP.get(f"{server.url}/draftree/status").json()["verify"]
        assert shown["sessions"] == 1
        assert shown["accepted"] > 0


def test_post_is_used_where_there_is_no_websocket() -> None:
    pool = ModelPool([ServedModel(NAME, tiny_async_llm("ngram"), (ALIAS,))])
    app = create_app(settings(), pool, verify=VerifySettings())
    with _serving(app, "none") as (url, _), device(url) as llm:
        assert texts_of(llm) == plain_texts()
        assert isinstance(llm.model.link._transport, PostTransport)


def test_the_name_of_a_server_is_enough(server: Running) -> None:
    """Without arguments, `LLM` fetches the tokenizer, chats, streams and reports; several texts per prompt, too."""
    llm = LLM(f"remote:{server.url}", "suffix,min=1", plan="fixed")
    try:
        assert isinstance(llm.model.link._transport, WebSocketTransport)
        assert texts_of(llm) == plain_texts()
        assert llm.tokenizer is not None
        assert llm.tokenizer.vocabulary() == server.llm.llm.tokenizer.vocabulary()
        local = LLM(tiny_model(), "none", tokenizer=tiny_tokenizer())
        talk = [{"role": "user", "content": "the dog"}]
        params = SamplingParams(max_tokens=16, temperature=0.8, seed=9, n=3)
        assert [one.token_ids for one in llm.chat(talk, params)] == [one.token_ids for one in local.chat(talk, params)]
        greedy = SamplingParams(max_tokens=16, temperature=0)
        assert "".join(llm.stream(PROMPTS[0], greedy)) == local.generate(PROMPTS[0], greedy)[0].text
        stream = llm.stream(PROMPTS[0], greedy)
        next(stream)
        stream.close()
        llm.engine.check_integrity()
        assert llm.model.num_open == 0
        assert "round trip" in llm.model.note
    finally:
        llm.model.disconnect()


FILES = {"tokenizer.json": json.dumps({"version": "1.0"}), "chat_template.jinja": "{{ messages }}"}


def sent(model: str, files: dict[str, str]) -> bytes:
    return json.dumps({"model": model, "files": files}).encode()


@pytest.fixture
def bodies(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Bodies of the tokenizer's files that were received; the cache is empty."""
    found, fetch = list[bytes](), transport.fetch

    def counted(*given: Any, **options: Any) -> bytes:
        found.append(fetch(*given, **options))
        return found[-1]

    monkeypatch.setattr(transport, "fetch", counted)
    return found


def text_of(server: Running) -> str:
    llm = LLM(f"remote:{server.url}", None)
    try:
        return llm.generate("The quick brown", SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))[0].text
    finally:
        llm.model.disconnect()


def test_files_are_sent_once(server: Running, bodies: list[bytes], tmp_path: Path) -> None:
    first, second = text_of(server), text_of(server)
    assert first == second
    assert len(bodies[0]) > 1000 > len(bodies[1])
    (folder,) = (tmp_path / "cache" / "remote").iterdir()
    (folder / "complete").unlink()
    assert text_of(server) == first
    assert bodies[2] == bodies[0], "a folder that was not completed does not count"
    folder.rename(folder.with_name(f"{NAME}-{'0' * 32}"))
    assert text_of(server) == first
    assert bodies[3] == bodies[0], "other files do not count"


def test_folders_of_other_models_do_not_count(tmp_path: Path) -> None:
    changed = FILES | {"chat_template.jinja": "{{ messages[0] }}"}
    for model, files in (("tiny", FILES), ("tiny", changed), ("tiny-b", FILES), ("a/b", FILES)):
        folder = install_files(sent(model, files), tmp_path)
        assert (folder / "chat_template.jinja").read_text() == files["chat_template.jinja"]
    assert set(kept_digests("tiny", tmp_path)) == {files_digest(FILES), files_digest(changed)}
    assert kept_digests("tiny-b", tmp_path) == kept_digests("a/b", tmp_path) == [files_digest(FILES)]
    assert kept_digests("other", tmp_path) == []
    known = json.dumps({"model": "tiny", "known": files_digest(FILES)}).encode()
    assert install_files(known, tmp_path) == install_files(sent("tiny", FILES), tmp_path)


@pytest.mark.parametrize("known", ["0" * 32, "../../etc", 7, "", None])
def test_digests_of_files_that_are_not_there_are_refused(tmp_path: Path, known: Any) -> None:
    with pytest.raises(ModelLoadError, match="tokenizer=FOLDER"):
        install_files(json.dumps({"model": "tiny", "known": known}).encode(), tmp_path)


HELLO = {"t": "hello", "v": VERSION, "model": None}
OPEN = {"t": "open", "id": 1, "text": 1, "prompt": [5, 6, 7], "output": [], "params": {}, "seed": 1, "limit": 20}


async def answer(service: VerifyService, message: dict[str, Any], talk: Talk) -> dict[str, Any]:
    found: dict[str, Any] = msgpack.unpackb(await service.answer(msgpack.packb(message), talk))
    return found


def test_sessions_that_begin_at_once_keep_the_limit() -> None:
    """The first greeting waits for measured passes; the greetings that arrive meanwhile count as well."""
    with running_server(verify=VerifySettings(max_sessions=2)) as server:
        service = service_of(server)

        async def all_at_once() -> list[dict[str, Any]]:
            talks = [Talk(ApiKey("anonymous")) for _ in range(6)]
            return await asyncio.gather(*(answer(service, HELLO, talk) for talk in talks))

        found = asyncio.run_coroutine_threadsafe(all_at_once(), server.loop).result()
        kinds = Counter((reply["t"], reply.get("code")) for reply in found)
        assert kinds == {("welcome", None): 2, ("error", "sessions_full"): 4}
        assert len(service.sessions) == 2


def test_a_session_does_not_end_while_it_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease ends without requests, and not because a pass takes longer than the lease."""
    with running_server(verify=VerifySettings(lease=10.0, park=5.0)) as server:
        service, now = service_of(server), [0.0]
        service._clock = lambda: now[0]

        async def one_long_answer() -> tuple[int, int, dict[str, Any], int, int]:
            talk, may_end = Talk(ApiKey("anonymous")), asyncio.Event()

            async def slow(session: Any, message: dict[str, Any]) -> dict[str, Any]:
                await may_end.wait()
                return {"t": "pong"}

            monkeypatch.setattr(service, "_ping", slow)
            await answer(service, HELLO, talk)
            await answer(service, OPEN | {"plain": False}, talk)
            asked = asyncio.create_task(answer(service, {"t": "ping", "id": 2}, talk))
            await asyncio.sleep(0)
            now[0] += 11.0
            await service.sweep()
            during, parked = len(service.sessions), service.counts["parked"]
            may_end.set()
            reply = await asked
            now[0] += 9.0
            await service.sweep()
            after = len(service.sessions)
            now[0] += 2.0
            await service.sweep()
            return during, parked, reply, after, len(service.sessions)

        found = asyncio.run_coroutine_threadsafe(one_long_answer(), server.loop).result()
        assert found == (1, 0, {"t": "pong", "id": 2}, 1, 0), "the lease is counted from the answer on"


def test_texts_that_are_refused_leave_no_entry_in_the_metrics(server: Running) -> None:
    service = service_of(server)
    (meter,) = server.server.meters.values()

    async def refused() -> list[str]:
        talk = Talk(ApiKey("anonymous"))
        await answer(service, HELLO, talk)
        wrong = [{"regex": "(" * 50}, {"grammar": "root ::="}, {"stop": [""]}]
        return [
            (await answer(service, OPEN | {"plain": place == 0, "id": place + 1, "params": params}, talk))["t"]
            for place, params in enumerate(wrong)
        ]

    before = dict(meter._active)
    assert asyncio.run_coroutine_threadsafe(refused(), server.loop).result() == ["error"] * 3
    assert meter._active == before


GREETING = encode({"t": "hello", "v": VERSION, "model": None})
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@contextmanager
def silent(server: Running) -> Iterator[str]:
    """URL of a connection to the server that carries nothing after the heads of request and response."""
    port, is_over = int(server.url.rpartition(":")[2]), threading.Event()

    def carry_heads() -> None:
        with listener.accept()[0] as near, socket.create_connection(("127.0.0.1", port)) as far:
            for source, target in ((near, far), (far, near)):
                head = b""
                while b"\r\n\r\n" not in head and (part := source.recv(4096)):
                    head += part
                target.sendall(head)
            is_over.wait()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=carry_heads, daemon=True)
        thread.start()
        try:
            yield f"remote:http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            is_over.set()
            thread.join()


@pytest.mark.parametrize("transport", ["websocket", "post"])
def test_a_session_ends_with_its_model(server: Running, transport: str) -> None:
    """A command that is over does not count among the sessions until its lease ends."""
    service: Any = server.server.verify
    llm = LLM(f"remote:{server.url}?transport={transport}", "suffix")
    assert len(llm.generate("The quick brown", GREEDY)[0].token_ids) == 8
    assert len(service.sessions) == 1
    del llm
    gc.collect()
    wait_for(lambda: not service.sessions)


def test_a_server_that_stops_to_answer_is_noticed_by_pings(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with silent(server) as name:
        transport = WebSocketTransport(RemoteAddress.parse(name), None, timeout=600.0, silence=0.2)
        with pytest.raises(ConnectionLostError, match="ping timeout"):
            transport.exchange(GREETING)
        transport.close()
    assert "websocket" not in " ".join(record.name for record in caplog.records), "no traceback on the terminal"


def test_a_port_that_accepts_and_never_answers_is_noticed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = RemoteAddress.parse(f"remote:http://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(ConnectionLostError, match="no connection"):
            WebSocketTransport(address, None, timeout=600.0, silence=0.1)


def test_the_end_of_a_session_waits_for_no_reply_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "FAREWELL", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = RemoteAddress.parse(f"remote:http://127.0.0.1:{listener.getsockname()[1]}")
        transport = PostTransport(address, None, timeout=600.0)
        transport.hasten()
        with pytest.raises(ConnectionLostError, match="timed out"):
            transport.exchange(GREETING)


def test_a_shorter_wait_notices_sooner() -> None:
    assert [Patience(total=total).silence for total in (60.0, 9.0, 1.0)] == [10.0, 3.0, 2.0]


def test_chat_with_a_model_of_a_server(
    server: Running, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for draft in ("suffix", "none"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\n")))
        options = ["--max-tokens", "12", "--temperature", "0.8", "--seed", "3", "--ignore-eos", "--draft", draft]
        assert run(["chat", f"remote:{server.url}", *options]) == 0
        texts.append(capfd.readouterr().out)
    assert texts[0] == texts[1] != ""


def test_the_automatic_drafter_of_a_device_has_a_reason(server: Running, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", f"remote:{server.url}", "ab", "--no-chat", "--max-tokens", "4", "--draft", "auto"]) == 0
    shown = capfd.readouterr().err
    assert (
        "draft auto: suffix (needs no training; trained drafters are not chosen for a model on a verify server" in shown
    )
    assert (Path(os.environ["DRAFTREE_CACHE"]) / "remote").is_dir()
    assert [path.name[:5] for path in (Path(os.environ["DRAFTREE_CACHE"]) / "remote").iterdir()] == ["tiny-"]


def test_commands_that_need_a_model_here_say_so(server: Running, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", f"remote:{server.url}", "--draft", "suffix"]) == 1
    assert "is a model on a verify server, and this needs a model on this machine" in capfd.readouterr().err
