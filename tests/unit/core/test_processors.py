"""The choice of threads on machines that folders imitate: physical cores, nodes, kinds of cores, quotas."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from draftree import LLM
from draftree.core import host
from draftree.core.errors import ConfigurationError
from draftree.core.host import (
    Processor,
    ProcessorFacts,
    choose_threads,
    parse_processors,
    ranges,
    read_processors,
    require_address_space,
)
from draftree.models.table import TableLM, hashed


class Machine:
    """A folder like the root of a system."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: object) -> None:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f"{text}\n", "utf-8")

    def processors(self, count: int, *, siblings: int = 1, nodes: int = 1, online: str = "") -> None:
        """`count` logical processors; the second ones of all cores follow the first ones of all cores."""
        base, cores = "sys/devices/system", count // siblings
        self.write(f"{base}/cpu/online", online or f"0-{count - 1}")
        for number in range(count):
            own = range(number % cores, count, cores)
            self.write(f"{base}/cpu/cpu{number}/topology/thread_siblings_list", ",".join(map(str, own)))
        for node in range(nodes):
            held = [n for n in range(count) if n % cores * nodes // cores == node]
            self.write(f"{base}/node/node{node}/cpulist", ranges(held))

    def speeds(self, name: str, values: list[int]) -> None:
        for number, value in enumerate(values):
            self.write(f"sys/devices/system/cpu/cpu{number}/{name}", value)

    def chosen(self, allowed: range | None = None) -> tuple[int, tuple[int, ...], str]:
        found = choose_threads(read_processors(self.root, allowed or range(4096)))
        return found.threads, found.processors, "; ".join(found.reasons)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_laptop_of_equal_cores(machine: Machine) -> None:
    machine.processors(4)
    assert machine.chosen() == (4, (0, 1, 2, 3), "")


def test_two_threads_of_a_core_are_one_core(machine: Machine) -> None:
    machine.processors(16, siblings=2)
    assert machine.chosen() == (8, tuple(range(8)), "16 logical processors are 8 physical cores")
    assert machine.chosen(range(6, 12))[:2] == (6, tuple(range(6, 12)))  # 8 to 11 are second threads of 0 to 3
    assert machine.chosen(range(10))[:2] == (8, tuple(range(8)))


def test_the_memory_node_with_most_cores(machine: Machine) -> None:
    machine.processors(32, siblings=2, nodes=2)
    threads, processors, why = machine.chosen()
    assert (threads, processors) == (8, tuple(range(8)))
    assert "memory node 0 of 2" in why
    assert machine.chosen(range(5, 16))[:2] == (8, tuple(range(8, 16)))


def test_efficiency_cores_of_a_hybrid_processor(machine: Machine) -> None:
    machine.processors(12)
    machine.write("sys/devices/cpu_core/cpus", "0-3")
    machine.write("sys/devices/cpu_atom/cpus", "4-11")
    assert machine.chosen() == (4, (0, 1, 2, 3), "8 slower cores are left out")
    assert machine.chosen(range(6, 12))[:2] == (6, tuple(range(6, 12)))  # nothing else is allowed


@pytest.mark.parametrize(
    ("name", "values", "wanted"),
    [
        ("cpu_capacity", [290, 290, 290, 290, 870, 870, 870, 1024], 4),
        ("cpufreq/cpuinfo_max_freq", [5_100_000] * 4 + [3_300_000] * 4, 4),
        ("cpufreq/cpuinfo_max_freq", [5_700_000, 5_500_000, 5_500_000, 5_350_000] * 2, 8),
        ("cpu_capacity", [1024] * 8, 8),
    ],
)
def test_cores_of_several_speeds(machine: Machine, name: str, values: list[int], wanted: int) -> None:
    machine.processors(8)
    machine.speeds(name, values)
    threads, processors, _ = machine.chosen()
    assert threads == wanted
    assert set(processors) == {n for n in range(8) if values[n] >= 0.75 * max(values)}


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({"sys/fs/cgroup/a/b/cpu.max": "250000 100000", "sys/fs/cgroup/a/cpu.max": "max 100000"}, 2),
        ({"sys/fs/cgroup/a/b/cpu.max": "max 100000", "sys/fs/cgroup/a/cpu.max": "300000 100000"}, 3),
        ({"sys/fs/cgroup/cpu.max": "50000 100000"}, 1),
        ({"sys/fs/cgroup/a/b/cpu.max": "max 100000"}, 8),
        ({"sys/fs/cgroup/a/b/cpu.max": "nonsense"}, 8),
        ({}, 8),
    ],
)
def test_quotas_of_control_groups(machine: Machine, files: dict[str, str], wanted: int) -> None:
    machine.processors(8)
    machine.write("proc/self/cgroup", "0::/a/b")
    for path, text in files.items():
        machine.write(path, text)
    threads, processors, why = machine.chosen()
    assert (threads, len(processors)) == (wanted, 8)
    assert ("quota" in why) == (wanted < 8)


def test_quotas_of_the_first_version(machine: Machine) -> None:
    machine.processors(8)
    machine.write("proc/self/cgroup", "4:cpu,cpuacct:/docker/x\n1:name=systemd:/")
    machine.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1")
    machine.write("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000")
    assert machine.chosen()[0] == 8
    machine.write("sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us", "400000")
    machine.write("sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_period_us", "100000")
    assert machine.chosen()[0] == 4


def test_offline_processors_and_missing_files(machine: Machine, tmp_path: Path) -> None:
    machine.processors(8, online="0-2,5")
    assert machine.chosen()[1] == (0, 1, 2, 5)
    empty = read_processors(tmp_path / "nothing", range(4096))
    assert len(empty.processors) == empty.num_online == os.cpu_count()


def test_this_machine() -> None:
    facts = read_processors()
    choice = choose_threads(facts)
    assert {one.number for one in facts.processors} == os.sched_getaffinity(0)
    assert 1 <= choice.threads <= facts.num_cores
    assert choose_threads(ProcessorFacts((), 0)).threads == 1


@pytest.mark.parametrize("text", ["", "a", "3-1", "1,,2", "1-", "-1", "99999", "0x1", "1 2"])
def test_lists_that_are_none(text: str) -> None:
    with pytest.raises(ConfigurationError, match="no list of processors"):
        parse_processors(text)


def test_lists() -> None:
    assert parse_processors("0-3,8, 10-11") == [0, 1, 2, 3, 8, 10, 11]
    assert ranges([0, 1, 2, 3, 8, 10, 11]) == "0-3,8,10-11"


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Calls that would set affinities; the number of threads is restored."""
    before, calls = torch.get_num_threads(), list[Any]()
    monkeypatch.setattr(host._Given, "by_user", False)
    for name in host.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, mask: calls.append(sorted(mask)), raising=False)
    yield calls
    torch.set_num_threads(before)


def facts_of(monkeypatch: pytest.MonkeyPatch, *processors: Processor, quota: float | None = None) -> None:
    found = ProcessorFacts(processors, len(processors), quota)
    monkeypatch.setattr(host, "read_processors", lambda: found)


def test_a_choice_replaces_the_number_of_torch_only(threads: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    facts_of(monkeypatch, *(Processor(n, n) for n in range(4)), quota=1.5)
    torch.set_num_threads(4)
    host.apply_threads(None)
    assert (torch.get_num_threads(), threads) == (1, [])
    torch.set_num_threads(3)  # not a number that torch chooses
    host.apply_threads(None)
    assert torch.get_num_threads() == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    torch.set_num_threads(4)
    host.apply_threads(None)
    assert torch.get_num_threads() == 4


def test_a_given_number_is_kept_by_later_calls(threads: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    facts_of(monkeypatch, *(Processor(n, n) for n in range(4)), quota=1.0)
    host.apply_threads(4)
    host.apply_threads(None)
    assert torch.get_num_threads() == 4
    with pytest.raises(ConfigurationError, match="threads is 0"):
        host.apply_threads(0)


@pytest.mark.parametrize(
    ("processors", "given", "wanted"),
    [
        ([Processor(0, 0), Processor(1, 1), Processor(2, 2, 1)], None, [0, 1]),
        ([Processor(0, 0, 0, 0.5), Processor(1, 1)], None, [1]),
        ([Processor(0, 0), Processor(1, 0)], None, None),
        ([Processor(0, 0), Processor(1, 0)], "auto", [0]),
        ([Processor(0, 0), Processor(1, 1), Processor(2, 2)], "1-2", [1, 2]),
        ([Processor(0, 0), Processor(1, 1, 1)], "none", None),
        ([Processor(0, 0), Processor(1, 1)], "0-1", None),
    ],
)
def test_affinities(
    processors: list[Processor],
    given: str | None,
    wanted: list[int] | None,
    threads: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts_of(monkeypatch, *processors)
    torch.set_num_threads(len(processors))
    host.apply_threads(None, given)
    assert threads == [wanted] * len(threads)
    assert bool(threads) == (wanted is not None)


def test_affinities_that_are_refused(threads: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    facts_of(monkeypatch, Processor(0, 0), Processor(1, 1))
    with pytest.raises(ConfigurationError, match="may not use processor 7: it may use 0-1"):
        LLM(TableLM(hashed(8, seed=1)), "none", affinity="0,7")
    with pytest.raises(ConfigurationError, match="'some' is no list of processors"):
        LLM(TableLM(hashed(8, seed=1)), "none", affinity="some")
    monkeypatch.delattr(os, "sched_setaffinity")
    with pytest.raises(ConfigurationError, match="which this system does not support"):
        LLM(TableLM(hashed(8, seed=1)), "none", affinity="auto")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="what is mapped is known on Linux")
def test_more_address_space_than_is_left_is_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    require_address_space(1 << 60)  # no limit
    monkeypatch.setattr(host, "address_space_limit", lambda: 1 << 60)
    require_address_space(1 << 59)
    with pytest.raises(MemoryError, match="1024 MiB of memory cannot be mapped"):
        monkeypatch.setattr(host, "address_space_limit", lambda: 1 << 30)
        require_address_space(1 << 30)
