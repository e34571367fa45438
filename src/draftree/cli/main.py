"""The entry point: every error becomes one clear sentence and the right exit status.

Imports are inside functions, where Ctrl-C is handled: those here and in `draftree` itself take a few milliseconds.
"""

from __future__ import annotations

import atexit
import os
import sys

TYPE_CHECKING = False  # typing takes longer to import than all else here
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn


def open_standard_files() -> None:
    """Replace closed standard streams by the null device.

    The next opened file would take the stream's number, and a library's output would be written to it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, for as long as the process


def drop_output() -> None:
    """Redirect broken streams to the null device: Python flushes standard output once more at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            except (OSError, ValueError):
                continue  # it has no file descriptor


FAILED = 1
INTERRUPTED = 130
PIPE_CLOSED = 141
TERMINATED = 143


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    Exit status: 0 success, 1 an error, 2 wrong usage, 130 Ctrl-C, 141 the reader of standard output closed it,
    143 SIGTERM.
    """
    open_standard_files()
    try:
        from draftree.core.host import leaving_on_signals
    except KeyboardInterrupt:
        end(interrupted())
    with leaving_on_signals():
        status = run(sys.argv[1:] if arguments is None else arguments)
        drop_output()
        if status in (INTERRUPTED, TERMINATED):
            end(status)
    sys.exit(status)


def end(status: int) -> NoReturn:
    """Run what is registered for the end, and exit without Python's own end.

    That one waits for threads, or frees what a thread still uses, which aborts the process; and it sends itself SIGINT
    again if Ctrl-C arrived in `exec`, as in the import of a dataclass.
    """
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C ends at once
    atexit._run_exitfuncs()
    drop_output()
    os._exit(status)


def spare_threads() -> None:
    """Let libraries use one thread if the process has a limit on addresses.

    Tokenizers panic where no thread can be started, and OpenBLAS takes 32 MiB for each.
    """
    from draftree.core.host import address_space_limit

    if address_space_limit() is not None:
        for name in ("RAYON_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            os.environ.setdefault(name, "1")


def run(arguments: Sequence[str]) -> int:
    if sys.stdout is None:
        return complain("error: standard output is closed: send it to a file, or to /dev/null", FAILED)
    try:
        spare_threads()
        from draftree.cli.commands import invoke, tame_log

        survive_odd_characters()
        tame_log()
        status = invoke(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return interrupted()
    except BrokenPipeError:
        drop_output()
        return PIPE_CLOSED
    except SystemExit as leaving:
        return leave(leaving)
    except Exception as error:
        return complain(f"error: {sentence_of(error)}", FAILED)


def interrupted() -> int:
    """Print that Ctrl-C ended the command; a terminal echoes the key as ^C without a line break."""
    if sys.stderr is not None and sys.stderr.isatty():
        sys.stderr.write("\n")
    return complain("interrupted", INTERRUPTED)


def leave(leaving: SystemExit) -> int:
    """Return the status of a signal, or of a reader that closed standard output while a table was written."""
    if isinstance(leaving.__context__, BrokenPipeError):
        drop_output()
        return PIPE_CLOSED
    if leaving.code == TERMINATED:
        # imports that the signal interrupted are not tried again: they take long, or fail
        channel = sys.modules.get("draftree.parallel.channel")
        if channel is not None and (reason := channel.lost_process()):  # torchrun ends all when one has ended
            return complain(f"error: {reason}; {channel.ALONE}", FAILED)
        return complain("terminated", TERMINATED)
    raise leaving


def sentence_of(error: Exception) -> str:
    """Return the message of an expected error; raise any other error again."""
    from draftree.core.errors import OUT_OF_MEMORY, DraftreeError, is_out_of_memory

    if is_out_of_memory(error):
        return OUT_OF_MEMORY
    if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
        return f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
    if not isinstance(error, DraftreeError):
        raise error
    return str(error)


def survive_odd_characters() -> None:
    """Replace characters that a terminal cannot show by question marks."""
    for stream in (sys.stdout, sys.stderr):
        # a standard stream may be closed, or replaced by something simpler
        if reconfigure := getattr(stream, "reconfigure", None):
            reconfigure(errors="replace")


def complain(text: str, status: int) -> int:
    from draftree.core.errors import harmless

    if sys.stderr is not None:
        sys.stderr.write(" ".join(harmless(text).split()) + "\n")
    return status
