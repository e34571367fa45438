"""`draftree serve --tp`: texts of one process, clients that leave, signals, and the loss of a rank."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

import replica_ranks
from cli_samples import save_tiny_model
from draftree import LLM, SamplingParams
from parallel_servers import Group, as_ranks, children, is_running, under_torchrun, without_rank
from replicas import until

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
    alone = LLM(folder, dtype="float32", device="cpu")
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
        until(lambda: group.metric("draftree_sequences_running") == 0, "the text of a client that left is aborted")
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
    command = [sys.executable, replica_ranks.__file__, str(folder), PROMPTS[1]]
    done = subprocess.run(command, env=without_rank(), capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    text, before, after = json.loads(done.stdout.splitlines()[-1])
    alone = LLM(folder, dtype="float32", device="cpu")
    assert text == alone.generate(PROMPTS[1], SamplingParams(**replica_ranks.ASKED))[0].text
    assert (before, after) == (1, 0), "the other rank is a child, and ends with the replica"
