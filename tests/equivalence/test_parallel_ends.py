"""The end of one process of a parallel model ends the others, and the command runs under torchrun."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

import forked
from cli_samples import save_tiny_model
from draftree import LLM, SamplingParams
from draftree.cli.main import run as run_command
from parallel_jobs import SAMPLED, SECONDS, ended, environment, start


@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.parametrize("mode", ["busy", "idle"])
def test_a_killed_process_ends_the_other(tmp_path: Path, killed: int, mode: str) -> None:
    wanted = plain_text(save_tiny_model(tmp_path / "model", chat=False))
    processes = start(2, tmp_path, {"endless": mode, "model": str(tmp_path / "model")})
    try:
        assert processes[0].stdout is not None
        line = processes[0].stdout.readline()
        assert line, ended(processes)
        assert json.loads(line) == wanted, "drafter, planner and seed of rank 1 change nothing"
        processes[killed].send_signal(signal.SIGKILL)
    except BaseException:
        for process in processes:
            process.kill()
        raise
    results = ended(processes)
    assert results[killed][0] == -signal.SIGKILL
    assert results[1 - killed][0] == 1
    if killed:
        assert "rank 1 ended without a word" in results[0][2]


def plain_text(model: Path) -> list[int]:
    """Token ids of `never_end` and `never_close`, from one process without a drafter."""
    llm = LLM(model, "none", dtype="float32", device="cpu")
    return list(llm.generate("Hello", SamplingParams(**SAMPLED, seed=1))[0].token_ids)


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_an_event_loop_gets_the_end_of_another_rank(tmp_path: Path, kernels: str) -> None:
    model = save_tiny_model(tmp_path / "model", chat=False)
    settings = {"dtype": "float32", "device": "cpu", "kernels": kernels}
    job = {"endless": "async", "model": str(model), "options": {"tp": 2}, "settings": settings}
    processes = start(2, tmp_path, job)
    try:
        assert processes[0].stdout is not None
        line = processes[0].stdout.readline()
        assert line, ended(processes)
        is_free, texts = json.loads(line)
        assert is_free, "the event loop runs between the rounds"
        assert texts == [plain_text(model)] * 3
        processes[1].send_signal(signal.SIGKILL)
        errors, is_alive, failure = json.loads(processes[0].stdout.readline())
        # a request that arrives just after the end is refused; tests/unit/test_async_ends.py has running ones
        assert errors[0][0] in ("RankError", "EngineClosedError")
        assert errors[1][0] == "EngineClosedError"
        assert all("rank 1 ended without a word; the model cannot be used any more" in text for _, text in errors)
        assert (is_alive, failure) == (False, "RankError")
    except BaseException:
        for process in processes:
            process.kill()
        raise
    assert ended(processes)[0][0] == 0


def test_the_command_under_torchrun(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = save_tiny_model(tmp_path / "model", chat=False)
    arguments = ["generate", str(folder), "Hello", "--temperature", "0", "--max-tokens", "12", "--json"]
    arguments += ["--dtype", "float32"]
    assert run_command([*arguments, "--draft", "none"]) == 0
    wanted = json.loads(capfd.readouterr().out)
    for more in (["--draft", "suffix"], ["--draft", "ngram", "--tp", "3"]):
        divided = arguments + (more if "--tp" in more else [*more, "--tp", "2"])
        torchrun = [*forked.python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = subprocess.run(
            [*torchrun, "--no-python", *forked.python(), "-m", "draftree", *divided],
            env=environment(0, 2),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        if "--tp" in more:
            assert done.returncode == 1
            assert "tp=3, pp=1 needs 3 processes, and 2 were started" in done.stderr
            assert not done.stdout
            continue
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["text"] == wanted["text"]
