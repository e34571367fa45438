"""Ends of a device's session, servers that hang, and commands on the device: chat, and those that need a model here."""

from __future__ import annotations

import gc
import io
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from draftree import LLM, AsyncLLM, SamplingParams
from draftree.cli.main import run
from draftree.remote import transport as transports
from draftree.remote.address import RemoteAddress
from draftree.remote.errors import ConnectionLostError
from draftree.remote.link import Patience
from draftree.remote.protocol import VERSION, encode
from draftree.remote.transport import PostTransport, WebSocketTransport
from draftree.serve.pool import ServedModel
from draftree.serve.verify.settings import VerifySettings
from operated import wait_for
from private_cache import private_cache
from serving import Running, running_server, tiny_model
from text_backends import byte_level
from tool_templates import HERMES

HELLO = encode({"t": "hello", "v": VERSION, "model": None})
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    llm = AsyncLLM(tiny_model(context=2048), "ngram", tokenizer=byte_level(HERMES))
    with running_server([ServedModel("tiny", llm, (), ("ngram",))], verify=VerifySettings()) as running:
        yield running


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTREE_CACHE", private_cache(tmp_path / "cache"))
    monkeypatch.delenv("DRAFTREE_API_KEY", raising=False)


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
            is_over.wait(60)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=carry_heads, daemon=True)
        thread.start()
        try:
            yield f"remote:http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            is_over.set()
            thread.join(60)


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
            transport.exchange(HELLO)
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
            transport.exchange(HELLO)


@pytest.mark.parametrize(("total", "silence"), [(60.0, 10.0), (9.0, 3.0), (1.0, 2.0)])
def test_a_shorter_wait_notices_sooner(total: float, silence: float) -> None:
    assert Patience(total=total).silence == silence


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
