"""A device that drafts for a model on a server, by round-trip time and by number of devices.

    python benchmarks/scale/end_and_cloud.py smollm2-135m-instruct --draft suffix --out results.jsonl

One process serves, this one holds the devices; between them a proxy delays every byte by half of the round trip in each
direction. Arms: `drafts` (the device drafts, the server verifies) and `streams` (no drafter: the server decodes plainly
and the device reads). Both arms take turns prompt by prompt, and their texts must be equal. Rows for round trips have
milliseconds per token of a text, its first token included, bytes per token in each direction, and the levels and nodes
that the planner drafted per round. Rows for numbers of
devices have the same for that many devices at the same time, without delay, and all tokens over all seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from soak_server import free_port, wait_until_ready

from draftree import LLM, SamplingParams
from draftree.core.tree import depths
from draftree.core.types import RoundRecord
from draftree.lab.bench.workload import read_workload
from draftree.loading.provenance import machine, now, versions
from draftree.remote.target import RemoteModel


def shown_spec(draft: str) -> str:
    """A spec without the folders of its models."""
    return re.sub(r"(?<=:)/[^,+]*/", "", draft)


class DelayingProxy:
    """Forwards connections; every byte leaves half a round trip after it arrived.

    Args:
        url: of the server.
        round_trip: seconds that both directions add together.
    """

    def __init__(self, url: str, round_trip: float) -> None:
        parts = urlsplit(url)
        self._target, self._delay = (parts.hostname, parts.port), round_trip / 2
        self.bytes = [0, 0]
        """Bytes up and down, headers of WebSocket frames included."""
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> DelayingProxy:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._started.set()
        await self._stop.wait()
        server.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(*self._target)
        await asyncio.gather(
            self._pump(reader, there_writer, 0), self._pump(there_reader, writer, 1), return_exceptions=True
        )

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, direction: int) -> None:
        loop = asyncio.get_running_loop()
        while data := await source.read(65536):
            self.bytes[direction] += len(data)
            loop.call_later(self._delay, sink.write, data)
        loop.call_later(self._delay, sink.close)


@contextmanager
def served(model: str, options: Sequence[str]) -> Iterator[str]:
    """A verify server in a process of its own; yields its URL."""
    port = free_port()
    command = [sys.executable, "-m", "draftree", "verify-server", model, "--draft", "none", "--port", str(port)]
    process = subprocess.Popen([*command, *options], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url) as http:
            wait_until_ready(http, process)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def prompts(count: int, path: Path | None) -> list[str]:
    """Texts of a workload; None for the shipped one."""
    workload = read_workload() if path is None else read_workload(path)
    return [task.text[:600] for task in workload.tasks if task.text][:count]


def text_of(llm: LLM, prompt: str, given: argparse.Namespace) -> tuple[list[int], float, tuple[int, int]]:
    """Tokens of a text, its seconds, and bytes of its rounds."""
    params = SamplingParams(max_tokens=given.tokens, temperature=given.temperature, seed=1, ignore_eos=True)
    model = llm.model
    assert isinstance(model, RemoteModel)
    latency = model.link.latency
    before = latency.bytes_up, latency.bytes_down
    start = time.perf_counter()
    (found,) = llm.generate(prompt, params)
    seconds = time.perf_counter() - start
    return list(found.token_ids), seconds, (latency.bytes_up - before[0], latency.bytes_down - before[1])


def by_round_trip(url: str, given: argparse.Namespace, facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows for every round trip and arm."""
    texts = prompts(given.prompts, given.file)
    for milliseconds in given.rtt:
        with DelayingProxy(url, milliseconds / 1000) as proxy:
            drafts = _Drafts()
            arms = {
                "drafts": LLM(f"remote:{proxy.url}", given.draft, plan=given.plan, on_round=drafts),
                "streams": LLM(f"remote:{proxy.url}", "none"),
            }
            with closing(_Devices(arms.values())):
                for llm in arms.values():
                    text_of(llm, texts[0], given)
                found: dict[str, list[tuple[list[int], float, tuple[int, int]]]] = {name: [] for name in arms}
                for place, prompt in enumerate(texts):
                    for name in list(arms) if place % 2 else list(arms)[::-1]:
                        found[name].append(text_of(arms[name], prompt, given))
                is_equal = [one[0] for one in found["drafts"]] == [one[0] for one in found["streams"]]
                for name, runs in found.items():
                    tokens = sum(len(run[0]) for run in runs)
                    yield facts | {
                        "part": "round trip",
                        "rtt_ms": milliseconds,
                        "arm": name,
                        "ms_per_token": 1000 * sum(run[1] for run in runs) / tokens,
                        "ms_per_token_by_prompt": [1000 * run[1] / len(run[0]) for run in runs],
                        "bytes_up_per_token": sum(run[2][0] for run in runs) / tokens,
                        "bytes_down_per_token": sum(run[2][1] for run in runs) / tokens,
                        "equal": is_equal,
                        **(drafts.means() if name == "drafts" else {}),
                        "report": arms[name].model.note,
                    }


class _Drafts:
    """Means of the drafts of all rounds. Called with every round."""

    def __init__(self) -> None:
        self._levels: list[int] = []
        self._nodes: list[int] = []

    def __call__(self, record: RoundRecord) -> None:
        for row in record.sequences:
            self._levels.append(max(depths(row.tree.parents), default=0))
            self._nodes.append(len(row.tree))

    def means(self) -> dict[str, float]:
        """Levels and nodes per round; of the last half of the rounds, too, when the planner has learned."""
        last = self._levels[len(self._levels) // 2 :]
        found = {"levels": self._levels, "nodes": self._nodes, "levels_of_last_half": last}
        return {f"drafted_{name}": round(statistics.fmean(values), 2) for name, values in found.items() if values}


class _Devices:
    """Closes the sessions of several devices."""

    def __init__(self, llms: Any) -> None:
        self._llms = list(llms)

    def close(self) -> None:
        """End all sessions."""
        for llm in self._llms:
            llm.model.disconnect()


def by_devices(url: str, given: argparse.Namespace, facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows for every number of devices and arm."""
    texts = prompts(max(given.devices, default=1), given.file)
    for count in given.devices:
        for name, draft in (("streams", None), ("drafts", given.draft)):
            llms = [LLM(f"remote:{url}", draft) for _ in range(count)]
            with closing(_Devices(llms)):
                each: list[float] = [0.0] * count
                barrier = threading.Barrier(count + 1)

                def run(place: int, llms: list[LLM] = llms, each: list[float] = each, barrier: Any = barrier) -> None:
                    barrier.wait()
                    for _ in range(given.repeats):
                        tokens, seconds, _ = text_of(llms[place], texts[place % len(texts)], given)
                        each[place] += 1000 * seconds / len(tokens) / given.repeats

                threads = [threading.Thread(target=run, args=(place,)) for place in range(count)]
                for thread in threads:
                    thread.start()
                barrier.wait()
                start = time.perf_counter()
                for thread in threads:
                    thread.join()
                seconds = time.perf_counter() - start
            yield facts | {
                "part": "devices",
                "devices": count,
                "arm": name,
                "ms_per_token": statistics.median(each),
                "ms_per_token_by_device": each,
                "tokens_per_second": count * given.repeats * given.tokens / seconds,
            }


def main() -> None:
    """Measure and write rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft", default="suffix")
    parser.add_argument("--plan", help="planner of the device; auto by default")
    parser.add_argument("--rtt", type=float, nargs="*", default=[0, 20, 50, 100, 200], help="milliseconds")
    parser.add_argument("--devices", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--file", type=Path, help="a workload, as for draftree bench run")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--server-option", action="append", default=[], help="such as --server-option=--threads=1")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    facts = {
        "model": given.model,
        "draft": shown_spec(given.draft),
        "plan": given.plan,
        "tokens": given.tokens,
        "prompts": given.prompts,
        "temperature": given.temperature,
        "server_options": given.server_option,
        "machine": machine(torch.device("cpu")),
        "versions": versions(),
        "time": now(),
    }
    with served(given.model, given.server_option) as url:
        for row in (*by_round_trip(url, given, facts), *by_devices(url, given, facts)):
            shown = {key: value for key, value in row.items() if key not in facts}
            print(json.dumps(shown), flush=True)
            if given.out is not None:
                with given.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
