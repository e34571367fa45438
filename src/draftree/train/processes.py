"""Processes of a run: one, or several that `accelerate launch` started."""

from __future__ import annotations

import os
from typing import Any, Protocol

import torch
from torch import Tensor

from draftree.core.errors import ConfigurationError, import_extra

__all__ = ["Alone", "Processes", "find_processes"]


class Processes(Protocol):
    """The processes that train one drafter together. Each reads its part of every batch; gradients are summed."""

    index: int
    count: int
    device: torch.device

    def total(self, value: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes."""

    def wait(self) -> None:
        """Wait for all processes."""


class Alone:
    """One process.

    Args:
        device: where it trains.
    """

    index = 0
    count = 1

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def total(self, value: Tensor) -> Tensor:
        """Return the tensor."""
        return value

    def wait(self) -> None:
        """Do nothing."""


class Accelerated:
    """Processes of `accelerate launch`.

    Args:
        accelerator: of this process.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self.index: int = accelerator.process_index
        self.count: int = accelerator.num_processes
        self.device: torch.device = accelerator.device

    def total(self, value: Tensor) -> Tensor:
        """Return the sum over all processes."""
        found: Tensor = self._accelerator.reduce(value, reduction="sum")
        return found

    def wait(self) -> None:
        """Wait for all processes."""
        self._accelerator.wait_for_everyone()


def find_processes(device: torch.device) -> Processes:
    """Return the processes of this run: those of `accelerate launch`, or this one alone.

    Args:
        device: device of a process alone. With several processes, `accelerate` places them; they use the processor
            if this device is the processor.

    Raises:
        ConfigurationError: several processes were started, and `accelerate` is not installed.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Alone(device)
    accelerate = import_extra("train", "several processes need", error=ConfigurationError)
    return Accelerated(accelerate.Accelerator(cpu=device.type == "cpu"))
