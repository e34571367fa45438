"""Draft models in processes of their own, which compute while the target does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import weakref
from multiprocessing.connection import Connection
from typing import Any

from draftree.core.errors import ModelLoadError
from draftree.models.process import ProcessEndedError, ProcessModel, serve_model

END_SECONDS = 5.0  # time for the process to end after its pipe was closed; then it is killed


def load_apart(
    name: str,
    *,
    threads: int,
    quantization: str | None,
    must_quantize: bool = False,
    trust_remote_code: bool = False,
) -> ProcessModel:
    """Load a model on the CPU in a process of its own, which ends with the model or with this process."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "draftree.loading.apart", str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=dict(os.environ))
    theirs.close()
    connection = Connection(ours.detach())
    settings = {"name": name, "quantization": quantization, "trust_remote_code": trust_remote_code}
    settings["must_quantize"] = must_quantize
    try:
        connection.send(settings | {"threads": threads})
        model = ProcessModel(connection)
    except (ProcessEndedError, OSError) as error:
        _end(connection, process)
        raise ModelLoadError(f"drafter '{name}' could not be loaded in a process of its own: {error}") from error
    weakref.finalize(model, _end, connection, process)
    return model


def _end(connection: Connection, process: subprocess.Popen[bytes]) -> None:
    connection.close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main(descriptor: int) -> None:
    """Load the model that the first message names, and serve it until the other side ends."""
    connection = Connection(descriptor)
    settings: dict[str, Any] = connection.recv()
    try:
        import torch

        from draftree.loading.load import load_model
        from draftree.models.native.build import NativeUnavailableError

        torch.set_num_threads(settings.pop("threads"))
        must_quantize = settings.pop("must_quantize")
        try:
            loaded = load_model(**settings, device="cpu")
        except NativeUnavailableError:
            if must_quantize:
                raise
            loaded = load_model(**(settings | {"quantization": None}), device="cpu")
    except Exception as error:  # the other side raises it
        connection.send(ProcessEndedError(f"the process of the model failed: {error}"))
        return
    serve_model(connection, loaded.model)


if __name__ == "__main__":
    main(int(sys.argv[1]))
