"""Other ranks as child processes of rank 0, where no launcher starts them, as in a replica of Ray Serve."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from draftree.core.errors import ConfigurationError
from draftree.parallel.entry import leave_to_rank_zero
from draftree.parallel.options import ParallelOptions

__all__ = ["start_ranks"]

LOOPBACK = "127.0.0.1"


def start_ranks(
    model: str, division: ParallelOptions, settings: Mapping[str, Any], *, threads: int | None = None
) -> list[subprocess.Popen[bytes]]:
    """Make this process rank 0 of a new job on this machine, and start its other ranks, which end with it."""
    if "RANK" in os.environ:
        raise ConfigurationError("this process is a rank of a job and cannot start another one: leave torchrun out")
    count = str(division.num_processes)
    os.environ.update(WORLD_SIZE=count, LOCAL_WORLD_SIZE=count, MASTER_ADDR=LOOPBACK, MASTER_PORT=str(_free_port()))
    os.environ.update(RANK="0", LOCAL_RANK="0")
    told = json.dumps([model, asdict(division), dict(settings), threads])
    return [
        subprocess.Popen(
            [sys.executable, "-m", __name__, told],
            env=os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
        )
        for rank in range(1, division.num_processes)
    ]


def _free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as bound:
        return int(bound.getsockname()[1])


def main(told: str) -> None:
    """Run a rank until rank 0 has ended."""
    model, division, settings, threads = json.loads(told)
    leave_to_rank_zero(model, ParallelOptions(**division), settings, threads=threads)


if __name__ == "__main__":
    main(sys.argv[1])
