"""Rounds after native passes run torch single-threaded, and restore its threads."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from draftree import LLM, SamplingParams
from draftree.core import host
from draftree.core.errors import GenerationError
from draftree.core.host import single_threaded
from draftree.models.native.model import NativeModel
from draftree.models.table import TableLM, hashed
from draftree.sampling.distributions import Distributions
from native_samples import native

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
