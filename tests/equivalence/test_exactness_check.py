"""`is_exact` is claimed only for a model whose rows are bit-identical in long prefixes, wide trees and batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from draftree.loading import lowering
from draftree.loading.load import load_model
from draftree.loading.lowering import lower_model
from draftree.models.base import Extend, Pass, PassResult
from draftree.models.check import check, reference_logits, rounds_alike
from draftree.models.native.model import NativeModel
from draftree.sampling.logits import TensorLogits
from families import drafter_folder, fresh
from native_samples import SIZES, in_c, native
from second_starts import SIZES as DEEP

pytestmark = in_c

Shifts = Callable[[Sequence[Extend]], bool]

SHIFTS: dict[str, Shifts] = {
    "a long prefix": lambda jobs: any(job.slot.length > 100 and len(job.tokens) > 1 for job in jobs),
    "a wide tree": lambda jobs: any(len(job.tokens) > 48 and job.slot.length > 0 for job in jobs),
    "company": lambda jobs: len(jobs) > 1,
    "a tree that crosses a block of keys": lambda jobs: any(
        job.slot.length == 60 and len(job.tokens) == 12 for job in jobs
    ),
    "single tokens": lambda jobs: sum(len(job.tokens) for job in jobs) == 1 and jobs[0].slot.length > 20,
    "a prefix read in pieces": lambda jobs: any(job.slot.length == 1 and len(job.tokens) == 23 for job in jobs),
}


class Shifted(NativeModel):
    """Adds an error of one bit to the logits of some passes, or to the tokens that they read."""

    shifts: Shifts

    def run(self, pass_: Pass) -> PassResult:
        jobs = pass_.jobs
        if not self.shifts(jobs):
            return super().run(pass_)
        if jobs[0].logits_at is not None:  # a prefix: what is kept of it matters, not its logits
            jobs = [Extend(job.slot, [job.tokens[0] + 1, *job.tokens[1:]], job.parents, job.logits_at) for job in jobs]
            return super().run(Pass(jobs))
        result = super().run(pass_)
        return replace(result, logits=TensorLogits(torch.nextafter(result.logits.tensor(), torch.tensor(torch.inf))))


def shifted(model: Any, shifts: Shifts) -> Any:
    model.__class__, model.shifts = Shifted, shifts
    return model


@pytest.mark.parametrize("shift", SHIFTS)
def test_the_claim_of_a_loaded_model_rests_on_it(shift: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        lowering, "NativeModel", lambda *given, **named: shifted(NativeModel(*given, **named), SHIFTS[shift])
    )
    loaded = lower_model(fresh("llama", **SIZES))
    assert loaded.model.self_check is not None
    assert not loaded.model.is_exact
    assert not loaded.model.self_check.is_exact


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_passes_in_c_are_alike_and_leave_no_slot_open(family: str, kind: str) -> None:
    model = native(family, kind)
    opened = model.num_open
    assert rounds_alike(model)
    assert model.num_open == opened


@pytest.mark.parametrize("context", [8, 40, 61, 130])
def test_a_short_context_is_no_obstacle(context: int) -> None:
    loaded = lower_model(fresh("llama", **(SIZES | {"max_position_embeddings": context})))
    assert loaded.model.is_exact


@pytest.mark.usefixtures("store")
def test_a_second_start_notices_a_tree_that_has_other_bits(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, reads: list[Any]
) -> None:
    folder = drafter_folder("llama", tmp_path, distance=0.0, **DEEP)
    assert load_model(folder, dtype="float32").model.is_exact
    monkeypatch.setattr(
        "draftree.loading.native_start.NativeModel",
        lambda *given, **named: shifted(NativeModel(*given, **named), SHIFTS["company"]),
    )
    load_model(folder, dtype="float32")
    assert len(reads) == 2


def test_the_small_check_alone_does_not_notice() -> None:
    model = fresh("llama", **SIZES)
    wanted = reference_logits(model)
    ours = shifted(lower_model(model).model, SHIFTS["a long prefix"])
    assert check(ours, wanted).is_exact
