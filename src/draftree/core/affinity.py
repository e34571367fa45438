"""Threads of this process: their number and the processors on which they run."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from draftree.core.errors import ConfigurationError
from draftree.core.processors import (
    ProcessorFacts,
    ThreadChoice,
    choose_threads,
    parse_processors,
    ranges,
    read_processors,
)

__all__ = ["apply_threads", "own_choice", "require_affinity"]

logger = logging.getLogger(__name__)

AUTO, NONE = "auto", "none"
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables with which the user chooses the number of threads."""


class _Given:
    """Whether a call chose the threads of this process, which later calls without a choice keep."""

    by_user = False


def own_choice() -> tuple[ProcessorFacts, ThreadChoice]:
    """Return the processors of this process and the choice of threads."""
    facts = read_processors()
    return facts, choose_threads(facts)


def require_affinity(affinity: str | None) -> None:
    """Raise for a malformed affinity.

    Raises:
        ConfigurationError: it is neither auto nor none, nor a list of processors.
    """
    if affinity not in (None, AUTO, NONE):
        parse_processors(affinity)


def apply_threads(threads: int | None, affinity: str | None = None) -> None:
    """Set the number of CPU threads of this process, and the processors on which all of its threads run.

    Args:
        threads: number of threads; None for the choice of `choose_threads`, if it is smaller than torch's own number
            and no program, environment variable or earlier call has chosen one.
        affinity: "auto" for the processors of `choose_threads`, a list such as "0-3,8", or "none" to leave the threads
            to the system; None is "auto" on machines with several memory nodes or kinds of cores, if the number of
            threads is chosen too, and "none" elsewhere.

    Raises:
        ConfigurationError: no thread, a malformed affinity, processors that this process may not use, or a system
            without affinity.
    """
    require_affinity(affinity)
    if threads is not None and threads < 1:
        raise ConfigurationError(f"threads is {threads}: it must be at least 1")
    if threads is None and affinity is None and _Given.by_user:
        return
    _Given.by_user = _Given.by_user or threads is not None or affinity is not None
    import torch  # after the refusals: `--help` and wrong arguments need no torch

    facts, choice = own_choice()
    is_default = threads is None and _is_default(facts)
    if threads is not None:
        torch.set_num_threads(threads)
    elif is_default and choice.threads < torch.get_num_threads():
        logger.info("%d threads: %s", choice.threads, "; ".join(choice.reasons) or "one for each core")
        torch.set_num_threads(choice.threads)
    if affinity is None:
        kinds = {one.is_fast for one in facts.processors}
        affinity = AUTO if is_default and (facts.num_nodes > 1 or len(kinds) > 1) else NONE
        if not hasattr(os, "sched_setaffinity"):
            affinity = NONE
    if affinity != NONE:
        _pin(choice.processors if affinity == AUTO else parse_processors(affinity), facts, affinity)


def _is_default(facts: ProcessorFacts) -> bool:
    """Return whether torch's number of threads is one that it chooses by itself."""
    if any(os.environ.get(name) for name in VARIABLES):
        return False
    import torch

    counts = {len(facts.processors), facts.num_cores, facts.num_online, os.cpu_count()}
    return torch.get_num_threads() in counts | {count // 2 for count in counts if count}


def _pin(processors: Sequence[int], facts: ProcessorFacts, affinity: str) -> None:
    """Let all threads of this process, and those that they start, run on these processors only."""
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigurationError(f"affinity is '{affinity}', which this system does not support: leave it out")
    usable = {one.number for one in facts.processors}
    if strange := sorted(set(processors) - usable):
        raise ConfigurationError(
            f"affinity is '{affinity}', but this process may not use processor {strange[0]}: "
            f"it may use {ranges(sorted(usable))}"
        )
    if set(processors) == usable:
        return
    for thread in _threads():
        try:
            os.sched_setaffinity(thread, processors)
        except ProcessLookupError:  # it has ended
            continue
        except OSError as error:
            raise ConfigurationError(f"affinity '{affinity}' cannot be set: {error.strerror}") from error


def _threads() -> list[int]:
    try:
        return [int(entry.name) for entry in Path("/proc/self/task").iterdir()]
    except OSError:
        return [0]
