"""Training goes on after failures of memory and numbers, or ends with an error that names them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftree.train.errors import TrainingError
from draftree.train.head_trainee import HeadTrainee
from draftree.train.settings import Limits
from train_samples import settings, texts, tiny_head, trainee
from training_runs import started, weights_of


class OutOfMemory(HeadTrainee):
    """Fails for batches of more than some texts."""

    most = 2

    def gradients(self, texts: Sequence[int], **more: Any) -> Any:
        if len(texts) > self.most:
            super().gradients(texts[:1], **more)  # gradients of a failed attempt must not count
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
        return super().gradients(texts, **more)


def test_batches_that_do_not_fit_are_computed_in_parts(tmp_path: Path) -> None:
    chosen = settings(limits=Limits(steps=6), optimizer="adamw")
    whole, parts = trainee(tiny_head(), chosen), trainee(tiny_head(), chosen)
    parts.__class__ = OutOfMemory
    notes: list[str] = []
    started(whole, chosen, tmp_path / "whole").run()
    state = started(parts, chosen, tmp_path / "parts", report=lambda progress: notes.append(progress.note)).run()
    assert state.splits > 1
    assert any("out of memory: batches are now computed in 2 parts" in note for note in notes)
    for name, value in weights_of(whole).items():
        assert torch.allclose(value, parts.module.state_dict()[name], atol=1e-5), name


def test_a_text_that_does_not_fit_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    chosen = settings()
    own = trainee(tiny_head(), chosen)
    own.__class__ = type("Tiny", (OutOfMemory,), {"most": 0})
    with pytest.raises(TrainingError, match=r"a text of 29 tokens does not fit in memory.*--max-length"):
        started(own, chosen, tmp_path).run()


def test_damaged_hidden_states_are_named(tmp_path: Path) -> None:
    chosen = settings(limits=Limits(steps=40))
    data = list(texts(30))
    features = data[7].features.clone()
    features[3] = torch.nan
    data[7] = replace(data[7], features=features)
    with pytest.raises(TrainingError, match=r"text 7 of the data \(prompt 7\) has hidden states that are not finite"):
        started(trainee(tiny_head(), chosen, data=data), chosen, tmp_path).run()


class Exploding(HeadTrainee):
    """Gradients are not finite in some updates."""

    bad = range(3, 6)
    update = 0

    def gradients(self, texts: Sequence[int], **more: Any) -> Any:
        found = super().gradients(texts, **more)
        if self.update in self.bad:
            next(p for p in self.module.parameters() if p.grad is not None).grad.fill_(torch.inf)  # type: ignore[union-attr]
        self.update += 1
        return found


def test_updates_that_are_not_finite_are_skipped(tmp_path: Path) -> None:
    chosen = settings(limits=Limits(steps=10))
    own = trainee(tiny_head(), chosen)
    own.__class__ = Exploding
    notes: list[str] = []
    state = started(own, chosen, tmp_path, report=lambda progress: notes.append(progress.note)).run()
    assert state.step == 10
    assert sum("is skipped: its gradient is not finite" in note for note in notes) == 3
    assert all(value.isfinite().all() for value in weights_of(own).values())


def test_too_many_skipped_updates_end_the_run(tmp_path: Path) -> None:
    chosen = settings(limits=Limits(steps=30), max_skips=4)
    own = trainee(tiny_head(), chosen)
    own.__class__ = type("Worse", (Exploding,), {"bad": range(2, 99)})
    with pytest.raises(TrainingError, match=r"5 updates in a row are not finite: lower the learning rate \(0.005\)"):
        started(own, chosen, tmp_path).run()
