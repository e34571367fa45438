"""OpenAI-compatible servers under the load of guidellm, on the same machine and prompts.

    python benchmarks/serving.py --guidellm ENV/bin/guidellm --tokenizer MODEL_FOLDER --prompts prompts.jsonl \\
        --server 'ours plain=draftree serve smollm2-135m-instruct --draft none --port {port}' \\
        --server 'llama.cpp=PYTHON benchmarks/peers/llama_server.py smollm2-bf16.gguf {port}' \\
        --streams 1 --streams 16 --requests 24 --out benchmarks/results/serving.jsonl

One server runs at a time; each is started, warmed up by a request per stream, and loaded by as many closed-loop
streams as `--streams` says (the number of clients that always have one request open). With `--repeats` the order of
servers is reversed in every second turn. Prompts are JSON lines with `prompt` and `output_tokens_count`. A row has
the generated tokens per second over the whole run, and medians and 99th percentiles of the time to first token and of
the inter-token latency, as guidellm measures them at the client.
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
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from draftree.bench.provenance import machine, now, versions

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


def answers(url: str, model: str) -> bool:
    """Whether a short chat request is answered."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status == 200
    except (OSError, urllib.error.URLError):
        return False


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
        end = time.monotonic() + READY_SECONDS
        while time.monotonic() < end and self._process.poll() is None:
            self.model = self.model or served_model(self.url) or ""
            if self.model and answers(self.url, self.model):
                return self
            time.sleep(1)
        self.__exit__()
        raise SystemExit(f"the server is not ready: see {self._log}")

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()


def load(server: Server, given: argparse.Namespace, streams: int, *, requests: int) -> dict[str, Any]:
    """One run of guidellm: its first benchmark."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [str(given.guidellm), "run", "--disable-console"]
        command += ["--backend", f"kind=openai_http,target={server.url},model={server.model}"]
        command += ["--profile", f"kind=concurrent,streams={streams}", "--constraint"]
        command += [f"kind=max_requests,count={requests}", "--data", f"kind=json_file,path={given.prompts}"]
        command += ["--tokenizer", f"kind=huggingface_auto,model={given.tokenizer}"]
        command += ["--output", f"kind=json,path={report}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **OFFLINE})
        if done.returncode or not report.exists():
            raise SystemExit(f"guidellm failed: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        found: dict[str, Any] = json.loads(report.read_text("utf-8"))["benchmarks"][0]
        return found


OFFLINE = {"HF_HUB_OFFLINE": "1"}


def row_of(name: str, streams: int, repeat: int, found: dict[str, Any]) -> dict[str, Any]:
    """The figures that matter."""
    metrics, totals = found["metrics"], found["metrics"]["request_totals"]
    tokens = metrics["output_token_count"]["successful"]["total_sum"]
    times = {}
    for key in ("time_to_first_token_ms", "inter_token_latency_ms"):
        own = metrics[key]["successful"]
        times[key] = {"median": round(own["median"], 1), "p99": round(own["percentiles"]["p99"], 1)}
    return {
        "server": name,
        "streams": streams,
        "repeat": repeat,
        "requests": totals["successful"],
        "failed": totals["errored"],
        "output_tokens": tokens,
        "seconds": round(found["duration"], 2),
        "tokens_per_second": round(tokens / found["duration"], 1),
        **times,
    }


def main() -> int:
    """Run all servers at all loads; prints rows as JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", action="append", required=True, help="NAME=COMMAND with {port}")
    parser.add_argument("--guidellm", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder by which guidellm counts tokens")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--streams", type=int, action="append", default=[])
    parser.add_argument("--requests", type=int, default=24, help="requests of a run; at least twice the streams")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--model", help="name of the model in requests; the first that a server lists if not given")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = [{"date": now(), "machine": machine(torch.device("cpu")), "versions": versions()}]
    servers = [text.split("=", 1) for text in given.server]
    for repeat in range(given.repeats):
        for name, command in servers if repeat % 2 == 0 else servers[::-1]:
            with Server(command, Path(f"serving-{name.replace(' ', '-')}.log"), given.model) as server:
                for streams in given.streams or [1, 16]:
                    load(server, given, streams, requests=streams)
                    count = max(given.requests, 2 * streams)
                    rows.append(row_of(name, streams, repeat, load(server, given, streams, requests=count)))
                    print(json.dumps(rows[-1]), flush=True)
    if given.out is not None:
        given.out.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return int(any(row.get("failed") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
