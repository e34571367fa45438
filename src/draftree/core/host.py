"""The machine of this process: processors, threads and their affinity, memory, clock, signals and loopback names."""

from __future__ import annotations

import _thread
import ctypes
import functools
import gc
import logging
import mmap
import os
import platform
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from draftree.core.errors import ConfigurationError


def cpu_info(key: str) -> str | None:
    """Return the first value of a key in `/proc/cpuinfo`; None if there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == key), None)


def cpu_name() -> str:
    return cpu_info("model name") or platform.processor() or platform.machine()


def usable_cores() -> int | None:
    """Return the number of cores that this process may use; None if it is unknown."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


LEAST_SPEED = 0.75  # speed of a fast core relative to the fastest one: cores of one kind differ by a few percent
LARGEST_NUMBER = 1 << 16  # processors of a list have smaller numbers


@dataclass(frozen=True, slots=True)
class Processor:
    number: int  # number of the system
    core: int  # smallest number of the logical processors of its physical core
    node: int = 0  # its memory node
    speed: float = 1.0  # largest clock rate or capacity relative to the fastest one, at most 1; 1 if unknown
    is_efficient: bool = False  # whether the system lists it as an efficiency core

    @property
    def is_fast(self) -> bool:
        return not self.is_efficient and self.speed >= LEAST_SPEED


@dataclass(frozen=True, slots=True)
class ProcessorFacts:
    """The processors that this process may use."""

    processors: tuple[Processor, ...]  # logical processors that are online and in the affinity mask, by number
    num_online: int  # logical processors of the machine
    quota: float | None = None  # processors' worth of time that the control groups allow; None for no limit

    @property
    def num_cores(self) -> int:
        return len({processor.core for processor in self.processors})

    @property
    def num_nodes(self) -> int:
        return len({processor.node for processor in self.processors})


@dataclass(frozen=True, slots=True)
class ThreadChoice:
    """Number of threads, and the processors on which they run best."""

    threads: int  # number of threads, at least 1
    processors: tuple[int, ...]  # one logical processor for each usable core
    reasons: tuple[str, ...]  # what reduced the number of logical processors, in the order of the steps


def choose_threads(facts: ProcessorFacts) -> ThreadChoice:
    """Choose threads: one for each fast physical core of the memory node with most of them, within the quota."""
    reasons = []
    cores = {processor.core: processor for processor in reversed(facts.processors)}
    if not cores:
        return ThreadChoice(1, (), ())
    if len(cores) < len(facts.processors):
        reasons.append(f"{len(facts.processors)} logical processors are {len(cores)} physical cores")
    fast = {core: processor for core, processor in cores.items() if processor.is_fast}
    if fast and len(fast) < len(cores):
        reasons.append(f"{len(cores) - len(fast)} slower cores are left out")
        cores = fast
    nodes: dict[int, list[Processor]] = {}
    for processor in sorted(cores.values(), key=lambda processor: processor.number):
        nodes.setdefault(processor.node, []).append(processor)
    node = max(nodes, key=lambda node: (len(nodes[node]), -node))
    if len(nodes) > 1:
        reasons.append(f"memory node {node} of {len(nodes)}, which holds the weights")
    chosen = nodes[node]
    threads = len(chosen)
    if facts.quota is not None and int(facts.quota) < threads:
        threads = max(1, int(facts.quota))
        reasons.append(f"the quota of the control group is {facts.quota:g} processors")
    return ThreadChoice(threads, tuple(processor.number for processor in chosen), tuple(reasons))


def read_processors(root: Path = Path("/"), allowed: Iterable[int] | None = None) -> ProcessorFacts:
    """Read the processors of an affinity mask, by default this process's, from the files of the system."""
    base = root / "sys" / "devices" / "system"
    online = _listed(base / "cpu" / "online") or sorted(int(path.name[3:]) for path in base.glob("cpu/cpu[0-9]*"))
    if not online:
        count = os.cpu_count() or 1
        return ProcessorFacts(tuple(Processor(number, number) for number in range(count)), count)
    if allowed is None:
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else online
    mask = set(allowed)
    efficient = set(_listed(root / "sys" / "devices" / "cpu_atom" / "cpus"))
    efficient -= set(_listed(root / "sys" / "devices" / "cpu_core" / "cpus"))
    node_of = {
        number: int(path.parent.name[4:]) for path in base.glob("node/node[0-9]*/cpulist") for number in _listed(path)
    }
    speeds = _speeds(base, online)
    processors = [
        Processor(
            number,
            min(_listed(base / "cpu" / f"cpu{number}" / "topology" / "thread_siblings_list") or [number]),
            node_of.get(number, 0),
            speeds[number],
            number in efficient,
        )
        for number in online
        if number in mask
    ]
    return ProcessorFacts(tuple(processors), len(online), _quota(root))


def parse_processors(text: str) -> list[int]:
    """Return the numbers of a list such as `0-3,8`."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last >= LARGEST_NUMBER:
            raise ConfigurationError(f"'{text}' is no list of processors: write numbers and ranges, such as 0-3,8")
        numbers.update(range(first, last + 1))
    return sorted(numbers)


def ranges(numbers: Sequence[int]) -> str:
    """Return a list of numbers with ranges, such as `0-3,8`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def _listed(path: Path) -> list[int]:
    text = _text(path)
    try:
        return parse_processors(text) if text else []
    except ConfigurationError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _speeds(base: Path, online: Iterable[int]) -> dict[int, float]:
    """Return capacities or, where all are equal or unknown, largest clock rates, relative to the largest one."""
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        texts = {number: _text(base / "cpu" / f"cpu{number}" / name) for number in online}
        known = {number: int(text) for number, text in texts.items() if text.isdigit() and int(text) > 0}
        if len(set(known.values())) > 1:
            return {number: known.get(number, max(known.values())) / max(known.values()) for number in online}
    return dict.fromkeys(online, 1.0)


def _quota(root: Path) -> float | None:
    """Return the smallest quota of the control groups of this process, in processors."""
    groups = root / "sys" / "fs" / "cgroup"
    limits = []
    for line in _text(root / "proc" / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        parts = [part for part in path.split("/") if part]
        levels = ["/".join(parts[:count]) for count in range(len(parts) + 1)]
        if not controllers:  # version 2
            limits += [_limit(_text(groups / level / "cpu.max").split()) for level in levels]
        elif "cpu" in controllers.split(","):
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            folders = [groups / name / level for name in ("cpu", "cpu,cpuacct", "cpuacct,cpu") for level in levels]
            limits += [_limit([_text(folder / file) for file in names]) for folder in folders]
    return min((limit for limit in limits if limit is not None), default=None)


def _limit(words: Sequence[str]) -> float | None:
    """Return the processors of a quota and its period; None for no limit, which is written "max" or -1."""
    if len(words) != 2 or not (words[0].isdigit() and words[1].isdigit()) or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1])


logger = logging.getLogger(__name__)

AUTO, NONE = "auto", "none"
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables with which the user chooses the number of threads."""


class _Given:
    """Whether a call chose the threads of this process, which later calls without a choice keep."""

    by_user = False


def own_choice() -> tuple[ProcessorFacts, ThreadChoice]:
    facts = read_processors()
    return facts, choose_threads(facts)


def require_affinity(affinity: str | None) -> None:
    if affinity not in (None, AUTO, NONE):
        parse_processors(affinity)


def apply_threads(threads: int | None, affinity: str | None = None) -> None:
    """Set the number of CPU threads of this process, and the processors on which all of its threads run.

    `threads`: number of threads; None for the choice of `choose_threads`, if it is smaller than torch's own number and
    no program, environment variable or earlier call has chosen one. `affinity`: "auto" for the processors of
    `choose_threads`, a list such as "0-3,8", or "none" to leave the threads to the system; None is "auto" on machines
    with several memory nodes or kinds of cores, if the number of threads is chosen too, and "none" elsewhere.
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
        kinds = {processor.is_fast for processor in facts.processors}
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
    usable = {processor.number for processor in facts.processors}
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


class Libraries(NamedTuple):
    """The libraries that torch computes with: OpenMP, and MKL if it is a part of torch."""

    openmp: Any
    mkl: Any


@contextmanager
def single_threaded() -> Iterator[None]:
    """Inside, the calling thread computes alone; other threads are left as they are. May be nested."""
    libs = libraries()
    if libs is None:
        yield
        return
    before = libs.openmp.omp_get_max_threads()
    libs.openmp.omp_set_num_threads(1)
    mkl_before = libs.mkl.MKL_Set_Num_Threads_Local(1) if libs.mkl else 0
    try:
        yield
    finally:
        libs.openmp.omp_set_num_threads(before)
        if libs.mkl:
            libs.mkl.MKL_Set_Num_Threads_Local(mkl_before)


@functools.cache
def libraries() -> Libraries | None:
    """Return the libraries that torch has loaded; None if they cannot be found."""
    try:
        openmp = ctypes.CDLL(None)
        _ = openmp.omp_get_max_threads, openmp.omp_set_num_threads
    except (AttributeError, OSError, TypeError):
        return None
    import torch

    for file in (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"):
        with suppress(AttributeError, OSError):
            mkl = ctypes.CDLL(str(file))
            _ = mkl.MKL_Set_Num_Threads_Local
            return Libraries(openmp, mkl)
    return Libraries(openmp, None)


def return_free_memory() -> None:
    """Collect unreachable objects, and return free pages of the C library's heap to the system.

    The GNU library keeps up to 64 MB of freed temporaries; other libraries return them themselves.
    """
    gc.collect()
    if os.name != "posix":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def address_space_limit() -> int | None:
    """Return the bytes of memory that this process may map (`ulimit -v`); None for no limit."""
    if sys.platform == "win32":
        return None
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def require_address_space(count: int) -> None:
    """Raise MemoryError if this process may not map so many more bytes; unknown outside Linux."""
    limit = address_space_limit()
    try:
        pages = None if limit is None else int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        pages = None
    if limit is not None and pages is not None and limit - pages * mmap.PAGESIZE < count:
        raise MemoryError(f"{count >> 20} MiB of memory cannot be mapped")


@contextmanager
def without_collection() -> Iterator[None]:
    """Collect no garbage inside, unless it was off already: imports make many objects that stay.

    The collector is that of the process, so that other threads have none meanwhile either.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def spare_collection() -> None:
    """Exempt all present objects from later collections, to be called when modules that stay were imported.

    Otherwise each full collection examines every object of torch, and so do those of Python's exit, which take 0.4 s.
    Not for use at the exit itself: some libraries report their objects that are not collected then as leaks.
    """
    gc.freeze()


BYTE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
BYTE_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_bytes(text: str) -> int:
    """Return a number of bytes such as "8MiB", "500 MB" or "1048576"."""
    size = SIZE.fullmatch(text)
    if size is None or size[2].upper() not in BYTE_UNITS:
        raise ValueError(f"'{text}' is not a number of bytes: write for example 8MiB, 4GiB or 1000000")
    return int(float(size[1]) * BYTE_UNITS[size[2].upper()])


def parse_size(text: str | int) -> int:
    """Return the bytes of `offload`, such as "8GB", "1.5GiB" or 600000000; a text needs a unit."""
    if isinstance(text, int) and not isinstance(text, bool) and text > 0:
        return text
    with suppress(ValueError):
        if isinstance(text, str) and text.strip()[-1:].isalpha() and (size := parse_bytes(text)) > 0:
            return size
    raise ConfigurationError(
        f"offload is {text!r}: give the memory for weights, a number with KB, MB, GB, KiB, MiB or GiB, such as 8GB"
    )


Clock = Callable[[], float]  # seconds since a fixed moment; monotonic
SYSTEM_CLOCK: Clock = time.perf_counter


def is_loopback(name: str) -> bool:
    """Return whether a name or an address, without brackets, is one of this machine's own."""
    import ipaddress

    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


SIGNALLED = 128  # offset from a signal number to the exit status of a process that the signal ended
AGAIN_SECONDS = 0.01
NAMES = ("SIGTERM", "SIGHUP")


@contextmanager
def leaving_on_signals() -> Iterator[None]:
    """Raise `SystemExit` with the status that a shell would report on a termination or a lost terminal.

    Handlers that the program has set stay in place; threads other than the main one are not affected. A signal during a
    finalizer, where Python drops exceptions, arrives again directly after it.
    """
    taken, hook = [], sys.unraisablehook
    sys.unraisablehook = partial(_signal_again, hook)
    if threading.current_thread() is threading.main_thread():
        numbers = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]
        taken = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, _leave)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _signal_again(hook: Callable[[Any], Any], dropped: Any) -> None:
    number = dropped.exc_value.number if isinstance(dropped.exc_value, _Left) else None
    if issubclass(dropped.exc_type, KeyboardInterrupt):
        number = signal.SIGINT
    if number is None:
        hook(dropped)
    else:
        threading.Timer(AGAIN_SECONDS, _signal_main, [number]).start()  # at once, it would be dropped again


def _signal_main(number: int) -> None:
    if hasattr(signal, "pthread_kill"):  # a real signal ends calls that wait
        signal.pthread_kill(threading.main_thread().ident or 0, number)
    else:
        _thread.interrupt_main(signal.Signals(number))


class _Left(SystemExit):
    def __init__(self, number: int) -> None:
        super().__init__(SIGNALLED + number)
        self.number = number


def _leave(number: int, frame: Any) -> None:
    raise _Left(number)
