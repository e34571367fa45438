"""Processors of this machine, and the choice of threads: physical cores, memory nodes, kinds of cores, quotas.

Everything is read from `/sys`, `/proc` and the control groups of Linux; elsewhere nothing is known, and nothing is
changed. One thread for each fast physical core of one memory node is the choice for passes that read weights: two
threads of a core share its load units, slow cores are the last ones in every phase, and memory of another node is
slower.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftree.core.errors import ConfigurationError

__all__ = [
    "Processor",
    "ProcessorFacts",
    "ThreadChoice",
    "choose_threads",
    "parse_processors",
    "ranges",
    "read_processors",
]

LEAST_SPEED = 0.75
"""Speed of a fast core relative to the fastest one: cores of one kind differ by a few percent."""
LARGEST_NUMBER = 1 << 16
"""Processors of a list have smaller numbers."""


@dataclass(frozen=True, slots=True)
class Processor:
    """A logical processor.

    Attributes:
        number: number of the system.
        core: smallest number of the logical processors of its physical core.
        node: its memory node.
        speed: largest clock rate or capacity relative to the fastest one, at most 1; 1 if unknown.
        is_efficient: whether the system lists it as an efficiency core.
    """

    number: int
    core: int
    node: int = 0
    speed: float = 1.0
    is_efficient: bool = False

    @property
    def is_fast(self) -> bool:
        """Whether it is a fast core."""
        return not self.is_efficient and self.speed >= LEAST_SPEED


@dataclass(frozen=True, slots=True)
class ProcessorFacts:
    """The processors that this process may use.

    Attributes:
        processors: logical processors that are online and in the affinity mask, by number.
        num_online: logical processors of the machine.
        quota: processors' worth of time that the control groups allow; None for no limit.
    """

    processors: tuple[Processor, ...]
    num_online: int
    quota: float | None = None

    @property
    def num_cores(self) -> int:
        """Number of physical cores."""
        return len({one.core for one in self.processors})

    @property
    def num_nodes(self) -> int:
        """Number of memory nodes."""
        return len({one.node for one in self.processors})


@dataclass(frozen=True, slots=True)
class ThreadChoice:
    """Number of threads, and the processors on which they run best.

    Attributes:
        threads: number of threads, at least 1.
        processors: one logical processor for each usable core.
        reasons: what reduced the number of logical processors, in the order of the steps.
    """

    threads: int
    processors: tuple[int, ...]
    reasons: tuple[str, ...]


def choose_threads(facts: ProcessorFacts) -> ThreadChoice:
    """Choose threads: one for each fast physical core of the memory node with most of them, within the quota."""
    reasons, cores = [], {one.core: one for one in reversed(facts.processors)}
    if not cores:
        return ThreadChoice(1, (), ())
    if len(cores) < len(facts.processors):
        reasons.append(f"{len(facts.processors)} logical processors are {len(cores)} physical cores")
    fast = {core: one for core, one in cores.items() if one.is_fast}
    if fast and len(fast) < len(cores):
        reasons.append(f"{len(cores) - len(fast)} slower cores are left out")
        cores = fast
    nodes: dict[int, list[Processor]] = {}
    for one in sorted(cores.values(), key=lambda one: one.number):
        nodes.setdefault(one.node, []).append(one)
    node = max(nodes, key=lambda node: (len(nodes[node]), -node))
    if len(nodes) > 1:
        reasons.append(f"memory node {node} of {len(nodes)}, which holds the weights")
    chosen = nodes[node]
    threads = len(chosen)
    if facts.quota is not None and int(facts.quota) < threads:
        threads = max(1, int(facts.quota))
        reasons.append(f"the quota of the control group is {facts.quota:g} processors")
    return ThreadChoice(threads, tuple(one.number for one in chosen), tuple(reasons))


def read_processors(root: Path = Path("/"), allowed: Iterable[int] | None = None) -> ProcessorFacts:
    """Read the processors from the files of the system.

    Args:
        root: folder that contains `sys` and `proc`.
        allowed: affinity mask; None for that of this process.
    """
    base = root / "sys" / "devices" / "system"
    online = _listed(base / "cpu" / "online")
    if not online:
        online = sorted(int(path.name[3:]) for path in base.glob("cpu/cpu[0-9]*"))
    if not online:
        count = os.cpu_count() or 1
        return ProcessorFacts(tuple(Processor(number, number) for number in range(count)), count)
    mask = set(_own_mask(online) if allowed is None else allowed)
    efficient = set(_listed(root / "sys" / "devices" / "cpu_atom" / "cpus"))
    efficient -= set(_listed(root / "sys" / "devices" / "cpu_core" / "cpus"))
    node_of = {
        number: int(path.parent.name[4:]) for path in base.glob("node/node[0-9]*/cpulist") for number in _listed(path)
    }
    speeds = _speeds(base, online)
    found = [
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
    return ProcessorFacts(tuple(found), len(online), _quota(root))


def parse_processors(text: str) -> list[int]:
    """Return the numbers of a list such as `0-3,8`.

    Raises:
        ConfigurationError: it is malformed or empty.
    """
    found: set[int] = set()
    for part in text.strip().split(","):
        match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last >= LARGEST_NUMBER:
            raise ConfigurationError(f"'{text}' is no list of processors: write numbers and ranges, such as 0-3,8")
        found.update(range(first, last + 1))
    return sorted(found)


def ranges(numbers: Sequence[int]) -> str:
    """Return a list of numbers with ranges, such as `0-3,8`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def _own_mask(online: Iterable[int]) -> Iterable[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else online


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
        given = {number: _text(base / "cpu" / f"cpu{number}" / name) for number in online}
        known = {number: int(text) for number, text in given.items() if text.isdigit() and int(text) > 0}
        if len(set(known.values())) > 1:
            return {number: known.get(number, max(known.values())) / max(known.values()) for number in online}
    return dict.fromkeys(online, 1.0)


def _quota(root: Path) -> float | None:
    """Return the smallest quota of the control groups of this process, in processors."""
    found = []
    for line in _text(root / "proc" / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        parts = [part for part in path.split("/") if part]
        if not controllers:  # version 2
            place = root / "sys" / "fs" / "cgroup"
            found += [_limit(folder / "cpu.max") for folder in _levels(place, parts)]
        elif "cpu" in controllers.split(","):
            for name in ("cpu", "cpu,cpuacct", "cpuacct,cpu"):
                place = root / "sys" / "fs" / "cgroup" / name
                found += [_limit_of_first_version(folder) for folder in _levels(place, parts)]
    limits = [limit for limit in found if limit is not None]
    return min(limits, default=None)


def _levels(place: Path, parts: list[str]) -> list[Path]:
    return [place.joinpath(*parts[:count]) for count in range(len(parts) + 1)]


def _limit(path: Path) -> float | None:
    words = _text(path).split()
    if len(words) != 2 or not (words[0].isdigit() and words[1].isdigit()) or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1])


def _limit_of_first_version(folder: Path) -> float | None:
    quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
    if not (quota.isdigit() and period.isdigit()) or int(period) == 0:  # -1 is no limit
        return None
    return int(quota) / int(period)
