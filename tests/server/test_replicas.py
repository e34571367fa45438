"""Two replicas under Ray Serve on this machine: routing, a killed replica, updates, autoscaling and the end.

One cluster serves all tests of this file; it takes about half a minute to start.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from draftree import LLM, SamplingParams
from replicas import SECONDS, Cluster, free_port, running_cluster, save_exact_model, until

pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray: pip install 'draftree[ray]'"),
]

TOKENS = 500
PROMPTS = [f"{number} is the number of this prompt, " * 3 for number in range(8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_exact_model(path)
    return path


@pytest.fixture(scope="module")
def library(folder: Path) -> LLM:
    return LLM(str(folder), "suffix", exact=True)


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Cluster]:
    with running_cluster(folder) as running:
        yield running


@pytest.fixture
def url(cluster: Cluster) -> str:
    return cluster.url


class Stream:
    """One streamed completion: its text so far, and the replica that began it."""

    def __init__(self, url: str, **body: Any) -> None:
        self.url = url
        self.body = {"model": "tiny", "max_tokens": TOKENS, "ignore_eos": True, "stream": True} | body
        self.texts: dict[int, str] = {}
        self.events: list[dict[str, Any]] = []
        self.replica = ""
        self.is_over = False

    def read(self) -> Stream:
        with httpx.stream("POST", f"{self.url}/v1/completions", json=self.body, timeout=SECONDS) as response:
            assert response.status_code == 200, response.read()
            self.replica = response.headers["x-draftree-replica"]
            for line in response.iter_lines():
                self._take(line)
        self.is_over = True
        return self

    def _take(self, line: str) -> None:
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            self.events.append(event)
            for choice in event["choices"]:
                self.texts[choice["index"]] = self.texts.get(choice["index"], "") + choice["text"]


def expected(library: LLM, body: dict[str, Any]) -> list[str]:
    params = {key: body[key] for key in ("seed", "temperature", "max_tokens", "n") if key in body}
    return [done.text for done in library.generate(body["prompt"], SamplingParams(ignore_eos=True, **params))]


def post(url: str, **body: Any) -> list[str]:
    whole = {"model": "tiny", "max_tokens": TOKENS, "ignore_eos": True} | body
    response = httpx.post(f"{url}/v1/completions", json=whole, timeout=SECONDS)
    assert response.status_code == 200, response.text
    return [choice["text"] for choice in response.json()["choices"]]


def test_the_command_serves_replicas_and_finishes_running_requests_at_the_end(folder: Path, library: LLM) -> None:
    port = free_port()
    command = [sys.executable, "-m", "draftree", "serve", f"tiny={folder}", "--exact", "--replicas", "2", "--port"]
    with subprocess.Popen([*command, str(port)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            assert server.stdout is not None
            lines = iter(server.stdout.readline, "")
            assert any(line.startswith("serving tiny (auto) at http://127.0.0.1") for line in lines)
            stream = Stream(f"http://127.0.0.1:{port}", prompt=PROMPTS[0], seed=3, max_tokens=1500)
            with ThreadPoolExecutor(2) as pool:
                reading = pool.submit(stream.read)
                until(lambda: bool(stream.texts), "the stream has begun")
                server.send_signal(signal.SIGTERM)
                # the output is read, so that the pipe does not fill up
                list(lines)
                reading.result(SECONDS)
            assert list(stream.texts.values()) == expected(library, stream.body)
            assert server.wait(SECONDS) == 0
        finally:
            server.kill()


def test_metrics_are_those_of_all_replicas(cluster: Cluster, url: str) -> None:
    text = httpx.get(f"{url}/metrics", timeout=SECONDS).text
    assert "draftree_repeated_requests_total" in text
    for replica in cluster.ids():
        assert f'replica="{replica}"' in text


def test_threads_are_divided_and_texts_are_the_library_s(cluster: Cluster, url: str, library: LLM) -> None:
    found = cluster.replicas()
    assert len({each["pid"] for each in found}) == 2
    assert {each["threads"] for each in found} == {max(1, len(os.sched_getaffinity(0)) // 2)}
    body = {"prompt": PROMPTS[0], "seed": 5, "temperature": 0.8, "max_tokens": 20}
    assert post(url, **body) == expected(library, body)


def test_a_conversation_stays_with_its_replica(url: str) -> None:
    prompts = [f"Conversation {number}. " * 30 for number in range(6)]
    first = [Stream(url, prompt=prompt, max_tokens=2).read().replica for prompt in prompts]
    for turn in (1, 2):
        longer = [prompt + f"Turn {turn}. " * 10 for prompt in prompts]
        assert [Stream(url, prompt=prompt, max_tokens=2).read().replica for prompt in longer] == first


def test_errors_of_the_replica_reach_the_client(url: str) -> None:
    response = httpx.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": "x", "top_p": 7}, timeout=SECONDS)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "top_p"
    assert httpx.post(f"{url}/v1/completions", content=b"{", timeout=SECONDS).status_code == 400
    assert httpx.get(f"{url}/v1/models", timeout=SECONDS).json()["data"][0]["id"] == "tiny"
    assert httpx.get(f"{url}/nowhere", timeout=SECONDS).status_code == 404


def test_the_request_of_a_client_that_leaves_is_aborted(cluster: Cluster, url: str) -> None:
    with httpx.stream(
        "POST",
        f"{url}/v1/completions",
        json={"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 1800, "ignore_eos": True, "stream": True},
        timeout=SECONDS,
    ) as response:
        assert response.status_code == 200
        lines = response.iter_lines()  # kept: its end would close the connection
        assert next(lines).startswith("data: {")
        until(lambda: sum(each["num_running"] for each in cluster.replicas()) == 1, "the request runs")
    until(lambda: sum(each["num_running"] for each in cluster.replicas()) == 0, "the replica aborts the request")


def test_a_killed_replica_loses_no_request_and_is_replaced(cluster: Cluster, url: str, library: LLM) -> None:
    until(lambda: len(cluster.ids()) == 2, "two replicas run")
    seeded = [Stream(url, prompt=prompt, seed=n, temperature=0.8) for n, prompt in enumerate(PROMPTS[:4])]
    several = Stream(url, prompt=PROMPTS[4], seed=9, temperature=0.8, n=2)
    greedy = Stream(url, prompt=PROMPTS[5], temperature=0.0)
    fresh = Stream(url, prompt=PROMPTS[6], temperature=0.8, stream_options={"include_usage": True})
    streams = [*seeded, several, greedy, fresh]
    whole = {"prompt": PROMPTS[7], "seed": 21, "temperature": 0.8, "max_tokens": TOKENS}
    with ThreadPoolExecutor(12) as pool:
        running: list[Future[Any]] = [pool.submit(stream.read) for stream in streams]
        unstreamed = [pool.submit(post, url, **whole) for _ in range(4)]
        until(lambda: all(stream.texts for stream in streams), "every stream has begun")
        served = [stream.replica for stream in streams if not stream.is_over]
        victim = max(cluster.ids(), key=served.count)
        cluster.kill(victim)
        for future in running:
            future.result(SECONDS)
        texts = [future.result(SECONDS) for future in unstreamed]
    assert served.count(victim) >= 2
    assert cluster.num_repeated() >= 2
    for stream in (*seeded, several, greedy):
        assert list(stream.texts.values()) == expected(library, stream.body), stream.replica
    assert texts == [expected(library, whole)] * 4
    assert fresh.events[-1]["usage"]["completion_tokens"] == TOKENS
    for stream in streams:
        assert len({event["id"] for event in stream.events}) == 1
    until(lambda: len(cluster.ids() - {victim}) == 2, "the replica is replaced")


def test_a_rolling_update_under_load_loses_no_request(cluster: Cluster, url: str, library: LLM) -> None:
    before = cluster.ids()
    is_updated = threading.Event()
    answers: list[tuple[dict[str, Any], list[str]]] = []

    def client(number: int) -> None:
        turn = 0
        while not is_updated.is_set() or turn < 2:
            stream = Stream(url, prompt=PROMPTS[number], seed=turn, temperature=0.8, max_tokens=60).read()
            answers.append((stream.body, list(stream.texts.values())))
            turn += 1

    with ThreadPoolExecutor(3) as pool:
        clients = [pool.submit(client, number) for number in range(3)]
        try:
            cluster.deploy(cluster.settings(prefix_cache_size=2), num_replicas=2)
            until(lambda: len(cluster.ids() - before) == 2, "all replicas are new")
        finally:
            is_updated.set()
        for done in clients:
            done.result(SECONDS)
    assert len(answers) >= 6
    for body, texts in answers:
        assert texts == expected(library, body)


def test_replicas_are_added_under_load_and_removed_after_it(cluster: Cluster, url: str) -> None:
    delays = {"upscale_delay": 0.5, "downscale_delay": 1.0}
    cluster.deploy(
        cluster.settings(), num_replicas=None, min_replicas=1, max_replicas=2, target_ongoing_requests=1.0, **delays
    )
    until(lambda: len(cluster.ids()) == 1, "one replica is enough without load")
    is_over = threading.Event()

    def client(number: int) -> None:
        while not is_over.is_set():
            Stream(url, prompt=PROMPTS[number], seed=1).read()

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(client, number) for number in range(4)]
        try:
            until(lambda: len(cluster.ids()) == 2, "a replica is added under load")
        finally:
            is_over.set()
        for done in clients:
            done.result(SECONDS)
    until(lambda: len(cluster.ids()) == 1, "a replica is removed without load")
