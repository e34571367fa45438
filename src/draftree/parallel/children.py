"""Other ranks as child processes of rank 0, where no launcher starts them, as in a replica of Ray Serve."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

from draftree.core.errors import ConfigurationError
from draftree.options import ModelOptions
from draftree.parallel.entry import leave_to_rank_zero

LOOPBACK = "127.0.0.1"


def start_ranks(options: ModelOptions) -> list[subprocess.Popen[bytes]]:
    """Make this process rank 0 of a new job on this machine, and start its other ranks, which end with it."""
    if "RANK" in os.environ:
        raise ConfigurationError("this process is a rank of a job and cannot start another one: leave torchrun out")
    count = str(options.num_processes)
    with socket.create_server((LOOPBACK, 0)) as free:
        port = str(free.getsockname()[1])
    os.environ.update(WORLD_SIZE=count, LOCAL_WORLD_SIZE=count, MASTER_ADDR=LOOPBACK, MASTER_PORT=port)
    os.environ.update(RANK="0", LOCAL_RANK="0")
    arguments = json.dumps({"model": options.model, **options.loading})
    return [
        subprocess.Popen(
            [sys.executable, "-m", __name__, arguments],
            env=os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
        )
        for rank in range(1, options.num_processes)
    ]


def main(arguments: str) -> None:
    """Run a rank until rank 0 has ended."""
    leave_to_rank_zero(ModelOptions(**json.loads(arguments)))


if __name__ == "__main__":
    main(sys.argv[1])
