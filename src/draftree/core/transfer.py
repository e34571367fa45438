"""The two ways between host and device; everything that crosses on the path of a round goes through here.

Numbers go to a card without waiting for it: they are staged in pinned memory, which torch keeps until the card has
read them. What comes back waits for all work that was queued before, so a round reads back once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def on_host(tensor: Tensor) -> bool:
    """Whether reading this tensor waits for no device."""
    return tensor.device.type == "cpu"


def to_device(values: Any, device: torch.device, *, dtype: torch.dtype = torch.int64) -> Tensor:
    """Numbers as a tensor on a device; the host does not wait.

    Args:
        values: an array or nested sequences of numbers.
        device: where they go.
        dtype: as what.
    """
    host = torch.as_tensor(np.asarray(values)).to(dtype)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all work that was queued; on a CPU nothing is queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def to_host(tensor: Tensor) -> list[Any]:
    """A tensor's numbers as nested lists: the host waits for the device."""
    found: list[Any] = tensor.tolist()
    return found
