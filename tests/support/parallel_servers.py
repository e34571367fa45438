"""Servers whose model several processes compute, as a user starts them. Not a test itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai

from parallel_jobs import environment
from replicas import free_port

SECONDS = 240
OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Group:
    """The processes of one server; their errors are in files.

    Args:
        processes: the launcher alone, or all ranks.
        folder: of the files `errors-0`, `errors-1` and so on.
    """

    def __init__(self, processes: Sequence[subprocess.Popen[str]], folder: Path) -> None:
        self.processes, self._folder = list(processes), folder
        self.url = ""

    @property
    def errors(self) -> str:
        return "\n".join((self._folder / f"errors-{rank}").read_text() for rank in range(len(self.processes)))

    def wait_for_url(self) -> None:
        out = self.processes[0].stdout
        assert out is not None
        found = re.search(r"http://[0-9.:]+", out.readline())
        assert found is not None, self.errors
        self.url = found[0]

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=SECONDS)

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels."""
        lines = httpx.get(f"{self.url}/metrics", timeout=SECONDS).text.splitlines()
        return sum(float(line.rsplit(maxsplit=1)[1]) for line in lines if re.match(rf"{name}[ {{]", line))

    def ended(self) -> list[int]:
        """Wait for all processes, and return their statuses."""
        return [process.wait(SECONDS) for process in self.processes]


@contextmanager
def started(commands: Sequence[Sequence[str]], folder: Path, environments: Sequence[dict[str, str]]) -> Iterator[Group]:
    """Start processes, wait for the first one's URL, and kill what is left at the end."""
    processes = []
    for place, (command, own) in enumerate(zip(commands, environments, strict=True)):
        with (folder / f"errors-{place}").open("wb") as errors:
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=own))
    group = Group(processes, folder)
    try:
        group.wait_for_url()
        yield group
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()  # torchrun ends its processes then
        for process in processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
            process.communicate()


@contextmanager
def under_torchrun(size: int, folder: Path, *arguments: str) -> Iterator[Group]:
    """A server that torchrun starts: one process here, which has `size` of its own."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    with started([[*torchrun, *serving(arguments)]], folder, [without_rank()]) as group:
        yield group


@contextmanager
def as_ranks(size: int, folder: Path, *arguments: str) -> Iterator[Group]:
    """A server whose ranks are started one by one, so that a test can kill one and see the status of each."""
    port = str(free_port())
    environments = [environment(rank, size, MASTER_PORT=port) for rank in range(size)]
    with started([[sys.executable, *serving(arguments)]] * size, folder, environments) as group:
        yield group


def without_rank() -> dict[str, str]:
    """The environment of a process that no launcher started."""
    return {name: value for name, value in environment(0, 1).items() if name not in OF_TORCHRUN}


def serving(arguments: Sequence[str]) -> list[str]:
    return ["-m", "draftree", "serve", *arguments, "--port", "0", "--dtype", "float32"]


def children(process: int) -> list[int]:
    """Return the processes that a process started."""
    return [int(one) for one in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
