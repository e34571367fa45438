"""What the server costs on top of `AsyncLLM`: the same requests in turns through both.

    python benchmarks/serving_overhead.py smollm2-135m-instruct --clients 1 --clients 32

One process serves, this one holds an `AsyncLLM` with the same options and is also the client of the server. Each turn
runs all requests of so many clients, each with one open request at a time, through the library and through the server;
which goes first alternates. The client reads the event stream without parsing it, since it shares the processor. Rows
have tokens per second of both, all tokens over all seconds, prefill included; the overhead is the median over turns of
library over server, minus one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import torch
from soak_server import free_port, wait_until_ready

from draftree import AsyncLLM, SamplingParams
from draftree.lab.bench.workload import read_workload
from draftree.loading.provenance import machine, now, versions

MAX_TOKENS = 96


def prompts() -> list[str]:
    """Plain texts of the shipped workload."""
    texts = [task.text for task in read_workload().tasks if task.text]
    return [text[:600] for text in texts]


async def through_library(llm: AsyncLLM, prompt: str) -> None:
    """One request; its pieces are read and dropped."""
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)
    async for _ in llm.stream(prompt, params):
        pass


class Answer(asyncio.Protocol):
    """Reads a response to its end, and keeps its last bytes. Without a coroutine, which would wake for every event."""

    def __init__(self) -> None:
        self.tail = b""
        self.ended = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        """Read a part."""
        self.tail = (self.tail + data)[-200:]

    def connection_lost(self, exc: Exception | None) -> None:
        """End the response."""
        self.ended.set_result(None)


async def through_server(address: tuple[str, int], model: str, prompt: str) -> None:
    """The same request as a stream of server-sent events."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(content)}\r\n"
    transport, answer = await asyncio.get_running_loop().create_connection(Answer, *address)
    transport.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)
    await answer.ended
    if b"[DONE]" not in answer.tail:
        raise SystemExit(f"the stream broke off: {answer.tail!r}")


async def timed(request: Callable[[str], Awaitable[None]], texts: list[str], clients: int) -> float:
    """Tokens per second of all clients together."""
    queue = list(texts)

    async def client() -> None:
        while queue:
            await request(queue.pop())

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return len(texts) * MAX_TOKENS / (time.perf_counter() - start)


async def compare(given: argparse.Namespace, port: int) -> list[dict[str, Any]]:
    """Rows for every number of clients."""
    rows = []
    ways = {
        "library": lambda prompt: through_library(llm, prompt),
        "server": lambda prompt: through_server(("127.0.0.1", port), given.model, prompt),
    }
    async with AsyncLLM(given.model, given.draft, prefix_cache_size=0) as llm:
        for clients in given.clients or [1]:
            texts = (prompts() * clients)[: max(given.requests, clients)]
            speeds: dict[str, list[float]] = {name: [] for name in ways}
            for name in ways:
                await timed(ways[name], texts[:clients], clients)
            for turn in range(given.turns):
                for name in list(ways) if turn % 2 == 0 else list(ways)[::-1]:
                    await llm.forget()
                    speeds[name].append(await timed(ways[name], texts, clients))
            ratios = [ours / served for ours, served in zip(speeds["library"], speeds["server"], strict=True)]
            rows.append(
                {
                    "clients": clients,
                    "requests": len(texts),
                    "draft": given.draft,
                    **{f"{name}_tokens_per_second": [round(s, 1) for s in found] for name, found in speeds.items()},
                    "overhead_percent": round(100 * (statistics.median(ratios) - 1), 1),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> int:
    """Start a server, measure in turns, print rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft", default="none")
    parser.add_argument("--clients", type=int, action="append", default=[])
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    port = free_port()
    command = [sys.executable, "-c", "from draftree.cli.main import main; main()", "serve", given.model]
    command += ["--draft", given.draft, "--port", str(port), "--prefix-cache-size", "0"]
    with Path("serving_overhead.log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}") as http:
            wait_until_ready(http, server)
        rows = asyncio.run(compare(given, port))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    if given.out is not None:
        header = {"date": now(), "machine": machine(torch.device("cpu")), "versions": versions()}
        given.out.write_text("".join(json.dumps(row) + "\n" for row in [header, *rows]), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
