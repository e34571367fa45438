"""Draft models in processes of their own, which compute while the target does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import weakref
from multiprocessing.connection import Connection

from draftree.core.errors import ModelLoadError
from draftree.models.process import ProcessEndedError, ProcessModel, serve_model
from draftree.options import ModelOptions

END_SECONDS = 5.0  # time for the process to end after its pipe was closed; then it is killed


def load_apart(options: ModelOptions, *, must_quantize: bool = False) -> ProcessModel:
    """Load a model in a process of its own, which ends with the model or with this process."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "draftree.loading.apart", str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=dict(os.environ))
    theirs.close()
    connection = Connection(ours.detach())
    try:
        connection.send((options, must_quantize))
        model = ProcessModel(connection)
    except (ProcessEndedError, OSError) as error:
        _end(connection, process)
        raise ModelLoadError(
            f"drafter '{options.model}' could not be loaded in a process of its own: {error}"
        ) from error
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
    options: ModelOptions
    options, must_quantize = connection.recv()
    try:
        import torch

        from draftree.loading.load import load_model
        from draftree.models.native.build import NativeUnavailableError

        torch.set_num_threads(options.threads or torch.get_num_threads())
        try:
            loaded = load_model(options)
        except NativeUnavailableError:
            if must_quantize:
                raise
            loaded = load_model(options, quantization=None)
    except Exception as error:  # the other side raises it
        connection.send(ProcessEndedError(f"the process of the model failed: {error}"))
        return
    serve_model(connection, loaded.model)


if __name__ == "__main__":
    main(int(sys.argv[1]))
