"""The processes of one job: rank, number, and the store in which they find each other."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from draftree.core.errors import ConfigurationError
from draftree.options import ModelOptions

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # set by torchrun for each process
LAUNCHER = "TORCHELASTIC_RUN_ID"
"""Set by torchrun, and by accelerate with several processes; clusters may set the others for any process."""


@dataclass(slots=True)
class World:
    rank: int  # number of this process; rank 0 runs the engine
    size: int  # number of processes
    local_rank: int  # number of this process on its machine
    local_size: int  # number of processes on its machine
    store: Any  # a key-value store of torch.distributed that all processes reach
    is_divided: bool = False  # whether `load_together` has loaded a model
    _num_names: int = field(default=0)

    @property
    def is_one_machine(self) -> bool:
        return self.local_size == self.size

    def next_name(self, what: str) -> str:
        """Return a new name in the store; all processes ask for the same names in the same order."""
        self._num_names += 1
        return f"draftree/{what}/{self._num_names}"


def own_rank(options: ModelOptions) -> int:
    """Return the rank of this process; imports no torch."""
    missing = [name for name in VARIABLES if name not in os.environ]
    if missing:
        count = options.num_processes
        raise ConfigurationError(
            f"{options.division} needs {count} processes, and this one was not started by torchrun ({missing[0]} is "
            f"not set): start with 'torchrun --standalone --nproc-per-node {count} -m draftree …'"
        )
    return int(os.environ["RANK"])


def require_one_process(options: ModelOptions) -> None:
    """Check that torchrun did not start several processes for a command that uses one."""
    count = os.environ.get("WORLD_SIZE", "1")
    if LAUNCHER in os.environ and count.isdigit() and int(count) > 1:
        raise ConfigurationError(
            f"{count} processes were started, and {options.division} needs one: divide the model with --tp {count} or "
            f"--pp {count}, or start one process"
        )


_current: World | None = None


def current_world(options: ModelOptions) -> World:
    """Return the processes of this job, from the variables of torchrun; the first call connects to their store."""
    global _current  # noqa: PLW0603, one job has one store
    own_rank(options)
    if _current is None:
        from torch.distributed import rendezvous

        store, rank, size = next(iter(rendezvous("env://")))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        _current = World(rank, size, int(os.environ["LOCAL_RANK"]), local_size, store)
    return _current


def group_rank(rank: int, options: ModelOptions) -> int:
    """Return the rank in the process group, whose last stage has the head: rank 0 of the job is in the last stage."""
    return (rank + (options.pp - 1) * options.tp) % options.num_processes
