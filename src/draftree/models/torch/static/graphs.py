"""Capturing work as CUDA graphs: recorded once, then replayed with one call of the host.

Every model has a memory pool of its own. Graphs of one pool may use the same addresses for what lies between their
operators, which is safe only if they are replayed one after another on one stream. The passes of one model are; those
of a target and its drafter need not be. Never timed on a card.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor


class CaptureError(Exception):
    """The work cannot be captured; the message is the reason."""


class GraphApi(ABC):
    """What capturing needs of a device's runtime. Tests record the order of its calls."""

    @abstractmethod
    def new_pool(self) -> Any:
        """A memory pool that no other graph uses."""

    @abstractmethod
    def new_stream(self) -> Any:
        """A stream beside the current one."""

    @abstractmethod
    def current_stream(self) -> Any:
        """The stream of this thread."""

    @abstractmethod
    def set_stream(self, stream: Any) -> None:
        """Make a stream that of this thread."""

    @abstractmethod
    def wait(self, stream: Any, other: Any) -> None:
        """Let work that is queued on `stream` from now on wait for what is queued on `other`."""

    @abstractmethod
    def on_device(self) -> AbstractContextManager[Any]:
        """Inside, this thread works on the device."""

    @abstractmethod
    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Inside, work is queued on this stream."""

    @abstractmethod
    def new_graph(self) -> Any:
        """An empty graph; its `replay` queues what was recorded."""

    @abstractmethod
    def recording(self, graph: Any, *, pool: Any, stream: Any) -> AbstractContextManager[Any]:
        """Inside, work is recorded into the graph and not run."""


@final
class CudaApi(GraphApi):
    """torch's runtime of one card.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def new_pool(self) -> Any:
        """As torch makes them."""
        return torch.cuda.graph_pool_handle()

    def new_stream(self) -> Any:
        """On the device."""
        return torch.cuda.Stream(self._device)

    def current_stream(self) -> Any:
        """On the device."""
        return torch.cuda.current_stream(self._device)

    def set_stream(self, stream: Any) -> None:
        """As torch does."""
        torch.cuda.set_stream(stream)

    def wait(self, stream: Any, other: Any) -> None:
        """By an event."""
        stream.wait_stream(other)

    def on_device(self) -> AbstractContextManager[Any]:
        """As torch does."""
        return torch.cuda.device(self._device)

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """As torch does."""
        return torch.cuda.stream(stream)

    def new_graph(self) -> Any:
        """As torch makes them."""
        return torch.cuda.CUDAGraph()

    def recording(self, graph: Any, *, pool: Any, stream: Any) -> AbstractContextManager[Any]:
        """Other threads may allocate meanwhile: only what this thread does must be fit for a graph."""
        return torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured graph.

    Attributes:
        replay: runs it on the current stream, and gives the same tensor each time, filled anew.
        num_bytes: of that tensor, which lies in the pool for as long as the graph is kept.
    """

    replay: Callable[[], Tensor]
    num_bytes: int


class Graphs:
    """Captures the passes of one model. Holds their pool, and the stream on which they are recorded.

    Args:
        api: the device's runtime.
    """

    def __init__(self, api: GraphApi) -> None:
        self._api = api
        self._pool: Any = None
        self._side: Any = None

    def capture(self, work: Callable[[], Tensor]) -> Captured:
        """Run the work once on a side stream, then record it there.

        Args:
            work: reads and writes tensors at fixed addresses only, and may be run twice with the same effect.

        Raises:
            CaptureError: it waits for the device, or does what a graph cannot hold.
        """
        api = self._api
        with api.on_device():
            if self._side is None:
                self._pool, self._side = api.new_pool(), api.new_stream()
            side, before = self._side, api.current_stream()
            graph = api.new_graph()
            try:
                api.wait(side, before)
                with api.on_stream(side):
                    work()
                api.wait(before, side)
                with api.recording(graph, pool=self._pool, stream=side):
                    output = work()
            except Exception as error:  # torch and libraries below it raise many kinds
                raise CaptureError(str(error).strip().split("\n")[0] or type(error).__name__) from error
            finally:
                api.set_stream(before)  # a capture that failed leaves its own stream current

        def replay() -> Tensor:
            graph.replay()
            return output

        return Captured(replay, output.nbytes)


def graphs_of(device: torch.device) -> Graphs | None:
    """What captures the passes of one model; None where the device has no graphs."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return Graphs(CudaApi(device))
