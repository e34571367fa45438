"""A small HTTP server that reports load and rounds as `draftree serve` does. Not a test itself."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

STATUS: dict[str, Any] = {
    "models": [
        {
            "name": "tiny",
            "aliases": [],
            "drafts": ["ngram", "suffix"],
            "context": 2048,
            "running": 3,
            "waiting": 1,
            "tokens_per_second": 123.4,
            "acceptance_length": 2.25,
            "acceptance_rate": 0.625,
            "kernels": "native",
            "dtype": "bfloat16",
            "explain": "a draft costs little: on",
        }
    ],
    "queue": {"running": 3, "waiting": 1, "places": 4, "max_places": 32, "max_waiting": 256},
    "is_ready": True,
    "uptime_seconds": 3725.5,
    "version": "1.2.3",
}
ROUND: dict[str, Any] = {
    "number": 1,
    "model": "tiny",
    "time": 1.0,
    "seconds": {"plan": 0.001, "draft": 0.001, "score": 0.006, "verify": 0.001, "commit": 0.001, "total": 0.0105},
    "rows": 5,
    "sequences": [
        {"request_id": "r", "index": 0, "num_drafted": 4, "num_accepted": 3, "num_written": 4, "depth": 4},
        {"request_id": "s", "index": 0, "num_drafted": 0, "num_accepted": 0, "num_written": 1, "depth": 0},
    ],
}


class WatchedServer(ThreadingHTTPServer):
    """Reports `status` and a round every few milliseconds; `key` is required if it is not None."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, port: int, key: str | None) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.key = key
        self.status: Any = STATUS
        self.code = 200
        self.ended = threading.Event()
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        """Address of the server."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: WatchedServer

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if self.server.key is not None and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            self.send_error(401)
        elif self.server.code != 200:
            self.send_error(self.server.code)
        elif self.path == "/draftree/status":
            self.answer(json.dumps(self.server.status).encode())
        elif self.path == "/draftree/rounds":
            self.stream()
        else:
            self.send_error(404)

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(b": rounds\n\n")
            while not self.server.ended.wait(0.01):
                self.wfile.write(b"data: " + json.dumps(ROUND).encode() + b"\n\n")

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@contextlib.contextmanager
def watched_server(*, port: int = 0, key: str | None = None) -> Iterator[WatchedServer]:
    """A running server on the loopback interface."""
    server = WatchedServer(port, key)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.ended.set()
        server.shutdown()
        thread.join()
        server.server_close()
