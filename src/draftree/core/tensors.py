"""Copies between host and device, and rows of captured hidden states."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftree.core.host import single_threaded


def on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


@functools.cache
def runs_triton(device: torch.device) -> bool:
    """Return whether Triton is installed and compiles for a device, a GPU that multiplies bfloat16."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def to_device(values: Any, device: torch.device, *, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return numbers as a tensor on a device; the host does not wait."""
    host = torch.as_tensor(np.asarray(values)).to(dtype)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def fill(target: Tensor, values: np.ndarray) -> None:
    """Copy numbers into a tensor on a device; the host does not wait."""
    host = torch.from_numpy(values)
    target.copy_(host.pin_memory() if target.device.type == "cuda" else host, non_blocking=True)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work; no-op on a CPU."""
    if device.type == "mps":
        torch.mps.synchronize()
    elif device.type != "cpu":
        getattr(torch, device.type).synchronize(device)


def widened(tensor: Tensor) -> Tensor:
    """Return numbers in float64, to be copied together; in float32, exact for ids below 2**24, on Apple's GPUs."""
    return tensor.float() if tensor.device.type == "mps" else tensor.double()


def to_host(tensor: Tensor) -> list[Any]:
    """Return a tensor's numbers as nested lists; the host waits for the device."""
    return tensor.tolist()


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return the rows of all parts; the calling thread copies them: others may be busy for longer than that takes."""
    if len(parts) == 1:
        return parts[0]
    with single_threaded():
        return torch.cat(tuple(parts))


def layers_of(hidden: Tensor, columns: Sequence[int]) -> Tensor:
    """Return layers of hidden states, in any order, shape (rows, columns, hidden)."""
    if list(columns) == list(range(hidden.shape[1])):
        return hidden
    with single_threaded():
        return hidden.index_select(1, to_device(columns, hidden.device))


def rows_of(hidden: Tensor, rows: Sequence[int]) -> Tensor:
    """Return rows of hidden states, in any order, shape (rows, layers, hidden)."""
    first = rows[0] if rows else 0
    if list(rows) == list(range(first, first + len(rows))):
        return hidden[first : first + len(rows)]
    with single_threaded():
        return hidden.index_select(0, to_device(rows, hidden.device))
