"""The process group of torch.distributed in which the shares of a model exchange activations."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from draftree.core.errors import ConfigurationError
from draftree.loading.choices import resolve_device
from draftree.parallel.options import ParallelOptions
from draftree.parallel.world import World

__all__ = ["group_rank", "local_device", "require_group"]

ABORT_OPERATIONS = "2"
"""Value of torch that ends operations and not the process."""
TIMEOUT = timedelta(hours=2)
"""Reading large weights takes long; lifelines notice ended processes within seconds."""


def group_rank(rank: int, options: ParallelOptions) -> int:
    """Return the rank in the process group, whose last stage has the head: rank 0 of the job is in the last stage."""
    return (rank + (options.pp - 1) * options.tp) % options.num_processes


def local_device(device: str, world: World) -> torch.device:
    """Return the device of this process: the GPU with its local rank, or the CPU.

    Raises:
        ConfigurationError: the device is not possible for several processes.
    """
    found = resolve_device(device)
    has_gpu = torch.cuda.is_available()
    if found.type == "cpu" and has_gpu:
        raise ConfigurationError(
            "device 'cpu' with several processes needs a machine without visible GPUs: set CUDA_VISIBLE_DEVICES=''"
        )
    if found.type != "cuda":
        return found
    if found.index is not None and ":" in device:
        raise ConfigurationError(f"device is '{device}': each process has its own GPU, so use cuda or auto")
    if world.local_rank >= torch.cuda.device_count():
        raise ConfigurationError(
            f"this machine has {torch.cuda.device_count()} GPUs for {world.local_size} processes: start at most one "
            "process for each GPU"
        )
    torch.cuda.set_device(world.local_rank)
    return torch.device("cuda", world.local_rank)


def require_group(world: World, options: ParallelOptions, device: torch.device) -> None:
    """Create the process group, or check that the existing one has this order of ranks.

    Raises:
        ConfigurationError: another process group exists.
    """
    rank = group_rank(world.rank, options)
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, world.size):
            raise ConfigurationError(
                f"this process is rank {dist.get_rank()} of a process group, and {options} needs rank {rank}: start a "
                "new job, and leave torch.distributed.init_process_group out"
            )
        return
    os.environ.setdefault("LOCAL_RANK", str(world.local_rank))
    # after an error of NCCL only its operations end: the process has to tell its clients first
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", ABORT_OPERATIONS)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore(f"draftree/group/{options.pp}", world.store),
        rank=rank,
        world_size=world.size,
        timeout=TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )
