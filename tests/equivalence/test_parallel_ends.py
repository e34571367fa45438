"""The end of one process of a parallel model ends the others, and the command runs under torchrun."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cli_samples import save_tiny_model
from draftree.cli.main import run as run_command
from parallel_jobs import ended, environment, start


@pytest.mark.parametrize(("killed", "mode"), [(1, "busy"), (0, "busy"), (1, "idle"), (0, "idle")])
def test_a_killed_process_ends_the_other(tmp_path: Path, killed: int, mode: str) -> None:
    save_tiny_model(tmp_path / "model", chat=False)
    processes = start(2, tmp_path, {"endless": mode, "model": str(tmp_path / "model")})
    try:
        assert processes[0].stdout is not None
        assert processes[0].stdout.readline() == "ready\n"
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


def test_the_command_under_torchrun(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = save_tiny_model(tmp_path / "model", chat=False)
    arguments = [
        "generate",
        str(folder),
        "Hello",
        "--temperature",
        "0",
        "--max-tokens",
        "12",
        "--json",
        "--dtype",
        "float32",
    ]
    assert run_command([*arguments, "--draft", "none"]) == 0
    wanted = json.loads(capfd.readouterr().out)
    for more in (["--draft", "suffix"], ["--draft", "ngram", "--tp", "3"]):
        divided = arguments + (more if "--tp" in more else [*more, "--tp", "2"])
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = subprocess.run(
            [*torchrun, "-m", "draftree", *divided],
            env=environment(0, 2),
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        if "--tp" in more:
            assert done.returncode == 1
            assert "tp=3, pp=1 needs 3 processes, and 2 were started" in done.stderr
            assert not done.stdout
            continue
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["text"] == wanted["text"]
