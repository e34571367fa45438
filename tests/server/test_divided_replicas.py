"""Replicas under Ray Serve whose model two processes compute: texts, a killed rank, a killed replica, and the end."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from test_replicas import PROMPTS, SECONDS, Stream, expected, post

from draftree import LLM
from parallel_servers import is_running
from replicas import Cluster, running_cluster, save_exact_model, until

pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray: pip install 'draftree[ray]'"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save_exact_model(path)
    return path


@pytest.fixture(scope="module")
def library(folder: Path) -> LLM:
    return LLM(str(folder), None, exact=True)


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
        until(lambda: all(stream.texts for stream in streams), "every stream has begun")
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
    until(lambda: len(cluster.ids() - {victim["replica"]}) == 2, "the replica is replaced")


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
        until(lambda: not any(is_running(one) for one in left), "the other rank ends with its replica")
        left = [rank for each in cluster.replicas() for rank in ranks_of(each["pid"])]
        assert len(left) == 2
    until(lambda: not any(is_running(one) for one in left), "no rank outlives the application")
