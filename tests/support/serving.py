"""A server with a tiny random model on a free port, in a thread of the test. Not a test itself."""

from __future__ import annotations

import asyncio
import functools
import json
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import torch
import uvicorn
from transformers import AutoConfig, AutoModelForCausalLM

from draftree import LLM, AsyncLLM
from draftree.serve.access import KeyRing
from draftree.serve.app import create_app
from draftree.serve.pool import ModelPool, ServedModel
from draftree.serve.server import Server
from draftree.serve.settings import ModelChoice, ServerSettings
from draftree.serve.verify import VerifySettings
from text_backends import byte_level

NAME, ALIAS = "tiny", "tiny-alias"
CONTEXT = 512
START_SECONDS = 300.0
HTTP = httpx.Client(timeout=600, limits=httpx.Limits(max_keepalive_connections=0))
"""A client of all servers, which reads the certificates of authorities once and keeps no connection."""


@functools.cache
def tiny_tokenizer() -> Any:
    return byte_level()


@functools.cache
def tiny_model(seed: int = 1, context: int = CONTEXT) -> Any:
    """A random model with a few likely tokens at each position, and a real tokenizer with a chat template."""
    tokenizer = tiny_tokenizer()
    config = AutoConfig.for_model(
        "llama",
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() > 1:
                parameter.copy_(
                    torch.randn(parameter.shape, generator=generator) * (0.75 if "lm_head" in name else 0.25)
                )
    return model.eval()


def tiny_llm(draft: Any = "ngram", **options: Any) -> LLM:
    """The library's object with the served model."""
    return LLM(tiny_model(), draft, tokenizer=tiny_tokenizer(), **options)


@functools.cache
def plain_llm() -> LLM:
    """The library's object without a drafter, for texts to compare with."""
    return tiny_llm(None)


def tiny_async_llm(draft: Any = "ngram", **options: Any) -> AsyncLLM:
    return AsyncLLM(tiny_model(), draft, tokenizer=tiny_tokenizer(), **options)


def settings(**changes: Any) -> ServerSettings:
    return ServerSettings.of((ModelChoice(NAME, "tiny", (ALIAS,)),), **changes)


@dataclass(frozen=True)
class Running:
    """A running server: its URL, such as http://127.0.0.1:8000, and its parts in this process."""

    url: str
    server: Server
    pool: ModelPool
    app: Any
    loop: asyncio.AbstractEventLoop
    """Of the server's thread."""

    @property
    def llm(self) -> AsyncLLM:
        """Of the first model."""
        return next(iter(self.pool)).llm


@contextmanager
def running_server(
    models: Sequence[ServedModel] | None = None,
    *,
    draft: Any = "ngram",
    settings_given: ServerSettings | None = None,
    verify: VerifySettings | None = None,
    keys: KeyRing | None = None,
    tls: tuple[Path, Path] | None = None,
    **options: Any,
) -> Iterator[Running]:
    """Run a server until the block ends.

    Args:
        models: the served models; None for the tiny one, named `tiny` and `tiny-alias`.
        draft: drafter of the tiny model.
        settings_given: settings of the server.
        verify: limits of devices that draft; None for a server without them.
        keys: API keys.
        tls: files of the certificate and of its key; None for HTTP.
        **options: of the tiny model's `AsyncLLM`.
    """
    if models is None:
        models = [ServedModel(NAME, tiny_async_llm(draft, **options), (ALIAS,))]
    pool = ModelPool(models)
    app = create_app(settings_given or settings(), pool, keys=keys, verify=verify)
    with _serving(app, "auto" if verify is None else "websockets-sansio", tls) as (url, loop):
        yield Running(url, app.state.server, pool, app, loop)


def self_signed(folder: Path, name: str = "server") -> tuple[Path, Path]:
    """A certificate for this machine that signs itself, and its key."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    return certificate, key


@contextmanager
def slow_rounds(llm: AsyncLLM, *, seconds: float) -> Iterator[None]:
    """Let every round take longer, so that a request can be met while it runs."""
    stop = llm.on_round(lambda record: time.sleep(seconds))
    try:
        yield
    finally:
        stop()


def send(server: Running, path: str, body: dict[str, Any]) -> socket.socket:
    """Send a request and keep its connection."""
    url, content = urlsplit(server.url), json.dumps(body).encode()
    assert url.hostname is not None
    connection = socket.create_connection((url.hostname, url.port or 80))
    headers = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
    head = f"POST {path} HTTP/1.1\r\n{headers}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """Serve an ASGI application in a thread until the block ends; yields its URL."""
    with _serving(app) as (url, _):
        yield url


@contextmanager
def _serving(
    app: Any, ws: Any = "auto", tls: tuple[Path, Path] | None = None
) -> Iterator[tuple[str, asyncio.AbstractEventLoop]]:
    bound, loop = socket.create_server(("127.0.0.1", 0)), asyncio.new_event_loop()
    secure: dict[str, Any] = {} if tls is None else {"ssl_certfile": tls[0], "ssl_keyfile": tls[1]}
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_level="warning",
            lifespan="on",
            timeout_graceful_shutdown=5,
            timeout_keep_alive=600,
            ws=ws,
            **secure,
        )
    )

    def run() -> None:
        loop.run_until_complete(server.serve(sockets=[bound]))

    thread = threading.Thread(target=run, name="test-server", daemon=True)
    thread.start()
    try:
        _wait_until_started(server, thread)
        yield f"{'https' if secure else 'http'}://127.0.0.1:{bound.getsockname()[1]}", loop
    finally:
        server.should_exit = True
        thread.join(START_SECONDS)
        bound.close()
        assert not thread.is_alive(), "the server ends"
        loop.close()


def _wait_until_started(server: uvicorn.Server, thread: threading.Thread) -> None:
    pause = threading.Event()
    for _ in range(int(START_SECONDS / 0.01)):
        if server.started:
            return
        assert thread.is_alive(), "the server starts"
        pause.wait(0.01)
    raise AssertionError("the server did not start")


def events(http: httpx.Client, path: str, body: dict[str, Any]) -> Iterator[Any]:
    """The data of the events of a stream, which must end with [DONE]."""
    with http.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        assert line.startswith("data: ")
        yield json.loads(line.removeprefix("data: "))
