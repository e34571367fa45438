"""`draftree serve --tp`: texts of one process, clients that leave, signals, and the loss of a rank."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

import forked
import replica_ranks
from cli_samples import save_tiny_model
from draftree import LLM, SamplingParams
from operated import children, free_port, is_running, wait_for
from parallel_jobs import environment
from serving import HTTP

SECONDS = 600
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
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels."""
        lines = HTTP.get(f"{self.url}/metrics").text.splitlines()
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
                process.wait(SECONDS)
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
    with started([[*forked.python(), *serving(arguments)]] * size, folder, environments) as group:
        yield group


def without_rank() -> dict[str, str]:
    """The environment of a process that no launcher started."""
    return {name: value for name, value in environment(0, 1).items() if name not in OF_TORCHRUN}


def serving(arguments: Sequence[str]) -> list[str]:
    return ["-m", "draftree", "serve", *arguments, "--port", "0", "--dtype", "float32"]


PROMPTS = ["Hello", "Hello, hello, hello", "one two one two", "abcabcabc"]
LONG = 4000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny", chat=True, context=LONG + 100)


def stream(group: Group, prompt: str, **options: Any) -> Any:
    more = {"ignore_eos": True, **options.pop("extra", {})}
    return group.client().completions.create(model="tiny", prompt=prompt, stream=True, extra_body=more, **options)


def text_of(chunks: Any) -> str:
    return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)


def test_requests_signals_and_clients_that_leave(folder: Path, tmp_path: Path) -> None:
    options = [{"max_tokens": 40, "temperature": 0.7 * (place % 2), "seed": place} for place in range(len(PROMPTS))]
    alone = LLM(folder, "none", dtype="float32", device="cpu")
    params = [SamplingParams(**one, ignore_eos=True) for one in options]
    wanted = [done.text for done in alone.generate(PROMPTS, params)]
    long = alone.generate(PROMPTS[:1], SamplingParams(max_tokens=600, temperature=0, ignore_eos=True))[0].text
    arguments = [str(folder), "--draft", "suffix,min=1", "--tp", "2", "--prefix-cache-size", "0"]
    with under_torchrun(2, tmp_path, *arguments) as group:
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            futures = [
                pool.submit(lambda prompt, one: text_of(stream(group, prompt, **one)), prompt, one)
                for prompt, one in zip(PROMPTS, options, strict=True)
            ]
            assert [future.result() for future in futures] == wanted
        left = stream(group, "Hello", max_tokens=LONG, extra={"draft": "none"})
        next(left)
        left.close()
        wait_for(lambda: group.metric("draftree_sequences_running") == 0, "the text of a client that left is aborted")
        assert group.metric("draftree_disconnected_requests_total") == 1
        assert group.metric("draftree_slots_open") == 0
        (torchrun,) = group.processes
        ranks = children(torchrun.pid)
        assert len(ranks) == 2
        last = stream(group, PROMPTS[0], max_tokens=600, temperature=0)
        first = next(last).choices[0].text
        torchrun.send_signal(signal.SIGTERM)
        assert first + text_of(last) == long, "a running request is finished"
        group.ended()
        assert not any(is_running(rank) for rank in ranks)
        assert "SIGKILL" not in group.errors, "the ranks end by themselves"


def test_a_killed_rank_ends_the_server_and_its_requests(folder: Path, tmp_path: Path) -> None:
    with as_ranks(2, tmp_path, str(folder), "--draft", "none", "--tp", "2") as group:
        streams = [stream(group, prompt, max_tokens=LONG) for prompt in PROMPTS[:3]]
        for each in streams:
            next(each)
        group.processes[1].kill()
        for each in streams:
            with pytest.raises(openai.APIError, match="a process that computes the model ended") as caught:
                text_of(each)
            assert caught.value.code == "process_lost"
        assert group.ended() == [1, -signal.SIGKILL]
        assert re.search("^error: rank 1 ended without a word; ", group.errors, re.MULTILINE)


def test_a_replica_starts_the_other_ranks(folder: Path, tmp_path: Path) -> None:
    command = [*forked.python(), replica_ranks.__file__, str(folder), PROMPTS[1]]
    done = subprocess.run(command, env=without_rank(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    text, before, after = json.loads(done.stdout.splitlines()[-1])
    alone = LLM(folder, "none", dtype="float32", device="cpu")
    assert text == alone.generate(PROMPTS[1], SamplingParams(**replica_ranks.ASKED))[0].text
    assert (before, after) == (1, 0), "the other rank is a child, and ends with the replica"
