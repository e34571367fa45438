"""Capture of work as CUDA graphs: recorded once, then replayed with one call of the host.

Every model has its own memory pool. Graphs of one pool may share addresses of intermediate results, which is safe only
if they are replayed one after another on one stream. This holds for the passes of one model, not for those of a target
and its drafter. Never timed on a GPU.
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
    """Functions of a device's runtime that capture uses. Tests record the order of its calls."""

    @abstractmethod
    def new_pool(self) -> Any:
        """Return a memory pool that no other graph uses."""

    @abstractmethod
    def new_stream(self) -> Any:
        """Return a new stream."""

    @abstractmethod
    def current_stream(self) -> Any:
        """Return the stream of this thread."""

    @abstractmethod
    def set_stream(self, stream: Any) -> None:
        """Set the current stream of this thread."""

    @abstractmethod
    def wait(self, stream: Any, other: Any) -> None:
        """Make later work on `stream` wait for the work queued on `other`."""

    @abstractmethod
    def on_device(self) -> AbstractContextManager[Any]:
        """Return a context in which the device is current."""

    @abstractmethod
    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which work is queued on this stream."""

    @abstractmethod
    def new_graph(self) -> Any:
        """Return an empty graph; its `replay` queues what was recorded."""

    @abstractmethod
    def recording(self, graph: Any, *, pool: Any, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which work is recorded into the graph and not run."""


@final
class CudaApi(GraphApi):
    """CUDA runtime of torch for one GPU.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def new_pool(self) -> Any:
        """Create it through torch."""
        return torch.cuda.graph_pool_handle()

    def new_stream(self) -> Any:
        """Create it on the device."""
        return torch.cuda.Stream(self._device)

    def current_stream(self) -> Any:
        """Return the stream on the device."""
        return torch.cuda.current_stream(self._device)

    def set_stream(self, stream: Any) -> None:
        """Set it through torch."""
        torch.cuda.set_stream(stream)

    def wait(self, stream: Any, other: Any) -> None:
        """Wait by an event."""
        stream.wait_stream(other)

    def on_device(self) -> AbstractContextManager[Any]:
        """Return torch's context."""
        return torch.cuda.device(self._device)

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return torch's context."""
        return torch.cuda.stream(stream)

    def new_graph(self) -> Any:
        """Create it through torch."""
        return torch.cuda.CUDAGraph()

    def recording(self, graph: Any, *, pool: Any, stream: Any) -> AbstractContextManager[Any]:
        """Record in thread-local mode: other threads may allocate meanwhile."""
        return torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured graph.

    Attributes:
        replay: runs the graph on the current stream; returns the same tensor each time, with new values.
        num_bytes: size of that tensor, which occupies the pool while the graph is kept.
    """

    replay: Callable[[], Tensor]
    num_bytes: int


class Graphs:
    """Graphs of one model, with their pool and the stream on which they are recorded.

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
            CaptureError: the work waits for the device, or uses operations that graphs do not support.
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
            except Exception as error:  # torch and its libraries raise many types
                raise CaptureError(str(error).strip().split("\n")[0] or type(error).__name__) from error
            finally:
                api.set_stream(before)  # a failed capture leaves its own stream current

        def replay() -> Tensor:
            graph.replay()
            return output

        return Captured(replay, output.nbytes)


def graphs_of(device: torch.device) -> Graphs | None:
    """Return the `Graphs` of a model on this device; None if the device has no graphs."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return Graphs(CudaApi(device))
