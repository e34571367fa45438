"""Good, bad, slow and vanishing clients at a running `draftree serve`, for a given time.

    python benchmarks/soak_server.py smollm2-135m-instruct --draft suffix --seconds 1800 --clients 16

Starts the server as a process of its own. Every text of a good client is compared with the one that the same request
had alone, before the load. At the end nothing may run or wait, and open slots, threads, sockets and memory must be
what they were after a warm-up. Prints JSON; exit status 1 if a text was wrong, a status was unexpected, or something
leaked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
from soak_clients import Soak

MEMORY_SLACK_KIB = 48 * 1024
WARM_UP_SHARE, PARTS = 0.1, 9


def free_port() -> int:
    """A port that is free now."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def resources(process: int, http: httpx.Client) -> dict[str, int]:
    """Threads, sockets and memory in KiB of the server, and its running and waiting requests and open slots."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    links = [link.readlink() for link in Path(f"/proc/{process}/fd").iterdir() if link.is_symlink()]
    metrics = [line.rsplit(" ", 1) for line in http.get("/metrics").text.splitlines() if not line.startswith("#")]
    slots = sum(float(value) for name, value in metrics if name.startswith("draftree_slots_open"))
    queue = http.get("/draftree/status").json()["queue"]
    return {
        "threads": int(lines["Threads"]),
        "sockets": sum(str(link).startswith("socket:") for link in links),
        "memory_kib": int(lines["VmRSS"].split()[0]),
        "slots": int(slots),
        "running": queue["running"],
        "waiting": queue["waiting"],
    }


def leaks(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """What did not come back to where it was."""
    found = [name for name in ("running", "waiting") if after[name]]
    found += [name for name in ("threads", "sockets", "slots") if after[name] > before[name] + 2]
    return found + ["memory_kib"] * (after["memory_kib"] > before["memory_kib"] + MEMORY_SLACK_KIB)


async def run(given: argparse.Namespace, url: str, process: int) -> dict[str, Any]:
    """Warm up, load, and look at what is left."""
    soak = Soak(url, given.model, given.requests)
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        await soak.learn(client)

    async def load(seconds: float, first_seed: int) -> None:
        until = time.monotonic() + seconds
        await asyncio.gather(*(soak.client(first_seed + index, until) for index in range(given.clients)))
        await asyncio.sleep(given.settle)

    memory: list[int] = []
    with httpx.Client(base_url=url, timeout=60) as http:
        await load(WARM_UP_SHARE * given.seconds, 1000)
        before = resources(process, http)
        for part in range(PARTS):
            await load((1 - WARM_UP_SHARE) * given.seconds / PARTS, part * given.clients)
            after = resources(process, http)
            memory.append(after["memory_kib"])
    problems = soak.problems + [f"{name} did not come back" for name in leaks(before, after)]
    return {
        "counts": dict(soak.counts),
        "before": before,
        "memory_kib": memory,
        "after": after,
        "problems": problems,
    }


def main() -> int:
    """Start a server, load it and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft", default="suffix")
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--requests", type=int, default=24, help="different requests of good clients")
    parser.add_argument("--settle", type=float, default=5, help="seconds between the load and the look at resources")
    given = parser.parse_args()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    code = "from draftree.cli.main import main; main()"
    command = [sys.executable, "-c", code, "serve", given.model, "--draft", given.draft, "--port", str(port)]
    command += ["--body-timeout", "5"]
    with Path("soak_server.log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            with httpx.Client(base_url=url) as http:
                wait_until_ready(http, server)
            found = asyncio.run(run(given, url, server.pid))
        finally:
            server.send_signal(signal.SIGTERM)
            status = server.wait(60)
    found["exit_status_after_SIGTERM"] = status
    if status:
        found["problems"].append(f"the server ended with {status}")
    print(json.dumps(found, indent=1))
    return bool(found["problems"])


def wait_until_ready(http: httpx.Client, server: subprocess.Popen[Any]) -> None:
    """Return once the models are loaded."""
    while server.poll() is None:
        try:
            if http.get("/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise SystemExit("the server ended: see soak_server.log")


if __name__ == "__main__":
    raise SystemExit(main())
