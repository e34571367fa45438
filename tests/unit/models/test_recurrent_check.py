"""The self-check notices mistakes in recurrent states."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest

from draftree.models.base import CheckResult
from draftree.models.check import check, reference_logits
from draftree.models.kv.states import RecurrentStates, StateMemory
from draftree.models.torch.hf import HFModel
from draftree.models.torch.recurrent import Mixer
from recurrent_samples import recurrent_model, recurrent_peer

FAMILY = "qwen3_next"


def checked(family: str = FAMILY) -> CheckResult:
    return check(HFModel(recurrent_model(family)), reference_logits(recurrent_peer(family)))


def test_states_are_moved_copied_and_cut_exactly() -> None:
    result = checked()
    assert result.chains_ok
    assert result.trees_ok


@pytest.mark.parametrize("method", ["fork", "commit", "truncate"])
def test_a_state_that_stays_behind_is_noticed(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original, copy = getattr(RecurrentStates, method), StateMemory.copy

    def without_copies(self: RecurrentStates, *args: object) -> object:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(StateMemory, "copy", lambda memory, source, target: None)
            inner.setattr(RecurrentStates, "_load", lambda *args: None)
            return original(self, *args)

    monkeypatch.setattr(RecurrentStates, method, without_copies)
    assert StateMemory.copy is copy
    assert checked().chains_ok is (method == "truncate"), "the short text is read again from its beginning"


def test_a_mixer_that_forgets_its_state_in_chains_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftree.models.torch.recurrent._reads_state", lambda *args: True)
    assert not checked("mamba").chains_ok


def test_rows_in_the_wrong_order_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = RecurrentStates.plan

    def unordered(self: RecurrentStates, *args: object) -> object:
        plan = original(self, *args)  # type: ignore[arg-type]
        return type(plan)(plan.steps, plan.num_rows, None)

    monkeypatch.setattr(RecurrentStates, "plan", unordered)
    assert not checked().trees_ok


def test_a_linear_layer_that_does_not_read_the_input_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Mixer.run

    def scaled(self: Mixer, *args: Any) -> object:
        inputs = [replace(wide, factor=2.0) for wide in self.inputs]
        return original(replace(self, inputs=inputs), *args)

    monkeypatch.setattr(Mixer, "run", scaled)
    assert not checked().trees_ok


def test_a_released_model_is_not_kept_and_another_is_attached() -> None:
    lent, other = recurrent_model(FAMILY), recurrent_model(FAMILY)
    reference = weakref.ref(lent.model.layers[0])
    model = HFModel(lent)
    model.release()
    del lent
    gc.collect()
    assert reference() is None
    model.attach(other)
    assert check(model, reference_logits(recurrent_peer(FAMILY))).trees_ok
