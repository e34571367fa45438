"""Python processes that start with torch, transformers and draftree imported.

A fork server imports them once; `python()` is a command prefix to use in place of `[sys.executable]`, with the options
that `subprocess` knows, and starts in milliseconds what an interpreter needs seconds for:

    subprocess.run([*forked.python(), "-m", "draftree", "generate", str(folder), "Hi"], ...)

The process of the command carries streams, signals and the exit status only (`forked_launcher.py`); the program runs
in a fork of the server, in its own session. Use `sys.executable` where the process itself is the subject: its imports,
variables that are read at import, terminals, memory, process numbers.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from pathlib import Path
from typing import Any, NoReturn

import torch

LAUNCHER = Path(__file__).with_name("forked_launcher.py")
IMPORTS = ("torch", "transformers", "draftree", "draftree.cli.main", "draftree.loading.load", "draftree.serve.app")


@functools.cache
def python() -> tuple[str, ...]:
    """Return the command of an interpreter; `-W ACTION`, `-c CODE`, `-m MODULE` or a script, and arguments follow."""
    if not hasattr(os, "pidfd_open"):  # Linux alone has them
        return (sys.executable,)
    folder = tempfile.mkdtemp(prefix="forked-")
    address = os.path.join(folder, "socket")
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # NumPy's threads would not survive a fork
    command = [sys.executable, __file__, address]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    atexit.register(_stop, server, address)
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n", "the fork server starts"
    return (sys.executable, "-I", "-S", str(LAUNCHER), address)


def _stop(server: subprocess.Popen[bytes], address: str) -> None:
    assert server.stdin is not None
    server.stdin.close()  # which ends the server, also if this process is killed
    server.wait()
    Path(address).unlink(missing_ok=True)
    os.rmdir(os.path.dirname(address))


class _Program:
    """What a launcher asks to run.

    Attributes:
        request: `arguments`, `folder`, `environment` and `umask`.
        streams: descriptors of its standard streams.
    """

    def __init__(self, request: dict[str, Any], streams: list[int]) -> None:
        self.request, self.streams = request, streams

    def enter(self) -> None:
        """Give this process the streams, folder and environment of the launcher."""
        os.setsid()
        for target, stream in enumerate(self.streams):
            os.dup2(stream, target)
            os.close(stream)
        os.chdir(self.request["folder"])
        os.umask(self.request["umask"])
        os.environ.clear()
        os.environ.update(self.request["environment"])
        if threads := os.environ.get("OMP_NUM_THREADS"):  # which torch reads at import
            torch.set_num_threads(int(threads))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)

    def run(self) -> None:
        """Run the program as the interpreter would."""
        arguments = list(self.request["arguments"])
        while arguments[:1] == ["-W"]:
            warnings.filterwarnings(arguments[1])  # the action alone
            del arguments[:2]
        kind = arguments.pop(0)
        if kind == "-c":
            code = arguments.pop(0)
            sys.argv, sys.path[0] = ["-c", *arguments], ""
            main = types.ModuleType("__main__")
            sys.modules["__main__"] = main
            exec(compile(code, "<string>", "exec"), main.__dict__)
        elif kind == "-m":
            module = arguments.pop(0)
            sys.argv, sys.path[0] = [module, *arguments], os.getcwd()
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = [kind, *arguments], os.path.dirname(os.path.abspath(kind))
            runpy.run_path(kind, run_name="__main__")


def _received(connection: socket.socket) -> _Program | None:
    """Read a request; None if the launcher ended before it was complete."""
    content, streams, _, _ = socket.recv_fds(connection, 4, 3)
    if len(content) < 4:
        return None
    size = struct.unpack("!I", content)[0]
    body = b""
    while len(body) < size:
        part = connection.recv(size - len(body))
        if not part:
            return None
        body += part
    return _Program(json.loads(body), streams)


def _serve(address: str) -> _Program | None:
    """Fork a process for each request. Returns its program in that process; None in the server when its parent ends."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    print("ready", flush=True)
    running: dict[int, tuple[int, socket.socket]] = {}  # number of the process and its launcher, by descriptor
    while True:
        ready, _, _ = select.select([0, listener, *running, *(launcher for _, launcher in running.values())], [], [])
        if 0 in ready:
            for pid, _ in running.values():
                os.kill(pid, signal.SIGKILL)
            return None
        for pidfd, (pid, launcher) in list(running.items()):
            if pidfd in ready:
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with launcher, contextlib.suppress(OSError):  # it may have been killed
                    launcher.sendall(struct.pack("!i", status))
                os.close(pidfd)
                del running[pidfd]
            elif launcher in ready:  # it was killed
                os.kill(pid, signal.SIGKILL)
                os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
        if listener in ready:
            launcher, _ = listener.accept()
            program = _received(launcher)
            if program is None:
                launcher.close()
                continue
            pid = os.fork()
            if pid == 0:
                for handle in (listener, launcher, *(other for _, other in running.values())):
                    handle.close()
                for pidfd in running:
                    os.close(pidfd)
                return program
            for stream in program.streams:
                os.close(stream)
            launcher.sendall(struct.pack("!i", pid))
            running[os.pidfd_open(pid)] = (pid, launcher)


def _end_as_an_interpreter(program: _Program) -> NoReturn:
    """Run a program and end the process with its status, without a second for freeing what the server imported."""
    status: int = 0
    try:
        program.run()
    except SystemExit as request:
        if not isinstance(request.code, int | None):
            print(request.code, file=sys.stderr)
        status = request.code if isinstance(request.code, int) else int(request.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed by its reader, or by the program
            stream.flush()
    if status < 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 0xFF)


def _main() -> None:
    for module in IMPORTS:
        __import__(module)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is meant for the tests
    assert len(os.listdir("/proc/self/task")) == 1, "only one thread can be forked"
    gc.freeze()
    program = _serve(sys.argv[1])
    if program is not None:
        program.enter()
        _end_as_an_interpreter(program)


if __name__ == "__main__":
    _main()
