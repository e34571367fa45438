"""Replicas under Ray Serve on this machine: routing, killed replicas and ranks, updates, autoscaling and the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from draftree import LLM, SamplingParams
from draftree.serve.ray.options import ReplicaOptions
from draftree.serve.settings import ModelChoice, ServerSettings
from operated import free_port, is_running, wait_for
from serving import tiny_tokenizer

SECONDS = 300.0
RESOURCES: dict[str, Any] = {"cpus_per_replica": 0.1, "health_check_period": 1.0}


def save_exact_model(folder: Path) -> None:
    """Save a tiny random model for which native kernels exist: its texts do not depend on the batch."""
    tokenizer = tiny_tokenizer()
    sizes = {"hidden_size": 128, "num_hidden_layers": 8, "intermediate_size": 384, "max_position_embeddings": 2048}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = AutoConfig.for_model("llama", vocab_size=len(tokenizer), **sizes, **heads, **ids)
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class Cluster:
    """Replicas of the model in a folder.

    Args:
        folder: the model.
        port: of the HTTP server.
        changes: settings of every server.
    """

    def __init__(self, folder: Path, port: int, **changes: Any) -> None:
        self.folder, self.port, self._changes = folder, port, changes
        self.url = f"http://127.0.0.1:{port}"

    def settings(self, **changes: Any) -> ServerSettings:
        return ServerSettings.of(
            models=(ModelChoice("tiny", str(self.folder)),), port=self.port, exact=True, **self._changes | changes
        )

    def deploy(self, settings: ServerSettings, **options: Any) -> None:
        """Deploy or update the application, and wait until it runs."""
        from ray import serve

        from draftree.serve.ray.app import APP_NAME, build

        serve.run(build(settings, ReplicaOptions(**RESOURCES, **options)), name=APP_NAME, route_prefix="/")

    def replicas(self) -> list[dict[str, Any]]:
        """Id, process, threads and running sequences of each replica that responds."""
        from ray import serve

        from draftree.serve.ray.app import APP_NAME

        handle = serve.get_deployment_handle("Replica", APP_NAME)
        found = handle.broadcast("describe").results(return_exceptions=True)
        return [each for each in found if isinstance(each, dict)]

    def num_repeated(self) -> int:
        """Number of repetitions of requests since the start."""
        from ray import serve

        from draftree.serve.ray.app import APP_NAME

        facts = serve.get_deployment_handle("Ingress", APP_NAME).describe.remote().result()
        return int(facts["num_repeated"])

    def ids(self) -> set[str]:
        return {each["replica"] for each in self.replicas()}

    def kill(self, replica: str) -> None:
        """End the process of a replica without warning."""
        (pid,) = (each["pid"] for each in self.replicas() if each["replica"] == replica)
        os.kill(pid, signal.SIGKILL)


@contextmanager
def running_cluster(folder: Path, **changes: Any) -> Iterator[Cluster]:
    """Run two replicas with these settings until the block ends."""
    with warnings.catch_warnings(action="ignore"):
        import ray
        from ray import serve

        from draftree.serve.ray.app import start_ray
    cluster = Cluster(folder, free_port(), **changes)
    start_ray(ReplicaOptions(num_replicas=2, **RESOURCES), cluster.settings())
    try:
        cluster.deploy(cluster.settings(), num_replicas=2)
        yield cluster
    finally:
        serve.shutdown()
        ray.shutdown()


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
                wait_for(lambda: bool(stream.texts), "the stream has begun")
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
        wait_for(lambda: sum(each["num_running"] for each in cluster.replicas()) == 1, "the request runs")
    wait_for(lambda: sum(each["num_running"] for each in cluster.replicas()) == 0, "the replica aborts the request")


def test_a_killed_replica_loses_no_request_and_is_replaced(cluster: Cluster, url: str, library: LLM) -> None:
    wait_for(lambda: len(cluster.ids()) == 2, "two replicas run")
    seeded = [Stream(url, prompt=prompt, seed=n, temperature=0.8) for n, prompt in enumerate(PROMPTS[:4])]
    several = Stream(url, prompt=PROMPTS[4], seed=9, temperature=0.8, n=2)
    greedy = Stream(url, prompt=PROMPTS[5], temperature=0.0)
    fresh = Stream(url, prompt=PROMPTS[6], temperature=0.8, stream_options={"include_usage": True})
    streams = [*seeded, several, greedy, fresh]
    whole = {"prompt": PROMPTS[7], "seed": 21, "temperature": 0.8, "max_tokens": TOKENS}
    with ThreadPoolExecutor(12) as pool:
        running: list[Future[Any]] = [pool.submit(stream.read) for stream in streams]
        unstreamed = [pool.submit(post, url, **whole) for _ in range(4)]
        wait_for(lambda: all(stream.texts for stream in streams), "every stream has begun")
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
    wait_for(lambda: len(cluster.ids() - {victim}) == 2, "the replica is replaced")


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
            wait_for(lambda: len(cluster.ids() - before) == 2, "all replicas are new")
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
    wait_for(lambda: len(cluster.ids()) == 1, "one replica is enough without load")
    is_over = threading.Event()

    def client(number: int) -> None:
        while not is_over.is_set():
            Stream(url, prompt=PROMPTS[number], seed=1).read()

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(client, number) for number in range(4)]
        try:
            wait_for(lambda: len(cluster.ids()) == 2, "a replica is added under load")
        finally:
            is_over.set()
        for done in clients:
            done.result(SECONDS)
    wait_for(lambda: len(cluster.ids()) == 1, "a replica is removed without load")


def ranks_of(process: int) -> list[int]:
    """The other ranks of a replica: the children of all its threads that run the package."""
    threads = Path(f"/proc/{process}/task").glob("*/children")
    found = [int(one) for thread in threads for one in thread.read_text().split()]
    return [one for one in found if "draftree.parallel.children" in command_of(one)]


def command_of(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def streamed_while(cluster: Cluster, library: LLM, end: Any) -> None:
    """Stream texts from all replicas, end something of the busiest one, and compare the texts."""
    streams = [Stream(cluster.url, prompt=prompt, seed=n, temperature=0.8) for n, prompt in enumerate(PROMPTS[:4])]
    whole = {"prompt": PROMPTS[7], "seed": 21, "temperature": 0.8, "max_tokens": 300}
    with ThreadPoolExecutor(6) as pool:
        running = [pool.submit(stream.read) for stream in streams]
        unstreamed = [pool.submit(post, cluster.url, **whole) for _ in range(2)]
        wait_for(lambda: all(stream.texts for stream in streams), "every stream has begun")
        served = [stream.replica for stream in streams if not stream.is_over]
        victim = max(cluster.replicas(), key=lambda each: served.count(each["replica"]))
        end(victim)
        for future in running:
            future.result(SECONDS)
        texts = [future.result(SECONDS) for future in unstreamed]
    assert served.count(victim["replica"]) >= 1
    for stream in streams:
        assert list(stream.texts.values()) == expected(library, stream.body), stream.replica
    assert texts == [expected(library, whole)] * 2
    wait_for(lambda: len(cluster.ids() - {victim["replica"]}) == 2, "the replica is replaced")


def test_replicas_of_several_processes_lose_no_request_and_leave_none_behind(folder: Path, library: LLM) -> None:
    with running_cluster(folder, tp=2) as cluster:
        found = cluster.replicas()
        assert len({each["pid"] for each in found}) == 2
        ranks = {each["replica"]: ranks_of(each["pid"]) for each in found}
        assert [len(own) for own in ranks.values()] == [1, 1]
        body: dict[str, Any] = {"prompt": PROMPTS[0], "seed": 5, "temperature": 0.8, "max_tokens": 20}
        assert post(cluster.url, **body) == expected(library, body)
        repeated = cluster.num_repeated()
        streamed_while(cluster, library, lambda victim: os.kill(ranks[victim["replica"]][0], signal.SIGKILL))
        assert cluster.num_repeated() > repeated
        left: list[int] = []

        def kill_replica(victim: dict[str, Any]) -> None:
            left.extend(ranks_of(victim["pid"]))
            os.kill(victim["pid"], signal.SIGKILL)

        streamed_while(cluster, library, kill_replica)
        wait_for(lambda: not any(is_running(one) for one in left), "the other rank ends with its replica")
        left = [rank for each in cluster.replicas() for rank in ranks_of(each["pid"])]
        assert len(left) == 2
    wait_for(lambda: not any(is_running(one) for one in left), "no rank outlives the application")
