"""The entry point: whatever happens, one clear sentence and the right exit status."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from draftree.cli.streams import drop_output, open_standard_files, tame_log
from draftree.core.exhaustion import OUT_OF_MEMORY, is_out_of_memory
from draftree.core.plain_text import harmless
from draftree.core.signals import leaving_on_signals

__all__ = ["main"]

FAILED = 1
INTERRUPTED = 130
PIPE_CLOSED = 141
TERMINATED = 143


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and leaves the program.

    Exit status: 0 done, 1 an error, 2 wrong usage, 130 Ctrl-C, 141 the reader of standard output went away,
    143 SIGTERM.

    Args:
        arguments: without the program's name; None takes those of the process.
    """
    open_standard_files()
    with leaving_on_signals():
        status = run(sys.argv[1:] if arguments is None else arguments)
        drop_output()
    sys.exit(status)


def run(arguments: Sequence[str]) -> int:
    """As `main`, but gives the exit status back."""
    if sys.stdout is None:
        return complain("error: standard output is closed: send it to a file, or to /dev/null", FAILED)
    try:
        # inside: Ctrl-C may come while modules are imported
        from draftree.cli.commands import invoke

        survive_odd_characters()
        tame_log()
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
        drop_output()
        return PIPE_CLOSED
    except SystemExit as leaving:
        return leave(leaving)
    except Exception as error:
        return fail(error)


def leave(leaving: SystemExit) -> int:
    """The status of a signal, or of a reader that went away while a table was written."""
    if isinstance(leaving.__context__, BrokenPipeError):
        drop_output()
        return PIPE_CLOSED
    if leaving.code == TERMINATED:
        return complain("terminated", TERMINATED)
    raise leaving


def fail(error: Exception) -> int:
    """One sentence for an error that is no bug; a bug is raised again."""
    from draftree.core.errors import DraftreeError

    if is_out_of_memory(error):
        return complain(f"error: {OUT_OF_MEMORY}", FAILED)
    if isinstance(error, OSError):
        where = f": {error.filename}" if error.filename else ""
        return complain(f"error: {error.strerror or error}{where}", FAILED)
    if not isinstance(error, DraftreeError):
        raise error
    return complain(f"error: {error}", FAILED)


def survive_odd_characters() -> None:
    """A terminal that cannot show a character shows a question mark."""
    for stream in (sys.stdout, sys.stderr):
        # a standard stream may be closed, or replaced by something simpler
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def complain(text: str, status: int) -> int:
    if sys.stderr is not None:
        sys.stderr.write(" ".join(harmless(text).split()) + "\n")
    return status
