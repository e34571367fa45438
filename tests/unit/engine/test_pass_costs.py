"""Pass times are measured between two synchronizations of the device, after warm-up passes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from draftree import build
from draftree.core import tensors
from draftree.models.base import Pass, PassResult
from draftree.models.table import TableLM, hashed


class Queueing(TableLM):
    """A model on an asynchronous device: a pass takes no time until the device is synchronized."""

    def __init__(self, log: list[str], *, num_warm_ups: int) -> None:
        super().__init__(hashed(5, seed=1))
        self.log, self._num_warm_ups = log, num_warm_ups
        self.seconds = self.queued = 0.0

    @property
    def num_warm_ups(self) -> int:
        return self._num_warm_ups

    def run(self, pass_: Pass) -> PassResult:
        rows = sum(len(job.tokens) for job in pass_.jobs)
        self.log.append(f"pass {rows}")
        self.queued += rows
        return super().run(pass_)

    def synchronize(self) -> None:
        self.log.append("wait")
        self.seconds += self.queued
        self.queued = 0.0


@pytest.fixture
def log() -> list[str]:
    return []


def measured(model: Queueing, rows: Sequence[int]) -> dict[int, float]:
    def clock() -> float:
        model.log.append("clock")
        return model.seconds

    return build.measure_costs(model, max_rows=rows[-1], rows=rows, clock=clock)


def test_the_device_is_synchronized_before_and_after_each_timed_pass(log: list[str]) -> None:
    found = measured(Queueing(log, num_warm_ups=2), (1, 4))
    timed = ["wait", "clock", "pass {0}", "wait", "clock"]
    wanted = [f"pass {build.PREFIX}", "pass 1"]
    for rows in (1, 4):
        wanted += [line.format(rows) for line in ["pass {0}"] * 2 + timed]
    assert log == wanted
    assert found == {1: 1.0, 4: 4.0}


def test_a_model_without_warm_ups_still_runs_its_head_once_before(log: list[str]) -> None:
    found = measured(Queueing(log, num_warm_ups=0), (1, 2, 8))
    assert log[:3] == [f"pass {build.PREFIX}", "pass 1", "wait"]
    assert found == {1: 1.0, 2: 2.0, 8: 8.0}


class Disturbed(TableLM):
    """A model whose passes take a millisecond a row, every other one also waits 20 ms for another process."""

    def __init__(self) -> None:
        super().__init__(hashed(5, seed=1))
        self.seconds, self.count = 0.0, 0

    def run(self, pass_: Pass) -> PassResult:
        self.count += 1
        rows = sum(len(job.tokens) for job in pass_.jobs)
        self.seconds += rows * 0.001 + (0.02 if self.count % 2 else 0.0)
        return super().run(pass_)


def test_short_passes_are_repeated_and_the_fastest_counts() -> None:
    model = Disturbed()
    found = build.measure_costs(model, max_rows=32, rows=(1, 4, 32), clock=lambda: model.seconds)
    assert (found[1], found[4]) == pytest.approx((0.001, 0.004))
    before = 2  # the prefix and the head
    assert model.count == before + 2 * build.REPEATS + 1


class Streamed(TableLM):
    """A model whose passes take a second for its weights, and a tenth of a second for each row above 100."""

    streams_weights = True

    def __init__(self) -> None:
        super().__init__(hashed(5, seed=1))
        self.seconds = 0.0
        self.rows: list[int] = []

    def run(self, pass_: Pass) -> PassResult:
        self.rows.append(sum(len(job.tokens) for job in pass_.jobs))
        self.seconds += max(1.0, self.rows[-1] / 10 - 9)
        return super().run(pass_)


def test_streamed_weights_are_measured_until_more_rows_cannot_pay() -> None:
    model = Streamed()

    def clock() -> float:
        return model.seconds

    found = build.costs_of(model, max_rows=1024, clock=clock)
    assert model.rows == [build.PREFIX, 1, 1, 16, 64, 128, 256]
    assert found == {1: 1.0, 16: 1.0, 64: 1.0, 128: pytest.approx(3.8), 256: pytest.approx(16.6)}
    assert build.costs_of(model, max_rows=1024, clock=clock) == found
    assert len(model.rows) == 7


def test_only_gpus_are_synchronized(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    TableLM(hashed(5, seed=1)).synchronize()
    assert not waited
    tensors.synchronize(torch.device("cuda:1"))
    assert waited == [torch.device("cuda:1")]
