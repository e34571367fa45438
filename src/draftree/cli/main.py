"""The entry point: whatever happens, one clear sentence and the right exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

__all__ = ["main"]

FAILED = 1
INTERRUPTED = 130
PIPE_CLOSED = 141


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and leaves the program.

    Exit status: 0 done, 1 an error, 2 wrong usage, 130 Ctrl-C, 141 the reader of standard output went away.

    Args:
        arguments: without the program's name; None takes those of the process.
    """
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """As `main`, but gives the exit status back."""
    try:
        # inside: Ctrl-C may come while modules are imported
        from draftree.cli.commands import invoke

        survive_odd_characters()
        status = invoke(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        # a terminal shows the key as ^C, and stays in its line
        if sys.stderr is not None and sys.stderr.isatty():
            sys.stderr.write("\n")
        return complain("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # Python flushes standard output once more at exit, which must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        return complain(f"error: {error.strerror or error}{where}", FAILED)
    except Exception as error:
        from draftree.core.errors import DraftreeError

        if not isinstance(error, DraftreeError):
            raise
        return complain(f"error: {error}", FAILED)


def survive_odd_characters() -> None:
    """A terminal that can not show a character shows a question mark."""
    for stream in (sys.stdout, sys.stderr):
        # a standard stream may be closed, or replaced by something simpler
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def complain(text: str, status: int) -> int:
    if sys.stderr is not None:
        sys.stderr.write(" ".join(text.split()) + "\n")
    return status
