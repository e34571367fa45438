"""The machine of a process: processors, threads, collection, clock and signals."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import draftree
from draftree import LLM, SamplingParams
from draftree.core import host
from draftree.core.errors import ConfigurationError, GenerationError
from draftree.core.host import (
    Processor,
    ProcessorFacts,
    choose_threads,
    leaving_on_signals,
    parse_processors,
    ranges,
    read_processors,
    require_address_space,
    single_threaded,
    without_collection,
)
from draftree.models.native.model import NativeModel
from draftree.models.table import TableLM, hashed
from draftree.sampling.distributions import Distributions
from native_samples import native


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


PARAMS = SamplingParams(max_tokens=4, temperature=0, repetition_penalty=1.2)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    if host.libraries() is None:
        pytest.skip("torch has no OpenMP here that can be found")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_only_this_thread_is_single_threaded() -> None:
    found: list[int] = []
    with single_threaded():
        assert torch.get_num_threads() == 1
        other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        other.start()
        other.join()
    assert found == [2]
    assert torch.get_num_threads() == 2


def test_nested_contexts_restore_in_order() -> None:
    with single_threaded():
        with single_threaded():
            pass
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


def test_threads_come_back_after_an_error() -> None:
    with pytest.raises(KeyboardInterrupt), single_threaded():
        raise KeyboardInterrupt
    assert torch.get_num_threads() == 2


@pytest.fixture(scope="module")
def in_c() -> NativeModel:
    if shutil.which("cc") is None:
        pytest.skip("native kernels need a C compiler")
    return native("llama")


def counted(monkeypatch: pytest.MonkeyPatch) -> tuple[set[int], set[int]]:
    """Torch's threads after distributions were processed, and before passes."""
    processed, run = Distributions._processed, NativeModel.run
    works: set[int] = set()
    passes: set[int] = set()

    def counting(distributions: Distributions) -> torch.Tensor:
        logits = processed(distributions)
        works.add(torch.get_num_threads())
        return logits

    monkeypatch.setattr(Distributions, "_processed", counting)
    monkeypatch.setattr(NativeModel, "run", lambda own, one: passes.add(torch.get_num_threads()) or run(own, one))
    return works, passes


def test_a_round_computes_in_one_thread_after_a_pass_in_c(in_c: NativeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    works, passes = counted(monkeypatch)
    LLM(in_c, "none").generate([[1, 2, 3], [4, 5]], replace(PARAMS, prompt_logprobs=1, logprobs=1))
    assert works == {1}
    assert passes == {2}
    assert torch.get_num_threads() == 2


def test_a_round_of_a_model_of_torch_computes_in_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    works, _ = counted(monkeypatch)
    LLM(TableLM(hashed(13, seed=1)), "none").generate([[1, 2, 3]], PARAMS)
    assert works == {2}


def test_threads_come_back_after_a_failure(in_c: NativeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []

    def failing(distributions: Distributions) -> torch.Tensor:
        assert distributions.raw is not None
        found.append(torch.get_num_threads())
        raise RuntimeError("no distribution")

    monkeypatch.setattr(Distributions, "_processed", failing)
    with pytest.raises((GenerationError, RuntimeError), match="no distribution"):
        LLM(in_c, "none").generate([[1, 2, 3]], PARAMS)
    assert set(found) == {1}
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("operation", ["clone", "exp", "sum"])
def test_no_other_thread_takes_part_in_an_operation(operation: str) -> None:
    """By CPU time, which load does not lengthen: a thread that is woken spins for milliseconds afterwards."""
    work = getattr(torch.randn(1, 400_000), operation)

    def share_of_others() -> float:
        whole, own = time.process_time(), time.thread_time()
        work()
        own = time.thread_time() - own
        return 1 - own / (time.process_time() - whole)

    with single_threaded():
        # threads that were woken before may still spin at first
        assert any(share_of_others() < 0.05 for _ in range(1000))
    assert any(share_of_others() > 0.05 for _ in range(1000))


def test_the_collector_is_off_inside_and_on_again_after_an_error() -> None:
    assert gc.isenabled()
    with pytest.raises(KeyError), without_collection():
        assert not gc.isenabled()
        raise KeyError("x")
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with without_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_package_imports_its_modules_without_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def imported(_: str) -> Any:
        found.append(gc.isenabled())
        return SimpleNamespace(LLM=1)

    monkeypatch.setattr(draftree, "import_module", imported)
    monkeypatch.delitem(vars(draftree), "LLM", raising=False)
    assert draftree.LLM == 1
    assert found == [False]
    assert gc.isenabled()


class Signalled:
    """An object whose finalizer gets a signal."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        signal.raise_signal(self.number)


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_during_a_finalizer_is_not_lost(number: int, raised: type[BaseException]) -> None:
    with pytest.raises(raised), leaving_on_signals():
        Signalled(number)
        time.sleep(600)
