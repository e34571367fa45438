"""OpenAI-compatible servers under the load of guidellm, on the same machine and prompts.

    python benchmarks/serving.py --guidellm ENV/bin/guidellm --tokenizer MODEL_FOLDER --prompts prompts.jsonl \\
        --server 'ours plain=draftree serve smollm2-135m-instruct --draft none --port {port}' \\
        --server 'llama.cpp=PYTHON benchmarks/peers/llama_server.py smollm2-bf16.gguf {port}' \\
        --streams 1 --streams 16 --rate 0.5 --rate 2 --out benchmarks/results/serving.jsonl
    python benchmarks/serving.py --table benchmarks/results/serving.jsonl

One server runs at a time; each is started, warmed up by simultaneous requests, loaded, and stopped. A load is a number
of closed-loop streams (`--streams`: clients that always have one request open) or a constant number of requests per
second (`--rate`). In every repeat another server comes first. Rows are appended to `--out` immediately.

`--prompts` has a JSON object with `prompt` per line. The loads of a started server take successive parts of the file
and the warm-up takes its end, so no request finds its prompt in a prefix cache, and the prompts of a load are the same
for all servers. A request asks for `--tokens` tokens at temperature 0 and sets `ignore_eos`. A server named by
`--no-ignore-eos` refuses that field: it has to serve a copy of the model whose generation settings have no end of text.

A row has the generated tokens per second of the whole run, and medians and 99th percentiles of the time to first
token, of the inter-token latency (the mean of each request, weighted by its tokens) and of the latency of requests, as
guidellm measures them at the client.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from guidellm_loads import Client, Load, loads_of, parts_of, row_of, table_of

from draftree.loading.provenance import machine, now, versions

READY_SECONDS = 600.0


def free_port() -> int:
    """A port that is free now."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def served_model(url: str) -> str | None:
    """The first model of a server that answers; None if it does not answer yet."""
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
            models = json.load(answer)["data"]
    except (OSError, urllib.error.URLError, ValueError, KeyError):
        return None
    return str(models[0]["id"]) if models else None


def answers(url: str, model: str, prompt: str = "Hi", *, tokens: int = 4) -> bool:
    """Whether a chat request is answered.

    Raises:
        SystemExit: the request is refused.
    """
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "temperature": 0}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status == 200
    except urllib.error.HTTPError as refusal:
        if refusal.code in (400, 401, 403, 404, 422):
            raise SystemExit(f"the server refuses a chat request: {refusal.read().decode()}") from None
        return False
    except (OSError, urllib.error.URLError):
        return False


def warm_up(url: str, model: str, prompts: Sequence[str]) -> None:
    """Send all prompts at the same time, each for 16 tokens.

    Raises:
        SystemExit: a request failed.
    """
    with ThreadPoolExecutor(len(prompts)) as pool:
        if not all(pool.map(lambda prompt: answers(url, model, prompt, tokens=16), prompts)):
            raise SystemExit("a request of the warm-up failed: see the log of the server")


class Server:
    """A server as a process; ends with the `with` block.

    Args:
        command: shell words, `{port}` is replaced.
        log: file of its output.
        model: name of the model in requests; None for the first that the server lists.
    """

    def __init__(self, command: str, log: Path, model: str | None) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._words = shlex.split(command.replace("{port}", str(port)))
        self._log, self.model = log, model or ""

    def __enter__(self) -> Server:
        with self._log.open("w") as log:
            self._process = subprocess.Popen(self._words, stdout=log, stderr=log, start_new_session=True)
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wait(self) -> None:
        end = time.monotonic() + READY_SECONDS
        while time.monotonic() < end and self._process.poll() is None:
            self.model = self.model or served_model(self.url) or ""
            if self.model and answers(self.url, self.model):
                return
            time.sleep(1)
        raise SystemExit(f"the server is not ready: see {self._log}")

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()


def loads_from(given: argparse.Namespace) -> list[Load]:
    """The loads that the command line names; 1 and 16 streams if it names none."""
    streams = given.streams or ([] if given.rate else [1, 16])
    return loads_of(
        streams, given.rate, requests=given.requests, per_stream=given.requests_per_stream, seconds=given.seconds
    )


def measure(given: argparse.Namespace, write: Callable[[dict[str, Any]], None]) -> None:
    """Run all servers at all loads."""
    client = Client(given.guidellm, given.tokenizer, given.tokens)
    prompts = [json.loads(line)["prompt"] for line in given.prompts.read_text("utf-8").splitlines()]
    loads = loads_from(given)
    parts, first = parts_of(prompts, loads, warm_up=max([16, *given.streams]))
    named = dict(text.split("=", 1) for text in given.version)
    servers = [text.split("=", 1) for text in given.server]
    for repeat in range(given.first_repeat, given.first_repeat + given.repeats):
        turn = repeat % len(servers)
        for name, command in servers[turn:] + servers[:turn]:
            with Server(command, given.logs / f"serving-{name.replace(' ', '-')}.log", given.model) as server:
                warm_up(server.url, server.model, first)
                for load, part in zip(loads, parts, strict=True):
                    field = name not in given.no_ignore_eos
                    found = client.run(load, part, url=server.url, model=server.model, ignore_eos=field)
                    about = {"server": name, "version": named.get(name), "repeat": repeat}
                    write({**about, **row_of(load, found), "prompts": given.prompts.stem})


def main() -> int:
    """Run all servers at all loads and print rows as JSON lines, or print the table of a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", action="append", default=[], help="NAME=COMMAND with {port}")
    parser.add_argument("--version", action="append", default=[], help="NAME=VERSION of a server, for its rows")
    parser.add_argument("--no-ignore-eos", action="append", default=[], metavar="NAME")
    parser.add_argument("--guidellm", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="folder by which guidellm counts tokens")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--streams", type=int, action="append", default=[])
    parser.add_argument("--rate", type=float, action="append", default=[], help="requests per second")
    parser.add_argument("--requests", type=int, default=12, help="requests of a load of streams, or more")
    parser.add_argument("--requests-per-stream", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20, help="how long requests of a rate arrive")
    parser.add_argument("--tokens", type=int, default=64, help="generated tokens of a request")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--first-repeat", type=int, default=0, help="number of the first repeat, to continue a file")
    parser.add_argument("--model", help="name of the model in requests; the first that a server lists if not given")
    parser.add_argument("--logs", type=Path, default=Path(), help="folder of the logs of the servers")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, nargs="+", help="files whose rows are tabulated; nothing is measured")
    given = parser.parse_args()
    if given.table:
        lines = [json.loads(line) for file in given.table for line in file.read_text("utf-8").splitlines()]
        print(table_of([line for line in lines if "server" in line]))
        return 0
    if not (given.server and given.guidellm and given.tokenizer and given.prompts):
        parser.error("a measurement needs --server, --guidellm, --tokenizer and --prompts")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers are stopped, too
    failed = 0

    def write(row: dict[str, Any]) -> None:
        nonlocal failed
        failed += row.get("errors", 0)
        print(json.dumps(row), flush=True)
        if given.out is not None:
            with given.out.open("a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")

    write({"date": now(), "machine": machine(torch.device("cpu")), "versions": versions()})
    measure(given, write)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
