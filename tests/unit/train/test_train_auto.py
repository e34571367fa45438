"""`draftree train auto`: the plan, and from a model's name to a drafter that `auto` uses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from draftree import LLM
from draftree.cli.main import run
from draftree.train.automatic import HEAD, STUDENT, Machine, TargetSize, TrainingPlan, plan_training
from train_folders import prompts_file

SMOLLM2 = TargetSize(num_bytes=270_000_000, hidden=576, inner=1536, vocab=49_152, is_quantized=False)
TINYLLAMA = TargetSize(num_bytes=2_200_000_000, hidden=2048, inner=5632, vocab=32_000, is_quantized=False)
MACHINE = Machine(tokens=900, operations=3e11)


def test_a_small_target_gets_a_head_and_a_large_one_a_student() -> None:
    small = plan_training(SMOLLM2, MACHINE, 120, None)
    assert small.kind == HEAD
    assert small.start is None
    large = plan_training(TINYLLAMA, replace(MACHINE, tokens=120), 120, ("small", 135_000_000))
    assert (large.kind, large.start, large.draft_vocab) == (STUDENT, "small", None)
    # a student that costs as much as the target never pays
    assert plan_training(SMOLLM2, MACHINE, 120, ("small", 135_000_000)).kind == HEAD


def test_data_and_training_fill_the_time() -> None:
    for target, tokens in ((SMOLLM2, 900), (SMOLLM2, 10), (TINYLLAMA, 120)):
        plan = plan_training(target, replace(MACHINE, tokens=tokens), 100, None)
        assert plan.data_tokens / tokens / 60 + plan.minutes == pytest.approx(90, rel=0.01)
        assert plan.predictions >= 0.99 * plan.data_tokens


def test_more_time_is_expected_to_bring_more() -> None:
    speedups = [plan_training(SMOLLM2, MACHINE, minutes, None).speedup for minutes in (1, 10, 100)]
    assert speedups == sorted(speedups)
    assert speedups[0] < speedups[-1]


def test_a_wide_target_gets_a_larger_draft_vocabulary() -> None:
    wide = TargetSize(num_bytes=140_000_000_000, hidden=4096, inner=28_672, vocab=128_000, is_quantized=False)
    chosen = plan_training(wide, MACHINE, 120, None).draft_vocab
    small = plan_training(SMOLLM2, MACHINE, 120, None).draft_vocab
    assert chosen is not None
    assert small is not None
    assert chosen > small


def test_a_drafter_is_trained_measured_and_kept(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRAFTREE_CONFIG", str(tmp_path / "config"))
    monkeypatch.setattr("draftree.train.automatic.MEASURED", 0.5)  # enough texts in little time
    prompts = prompts_file(tmp_path / "prompts.jsonl", 400)
    output = tmp_path / "out"
    command = ["train", "auto", str(model), "--hours", "0.015", "--prompts", str(prompts), "--output", str(output)]
    command += ["--dtype", "float32"]
    assert run([*command, "--dry-run"]) == 0
    assert not output.exists()
    assert run(command) == 0
    said = capfd.readouterr()
    assert "times plain decoding are expected" in said.err
    assert "all texts are equal to those of plain decoding" in said.out
    assert "kept in" in said.out
    plan = TrainingPlan.read(output / "plan.json")
    recipe = json.loads((output / "drafter" / "recipe.json").read_text())
    assert recipe["run"]["minutes"] <= plan.minutes + 0.2
    unseen = [json.loads(line)["id"] for line in (output / "unseen.jsonl").read_text().splitlines()]
    assert len(unseen) == len(set(unseen)) > 5
    llm = LLM(str(model), "auto", dtype="float32")
    assert "draftree tune" in llm.draft_note
    # the same command measures again, and trains nothing
    before = (output / "drafter" / "model.safetensors").stat().st_mtime_ns
    assert run(command) == 0
    assert (output / "drafter" / "model.safetensors").stat().st_mtime_ns == before


def test_wrong_hours_and_too_few_prompts_are_refused(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", "auto", str(model), "--hours", "0"]) == 1
    assert "hours is 0.0: it must be positive" in capfd.readouterr().err
    prompts = prompts_file(tmp_path / "prompts.jsonl", 2)
    command = ["train", "auto", str(model), "--hours", "0.01", "--prompts", str(prompts)]
    assert run([*command, "--output", str(tmp_path / "out")]) == 1
    assert "2 prompts are too few" in capfd.readouterr().err


def test_a_student_is_trained_as_a_plan_says(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRAFTREE_CONFIG", str(tmp_path / "config"))
    monkeypatch.setattr("draftree.train.automatic.MEASURED", 0.5)
    output = tmp_path / "out"
    output.mkdir()
    TrainingPlan(STUDENT, str(model), None, 20_000, 0.05, 100, 1.9, 1.4).write(output / "plan.json")
    prompts = prompts_file(tmp_path / "prompts.jsonl", 120)
    command = ["train", "auto", str(model), "--hours", "0.01", "--prompts", str(prompts), "--output", str(output)]
    assert run([*command, "--dtype", "float32"]) == 0
    said = capfd.readouterr()
    assert f"the plan of '{output / 'plan.json'}' is continued" in said.err
    assert f"model:{output / 'drafter'}" in said.out
    for kind in ("head", "block"):
        command = ["train", kind, str(model), "--data", str(output / "data"), "--steps", "1"]
        assert run([*command, "--output", str(tmp_path / kind), "--unseen-share", "0.2"]) == 1
        assert "make data without '--features none'" in capfd.readouterr().err
