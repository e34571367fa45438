"""Rounds after native passes run torch single-threaded, and restore its threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from draftree import LLM, SamplingParams
from draftree.core import threads
from draftree.core.errors import GenerationError
from draftree.core.threads import one_thread
from draftree.models.table import TableLM, hashed
from draftree.sampling.distributions import Distributions

PARAMS = SamplingParams(max_tokens=4, temperature=0, repetition_penalty=1.2)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    if threads.libraries() is None:
        pytest.skip("torch has no OpenMP here that can be found")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_only_this_thread_is_single_threaded() -> None:
    found: list[int] = []
    with one_thread():
        assert torch.get_num_threads() == 1
        other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        other.start()
        other.join()
    assert found == [2]
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(("own_threads", "wanted"), [(True, 1), (False, 2)])
def test_a_round_is_single_threaded_if_passes_have_their_own_threads(
    own_threads: bool, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    processed, passes, found = Distributions._processed, [], set()

    def counting(distributions: Distributions) -> torch.Tensor:
        found.add(torch.get_num_threads())
        return processed(distributions)

    model = TableLM(hashed(13, seed=1))
    model.own_threads = own_threads
    extend = model.extend
    monkeypatch.setattr(Distributions, "_processed", counting)
    monkeypatch.setattr(model, "extend", lambda jobs: passes.append(torch.get_num_threads()) or extend(jobs))
    LLM(model).generate([[1, 2, 3]], PARAMS)
    assert found == {wanted}
    assert set(passes) == {2}
    assert torch.get_num_threads() == 2


def test_threads_are_restored_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TableLM(hashed(13, seed=1))
    model.own_threads = True

    def failing(distributions: Distributions) -> torch.Tensor:
        raise RuntimeError("no distribution")

    monkeypatch.setattr(Distributions, "_processed", failing)
    with pytest.raises((GenerationError, RuntimeError), match="no distribution"):
        LLM(model).generate([[1, 2, 3]], PARAMS)
    assert torch.get_num_threads() == 2


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system does not tell")
def test_no_torch_thread_keeps_spinning() -> None:
    """Time that other threads of this process have had, in seconds, while this one slept."""
    row = torch.randn(1, 200_000)
    works = [row.clone, row.exp, row.sum]

    def awake() -> float:
        nanoseconds = 0
        for task in Path("/proc/self/task").iterdir():
            if int(task.name) != threading.get_native_id():
                with suppress(OSError):  # it may have ended meanwhile
                    nanoseconds += int((task / "schedstat").read_text("ascii").split()[0])
        return nanoseconds / 1e9

    def spent(work: Callable[[], object]) -> float:
        with one_thread():
            time.sleep(0.02)
            before = awake()
            work()
            time.sleep(0.01)
            return awake() - before

    for work in works:
        # a woken thread spins for milliseconds, every time; others of this process may be busy now and then
        assert any(spent(work) < 0.0005 for _ in range(30))
