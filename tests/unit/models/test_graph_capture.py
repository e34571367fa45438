"""Graph capture on a device that records the order of its calls; captured shapes and their shared outputs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from draftree.models.base import Extend, Pass
from draftree.models.torch import static
from draftree.models.torch.hf import HFModel
from draftree.models.torch.static import CaptureError, Graphs, Shapes, rounded
from families import VOCAB_SIZE, fresh
from slot_samples import filled

ROW_BYTES = 4 * VOCAB_SIZE


class FakeGraph:
    def __init__(self, api: FakeApi, name: str) -> None:
        self.api, self.name = api, name

    def replay(self) -> None:
        self.api.log.append(f"replay {self.name} on {self.api.stream}")


class FakeApi:
    """A device that only records its calls, in order."""

    num_pools = 0

    def __init__(self) -> None:
        self.log: list[str] = []
        self.stream = "main"
        self.num_graphs = 0
        self.is_collecting: list[bool] = []  # whether the garbage collector was on, run by run

    def generator(self) -> Any:
        return "state"

    def restore(self, generator: Any) -> None:
        self.log.append(f"restore {generator}")

    def new_pool(self) -> Any:
        FakeApi.num_pools += 1
        self.pool = f"pool {FakeApi.num_pools}"
        return self.pool

    def new_stream(self) -> Any:
        return "side"

    def current_stream(self) -> Any:
        return self.stream

    def set_stream(self, stream: Any) -> None:
        self.stream = stream
        self.log.append(f"set {stream}")

    def wait(self, stream: Any, other: Any) -> None:
        self.log.append(f"{stream} waits for {other}")

    @contextmanager
    def _inside(self, name: str, stream: Any) -> Iterator[None]:
        before, self.stream = self.stream, stream
        self.log.append(f"begin {name}")
        yield
        # like torch: an error inside leaves this stream current
        self.stream = before
        self.log.append(f"end {name}")

    def on_device(self) -> Any:
        return self._inside("device", self.stream)

    def on_stream(self, stream: Any) -> Any:
        return self._inside(f"stream {stream}", stream)

    def new_graph(self) -> Any:
        self.num_graphs += 1
        return FakeGraph(self, f"graph {self.num_graphs}")

    def recording(self, graph: Any, *, pool: Any, stream: Any) -> Any:
        return self._inside(f"recording {graph.name} in {pool} on {stream}", stream)

    def work(self) -> None:
        self.log.append(f"work on {self.stream}")
        self.is_collecting.append(gc.isenabled())


def test_work_runs_once_beside_then_is_recorded_then_replayed_on_the_stream_of_the_caller() -> None:
    api = FakeApi()
    replay = Graphs(api).capture(api.work)
    assert api.log == [
        "begin device",
        "side waits for main",
        "begin stream side",
        "work on side",
        "end stream side",
        "main waits for side",
        f"begin recording graph 1 in {api.pool} on side",
        "work on side",
        f"end recording graph 1 in {api.pool} on side",
        "set main",
        "end device",
    ]
    api.log.clear()
    replay()
    replay()
    assert api.log == ["replay graph 1 on main"] * 2
    assert api.is_collecting == [True, False], "a graph that is freed while another is recorded fails its capture"
    assert gc.isenabled()


@pytest.mark.parametrize("run", [1, 2])
def test_a_failed_capture_gives_the_reason_and_leaves_the_device_usable(run: int) -> None:
    api, runs = FakeApi(), 0

    def work() -> None:
        nonlocal runs
        runs += 1
        if runs == run:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    graphs = Graphs(api)
    with pytest.raises(CaptureError, match=r"^operation not permitted when stream is capturing$"):
        graphs.capture(work)
    assert api.stream == "main"
    assert api.log[-2:] == ["restore state", "set main"]
    assert gc.isenabled()
    failed = api.pool
    graphs.capture(work)
    assert api.pool != failed, "the pool of a failed capture accepts no other"


def test_graphs_of_one_model_share_a_pool_and_those_of_two_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    apis: list[FakeApi] = []

    def fake(device: torch.device) -> Graphs:
        apis.append(FakeApi())
        return Graphs(apis[-1])

    monkeypatch.setattr(static, "graphs_of", fake)
    models = [HFModel(fresh("llama"), shapes=Shapes()) for _ in range(2)]
    for model in models:
        play(model, [1, 2])
    pools = [{line.split(" in ")[1] for line in api.log if line.startswith("begin recording")} for api in apis]
    assert [api.num_graphs for api in apis] == [3, 3]
    assert [len(used) for used in pools] == [1, 1]
    assert pools[0] != pools[1]


class CountingGraphs(Graphs):
    """Every replay writes into the memory of the first run, as graphs do."""

    def __init__(self) -> None:
        self.num_captures = 0

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.num_captures += 1
        work()
        return work


class FailingGraphs(CountingGraphs):
    def __init__(self, message: str) -> None:
        super().__init__()
        self._message = message

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.num_captures += 1
        raise CaptureError(self._message)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> CountingGraphs:
    counting = CountingGraphs()
    monkeypatch.setattr(static, "graphs_of", lambda device: counting)
    return counting


def play(model: HFModel, counts: Sequence[int]) -> Tensor:
    """Logits of passes over so many rows each, all after the same prefix."""
    model.reserve(2, 96)
    slot = filled(model, [3, 4, 5])
    logits = []
    for count in counts:
        logits.append(model.run(Pass([Extend(slot, list(range(6, 6 + count)), [-1] * count)])).logits.tensor())
        model.commit(slot, ())
    return torch.cat(logits)


def model_of(**limits: Any) -> HFModel:
    return HFModel(fresh("llama"), shapes=Shapes(**limits))


def test_a_shape_is_captured_once_at_its_first_use(graphs: CountingGraphs) -> None:
    model = model_of()
    assert model.static is not None
    assert model.num_warm_ups == 1
    counts = [1, 3, 8, 2, 4, 7] * 3
    assert torch.allclose(play(model, counts), play(HFModel(fresh("llama")), counts), atol=2e-4)
    assert {bucket.rows for bucket in model.static.buckets} == {1, 2, 4, 8}
    assert model.static.num_captured == graphs.num_captures == len(model.static.buckets)


def test_all_graphs_write_to_the_same_memory_and_logits_of_a_pass_outlive_the_next(graphs: CountingGraphs) -> None:
    model = model_of()
    assert model.static is not None
    model.reserve(2, 96)
    slot = filled(model, [3, 4, 5])
    first = model.run(Pass([Extend(slot, [6, 7], [-1, -1])])).logits.tensor()
    kept = first.clone()
    model.run(Pass([Extend(slot, [8], [-1])]))
    assert torch.equal(first, kept)
    with torch.inference_mode():
        addresses = {prepared.run()[0].data_ptr() for prepared in model.static._prepared.values()}
    assert len(addresses) == 1


@pytest.mark.parametrize(("message", "num_captures"), [("CUDA out of memory. Tried to", 3), ("not permitted", 1)])
def test_passes_run_without_graphs_after_a_failed_capture(
    monkeypatch: pytest.MonkeyPatch, message: str, num_captures: int
) -> None:
    failing = FailingGraphs(message)
    monkeypatch.setattr(static, "graphs_of", lambda device: failing)
    model = model_of()
    assert model.static is not None
    assert torch.allclose(play(model, [1, 1]), play(HFModel(fresh("llama")), [1, 1]), atol=2e-4)
    assert model.static.num_captured == 0
    assert failing.num_captures == num_captures, "a lack of memory may end, other reasons stay"


def test_memory_of_graphs_is_counted_where_something_can_be_captured(
    graphs: CountingGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert model_of(max_rows=40).footprint.graphs == rounded(40) * ROW_BYTES
    assert model_of(captures=False).footprint.graphs == 0
    assert HFModel(fresh("llama")).footprint.graphs == 0
    assert HFModel(fresh("llama")).num_warm_ups == 0
    monkeypatch.undo()
    assert model_of().footprint.graphs == 0, "there are no graphs on a CPU"
