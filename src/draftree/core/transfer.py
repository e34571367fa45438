"""Copies between host and device; every copy on the path of a round uses this module.

Copies to a GPU are asynchronous: they are staged in pinned memory, which torch keeps until they are read. A copy
back waits for all work queued before it, so a round copies back once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def on_host(tensor: Tensor) -> bool:
    """Return whether reading this tensor needs no device synchronization."""
    return tensor.device.type == "cpu"


def to_device(values: Any, device: torch.device, *, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return numbers as a tensor on a device; the host does not wait.

    Args:
        values: an array or nested sequences of numbers.
        device: target device.
        dtype: dtype of the tensor.
    """
    host = torch.as_tensor(np.asarray(values)).to(dtype)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work; no-op on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def to_host(tensor: Tensor) -> list[Any]:
    """Return a tensor's numbers as nested lists; the host waits for the device."""
    found: list[Any] = tensor.tolist()
    return found
