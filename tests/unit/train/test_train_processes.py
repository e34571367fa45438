"""Several processes train one head: their gradients add up to those of one process with all batches."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

import forked
from draftree.core.errors import ConfigurationError
from draftree.train import loop
from draftree.train.batches import pack
from draftree.train.checkpoints import CHECKPOINT, load_checkpoint
from draftree.train.loop import TrainingRun
from draftree.train.preparing import Processes, find_processes
from draftree.train.settings import Limits, TrainSettings
from parallel_jobs import ended, environment
from train_folders import learnable_model, write_data
from train_samples import settings, texts, tiny_head, trainee

COUNT = 2


def chosen() -> TrainSettings:
    # an odd number of batches: the last update of an epoch has none for the second process
    return settings(limits=Limits(steps=9), batch_tokens=180, evaluate_every=9, optimizer="adamw")


class Gloo:
    """Processes of torch.distributed."""

    device = torch.device("cpu")

    def __init__(self, index: int) -> None:
        self.index, self.count = index, COUNT

    def total(self, value: torch.Tensor) -> torch.Tensor:
        found = value.clone()
        torch.distributed.all_reduce(found)
        return found

    def wait(self) -> None:
        torch.distributed.barrier()


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def train_part(rank: str, port: str, folder: str) -> None:
    torch.set_num_threads(1)
    index = int(rank)
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=COUNT, rank=index)
    own = trainee(tiny_head(seed=0), chosen(), data=texts(50))
    state = TrainingRun(own, chosen(), Path(folder) / "run", Gloo(index)).run()
    torch.save({"weights": own.module.state_dict(), "tokens": state.tokens}, Path(folder) / f"{index}.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_make_the_updates_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = f"import sys; sys.path[:0] = {sys.path!r}; import test_train_processes as own; own.train_part(*sys.argv[1:])"
    port = str(free_port())
    ranks = [
        subprocess.Popen([*forked.python(), "-c", code, str(index), port, str(tmp_path)]) for index in range(COUNT)
    ]
    assert [rank.wait() for rank in ranks] == [0] * COUNT
    parts = [torch.load(tmp_path / f"{index}.pt") for index in range(COUNT)]

    def joined(*args: Any, **more: Any) -> list[list[int]]:
        batches = list(pack(*args, **more))
        assert len(batches) % COUNT == 1
        pairs = (batches[start : start + COUNT] for start in range(0, len(batches), COUNT))
        return [[text for batch in pair for text in batch] for pair in pairs]

    monkeypatch.setattr(loop, "pack", joined)
    own = trainee(tiny_head(seed=0), chosen(), data=texts(50))
    state = TrainingRun(own, chosen(), tmp_path / "alone", Processes(torch.device("cpu"))).run()
    assert [part["tokens"] for part in parts] == [state.tokens] * COUNT
    for name, value in own.module.state_dict().items():
        assert torch.equal(parts[0]["weights"][name], parts[1]["weights"][name]), name
        assert torch.allclose(parts[0]["weights"][name], value, atol=1e-5), name
    facts = [load_checkpoint(tmp_path / name / CHECKPOINT)[1]["state"] for name in ("run", "alone")]
    assert facts[0]["step"] == facts[1]["step"] == 9


def test_one_process_needs_no_accelerate() -> None:
    found = find_processes(torch.device("cpu"))
    assert (found.index, found.count) == (0, 1)
    value = torch.ones(2)
    assert found.total(value) is value


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is not None, reason="accelerate is installed")
def test_several_processes_without_accelerate_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match=r"several processes need the Python package 'accelerate'.*\[train\]"):
        find_processes(torch.device("cpu"))


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_accelerate_trains_in_launched_processes(tmp_path: Path) -> None:
    model = learnable_model(tmp_path / "target")
    data = write_data(model, tmp_path / "data", count=24)
    output = tmp_path / "head"
    options = ["--draft-vocab", "200", "--steps", "6", "--unseen-share", "0.2", "--dtype", "float32", "--device", "cpu"]
    command = ["-m", "draftree", "train", "head", str(model), "--data", str(data), "--output", str(output), *options]
    port = str(free_port())
    # as torch's launcher would start them; on processors, `accelerate launch` starts one process
    started = [
        subprocess.Popen(
            [*forked.python(), *command],
            env=environment(index, COUNT, MASTER_PORT=port),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(COUNT)
    ]
    for status, _, errors in ended(started):
        assert status == 0, errors
    assert json.loads((output / "recipe.json").read_text())["run"]["processes"] == 2
