"""Capturing work as a CUDA graph: recorded once, then replayed with one call of the host.

All graphs of a device share one memory pool. That is safe as long as what a replay gave is copied on the same stream
before the next replay, which is what `StaticPasses` does. Never timed: there was no card when this was written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_pools: dict[torch.device, Any] = {}
_streams: dict[torch.device, Any] = {}


class CaptureError(Exception):
    """The work can not be captured; the message is the reason."""


def can_capture(device: torch.device) -> bool:
    """Whether this device has graphs."""
    return device.type == "cuda" and torch.cuda.is_available()


def capture(work: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """Run the work once on a side stream, then record it there.

    Args:
        work: reads and writes tensors at fixed addresses only, and may be run twice with the same effect.
        device: a CUDA device.

    Returns:
        What replays it on the current stream, and gives the same tensor each time, filled anew.

    Raises:
        CaptureError: it waits for the device, or does what a graph can not hold.
    """
    with torch.cuda.device(device):
        if device not in _pools:
            _pools[device], _streams[device] = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
        side, before = _streams[device], torch.cuda.current_stream(device)
        graph = torch.cuda.CUDAGraph()
        try:
            side.wait_stream(before)
            with torch.cuda.stream(side):
                work()
            before.wait_stream(side)
            # other threads may allocate meanwhile: only what this thread does must be fit for a graph
            with torch.cuda.graph(graph, pool=_pools[device], stream=side, capture_error_mode="thread_local"):
                output = work()
        except Exception as error:  # torch and libraries below it raise many kinds
            raise CaptureError(str(error).strip().split("\n")[0] or type(error).__name__) from error
        finally:
            torch.cuda.set_stream(before)  # a capture that failed leaves its own stream current

    def replay() -> Tensor:
        graph.replay()
        return output

    return replay
