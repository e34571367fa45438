"""The training loop: acceptance rises, runs resume to the same weights, and go on after failures or name them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftree.train.checkpoints import CHECKPOINT, TrainingError, load_checkpoint, save_checkpoint
from draftree.train.head_trainee import HeadTrainee
from draftree.train.loop import BEST, EVALUATED_TEXTS, LOG, read_log
from draftree.train.preparing import Progress
from draftree.train.settings import OPTIMIZERS, Limits
from train_samples import settings, shorter, texts, tiny_head, trainee
from training_runs import started, weights_of


def test_training_raises_acceptance_and_several_levels_that_of_late_ones(tmp_path: Path) -> None:
    """Against the same updates at the first level only."""
    found = []
    for levels in (1, 3):
        chosen = settings(
            limits=Limits(steps=120),
            evaluate_every=120,
            optimizer="adamw",
            learning_rate=1e-2,
            batch_tokens=512,
            levels=levels,
            levels_from=0.0,
        )
        own = trainee(tiny_head(), chosen, data=texts(240), unseen=40)
        before = own.evaluate(None).modes[0.0].starts
        started(own, chosen, tmp_path / str(levels)).run()
        found.append(own.evaluate(None).modes[0.0].starts)
    after = found[1]
    assert after.acceptance_length > before.acceptance_length + 0.5
    assert after.conditional[0] > before.conditional[0] + 0.2
    assert after.conditional[2] > found[0].conditional[2] + 0.1


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_run_ends_with_the_same_weights(optimizer: str, tmp_path: Path) -> None:
    chosen = settings(limits=Limits(steps=25), optimizer=optimizer)
    whole = trainee(tiny_head(), chosen)
    started(whole, chosen, tmp_path / "whole").run()

    class StoppedError(Exception):
        pass

    def stop(progress: Progress) -> None:
        if progress.step == 17:
            raise StoppedError

    cut = trainee(tiny_head(), chosen)
    with pytest.raises(StoppedError):
        started(cut, chosen, tmp_path / "cut", report=stop).run()
    again = trainee(tiny_head(seed=9), chosen)
    run = started(again, chosen, tmp_path / "cut")
    run.resume()
    assert run.state.step == 10
    run.run()
    for name, value in weights_of(whole).items():
        assert torch.equal(value, again.module.state_dict()[name]), name
    logs = [
        [{k: v for k, v in line.items() if k != "seconds"} for line in read_log(tmp_path / name / LOG)]
        for name in ("whole", "cut")
    ]
    assert logs[0] == logs[1]
    assert [line["step"] for line in logs[0] if line["kind"] == "update"] == list(range(1, 26))


def test_a_finished_run_continues_with_a_larger_limit(tmp_path: Path) -> None:
    chosen = settings(limits=Limits(steps=10))
    own = trainee(tiny_head(), chosen)
    started(own, chosen, tmp_path).run()
    larger = replace(chosen, limits=Limits(steps=14))
    run = started(own, larger, tmp_path)
    run.resume()
    assert run.run().step == 14


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    chosen = settings()
    own = trainee(tiny_head(), chosen)
    started(own, chosen, tmp_path).run()
    with pytest.raises(TrainingError, match="made with other settings"):
        started(own, replace(chosen, learning_rate=1.0), tmp_path).resume()
    other = trainee(tiny_head(fc_norm=True), chosen)
    with pytest.raises(TrainingError, match="of another drafter"):
        started(other, chosen, tmp_path).resume()


def test_missing_and_damaged_checkpoints_are_named(tmp_path: Path) -> None:
    chosen = settings()
    run = started(trainee(tiny_head(), chosen), chosen, tmp_path)
    with pytest.raises(TrainingError, match="does not exist: there is no run to resume"):
        run.resume()
    (tmp_path / CHECKPOINT).write_bytes(b"nothing")
    with pytest.raises(TrainingError, match="is damaged"):
        run.resume()


def test_checkpoints_are_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "one"
    save_checkpoint(path, {"a": torch.ones(2)}, {"step": 1})

    def broken(tensors: Any, file: Path, **more: Any) -> None:
        file.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr("draftree.train.checkpoints.save_file", broken)
    with pytest.raises(OSError, match="no space"):
        save_checkpoint(path, {"a": torch.zeros(2)}, {"step": 2})
    tensors, facts = load_checkpoint(path)
    assert tensors["a"].tolist() == [1, 1]
    assert facts == {"step": 1}


def test_a_run_stops_when_the_score_does_not_rise_and_keeps_the_best_weights(tmp_path: Path) -> None:
    """A learning rate that ruins the head after a good start."""
    chosen = settings(limits=Limits(steps=400), evaluate_every=5, patience=3, learning_rate=3.0, warm_up=300)
    own = trainee(tiny_head(), chosen, data=texts(100))
    notes: list[str] = []
    state = started(own, chosen, tmp_path, report=lambda progress: notes.append(progress.note)).run()
    assert state.step < 400
    assert state.step == state.best_step + 15
    assert any("stopped early: no better score in 3 evaluations" in note for note in notes)
    assert own.evaluate(EVALUATED_TEXTS).score == pytest.approx(state.best_score)
    assert load_checkpoint(tmp_path / BEST)[1]["step"] == state.best_step


def test_a_limit_in_minutes_ends_the_run(tmp_path: Path) -> None:
    seconds = iter(range(0, 100_000, 2))
    chosen = settings(limits=Limits(minutes=1.0))
    state = started(trainee(tiny_head(), chosen), chosen, tmp_path, clock=lambda: float(next(seconds))).run()
    assert 60 <= state.seconds < 70
    assert 5 < state.step < 40


def test_a_limit_in_tokens_ends_the_run(tmp_path: Path) -> None:
    chosen = settings(limits=Limits(tokens=1000))
    state = started(trainee(tiny_head(), chosen), chosen, tmp_path).run()
    assert 1000 <= state.tokens < 1000 + 256
    lines = read_log(tmp_path / LOG)
    updates = [line for line in lines if line["kind"] == "update"]
    assert sum(line["levels"][0]["count"] for line in updates) == state.tokens
    assert updates[0]["loss_name"] == "kl"
    assert updates[-1]["loss_name"] == "coupled"
    assert len(updates[0]["levels"]) == 1
    assert len(updates[-1]["levels"]) == 3


def test_reports_have_what_a_line_of_progress_needs(tmp_path: Path) -> None:
    found: list[Progress] = []
    chosen = settings(limits=Limits(steps=10))
    started(trainee(tiny_head(), chosen), chosen, tmp_path, report=found.append).run()
    last = [one for one in found if one.loss][-1]
    assert last.share == 1.0
    assert last.minutes_left == 0
    assert len(last.losses) == len(last.acceptance) == 3
    assert all(0 < rate < 1 for rate in last.acceptance)
    assert last.tokens_per_second > 0
    assert found[-1].score is not None


def test_an_unfinished_line_of_the_log_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / LOG
    path.write_text(json.dumps({"step": 1}) + "\n" + '{"step": 2, "los')
    assert read_log(path) == [{"step": 1}]
    assert read_log(tmp_path / "none") == []


def test_frozen_weights_are_not_trained(tmp_path: Path) -> None:
    chosen = settings(limits=Limits(steps=3))
    own = trainee(tiny_head(), chosen)
    before = weights_of(own)
    started(own, chosen, tmp_path).run()
    after = weights_of(own)
    assert torch.equal(before["lm_head.weight"], after["lm_head.weight"])
    assert not torch.equal(before["fc.weight"], after["fc.weight"])


def test_a_run_without_answers_is_refused() -> None:
    with pytest.raises(TrainingError, match="no text of training has an answer"):
        trainee(tiny_head(), settings(), data=[shorter(text, 6) for text in texts(4)], unseen=1)


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
    chosen = settings(limits=Limits(steps=30))
    own = trainee(tiny_head(), chosen)
    own.__class__ = type("Worse", (Exploding,), {"bad": range(2, 99)})
    with pytest.raises(TrainingError, match=r"6 updates in a row are not finite: lower the learning rate \(0.005\)"):
        started(own, chosen, tmp_path).run()
