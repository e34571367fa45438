"""Graph capture on a device that records the order of its calls; captured, evicted and counted shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from draftree.models.base import Extend, Pass
from draftree.models.torch import static
from draftree.models.torch.hf import HFModel
from draftree.models.torch.static import Captured, CaptureError, Graphs, Shapes
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

    def work(self) -> Tensor:
        self.log.append(f"work on {self.stream}")
        return torch.zeros(2, 3)


def test_work_runs_once_beside_then_is_recorded_then_replayed_on_the_stream_of_the_caller() -> None:
    api = FakeApi()
    graphs = Graphs(api)
    captured = graphs.capture(api.work)
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
    assert captured.replay() is captured.replay()
    assert api.log == ["replay graph 1 on main"] * 2
    assert captured.num_bytes == 24


@pytest.mark.parametrize("place", [1, 2])
def test_a_failed_capture_gives_the_reason_and_the_stream_back(place: int) -> None:
    api, calls = FakeApi(), 0

    def work() -> Tensor:
        nonlocal calls
        calls += 1
        if calls == place:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return torch.zeros(1)

    with pytest.raises(CaptureError, match=r"^operation not permitted when stream is capturing$"):
        Graphs(api).capture(work)
    assert api.stream == "main"
    assert api.log[-1] == "set main"


def test_graphs_of_one_model_share_a_pool_and_those_of_two_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    apis: list[FakeApi] = []

    def fake(device: torch.device) -> Graphs:
        apis.append(FakeApi())
        return Graphs(apis[-1])

    monkeypatch.setattr(static, "graphs_of", fake)
    models = [HFModel(fresh("llama"), shapes=Shapes(shortest=32)) for _ in range(2)]
    for model in models:
        play(model, [1, 1, 1, 2, 2, 2])
    pools = [{line.split(" in ")[1] for line in api.log if line.startswith("begin recording")} for api in apis]
    assert [api.num_graphs for api in apis] == [2, 2]
    assert [len(used) for used in pools] == [1, 1]
    assert pools[0] != pools[1]


class CountingGraphs(Graphs):
    """Every replay writes into the memory of the first run, as graphs do."""

    def __init__(self) -> None:
        self.num_captures = 0

    def capture(self, work: Callable[[], Tensor]) -> Captured:
        self.num_captures += 1
        output = work()
        return Captured(lambda: output.copy_(work()), output.nbytes)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> CountingGraphs:
    found = CountingGraphs()
    monkeypatch.setattr(static, "graphs_of", lambda device: found)
    return found


def play(model: HFModel, counts: Sequence[int]) -> Tensor:
    """Logits of passes over so many rows each, all after the same prefix."""
    model.reserve(2, 96)
    slot = filled(model, [3, 4, 5])
    found = []
    for count in counts:
        found.append(model.run(Pass([Extend(slot, list(range(6, 6 + count)), [-1] * count)])).logits.tensor())
        model.commit(slot, ())
    return torch.cat(found)


def model_of(**limits: Any) -> HFModel:
    return HFModel(fresh("llama"), shapes=Shapes(shortest=32, **limits))


def test_shapes_that_take_turns_are_not_captured_again_and_again(graphs: CountingGraphs) -> None:
    counts = [1, 1, 2, 2, 4, 4] * 20
    model = model_of(max_graphs=2, passes_per_exchange=30)
    assert model.static is not None
    assert torch.allclose(play(model, counts), play(HFModel(fresh("llama")), counts), atol=2e-4)
    assert model.static.num_captured == 2
    assert 2 < graphs.num_captures <= 2 + len(counts) // 30


def test_a_shape_that_is_used_from_now_on_takes_the_place_of_the_least_recent_one(graphs: CountingGraphs) -> None:
    model = model_of(max_graphs=2, passes_per_exchange=8)
    assert model.static is not None
    play(model, [1, 1, 2, 2, 1, 8, 8, 8, 8, 8])
    assert graphs.num_captures == 3
    play(model, [1, 8])
    assert graphs.num_captures == 3, "the shape of two rows went"


def test_logits_that_graphs_keep_are_counted_and_bounded(graphs: CountingGraphs) -> None:
    model = model_of(max_graph_bytes=7 * ROW_BYTES)
    assert model.static is not None
    assert model.footprint.graphs == model.static.most_bytes == 7 * ROW_BYTES
    play(model, [1, 1, 2, 2, 4, 4])
    assert model.static.num_bytes == 7 * ROW_BYTES
    play(model, [8] * 4)
    assert model.static.num_captured == 3, "8 rows alone are more than all graphs may keep"
    play(model, [3] * 70)
    assert model.static.num_bytes <= 7 * ROW_BYTES


def test_warm_ups_last_until_a_shape_is_replayed(graphs: CountingGraphs) -> None:
    for num_passes, num_captured in ((2, 0), (3, 1)):
        model = model_of(eager_uses=2)
        assert model.static is not None
        assert model.num_warm_ups == 3
        play(model, [1] * num_passes)
        assert model.static.num_captured == num_captured, "the last warm-up pass captures"
    assert model_of(captures=False).num_warm_ups == 1
    assert HFModel(fresh("llama")).num_warm_ups == 0


def test_memory_of_graphs_is_counted_where_something_can_be_captured(
    graphs: CountingGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert model_of(max_graphs=2, max_cells=64).footprint.graphs == 2 * 64 * ROW_BYTES
    assert model_of(captures=False).footprint.graphs == 0
    assert HFModel(fresh("llama")).footprint.graphs == 0
    monkeypatch.undo()
    assert model_of().footprint.graphs == 0, "there are no graphs on a CPU"
