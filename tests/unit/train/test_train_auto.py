"""`draftree train auto`: the plan, and from a model's name to a drafter that `auto` uses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from draftree import LLM
from draftree.cli.main import run
from draftree.core.errors import ConfigurationError
from draftree.core.files import PathLock
from draftree.loading.load import load_model
from draftree.train.automatic import (
    HEAD,
    STUDENT,
    Machine,
    Student,
    TargetSize,
    TrainingPlan,
    plan_training,
    vocabularies_for,
)
from draftree.train.costs import LENGTHS, Costs, head_costs, round_costs
from draftree.train.loop import TrainingRun
from train_folders import prompts_file

SMOLLM2 = TargetSize(fingerprint="small", hidden=576, inner=1536, vocab=49_152)
TINYLLAMA = TargetSize(fingerprint="large", hidden=2048, inner=5632, vocab=32_000)


def costs(level: float) -> Costs:
    """Costs of rounds whose drafts take that share of a plain round for each token, rows included."""
    return {length: 1 + length * level for length in LENGTHS}


def heads(target: TargetSize, first: float = 0.08, more: float = 0.05) -> dict[int, Costs]:
    """Costs of heads that grow with the draft vocabulary, by `more` from none to 49,152 tokens."""
    return {vocab: costs(first + more * vocab / 49_152) for vocab in vocabularies_for(target.vocab)}


SMALL_HEADS, LARGE_HEADS = heads(SMOLLM2), heads(TINYLLAMA, 0.15)
MACHINE = Machine(tokens=900, operations=3e11, most_tokens=10**9)


def test_a_small_target_gets_a_head_and_a_large_one_a_student() -> None:
    small = plan_training(SMOLLM2, MACHINE, 2, SMALL_HEADS, None)
    assert small.kind == HEAD
    assert small.start is None
    slow = replace(MACHINE, tokens=120)
    student = Student("small", 135_000_000, costs(0.2))
    large = plan_training(TINYLLAMA, slow, 2, LARGE_HEADS, student)
    assert (large.kind, large.start, large.draft_vocab) == (STUDENT, "small", None)
    # a student that costs as much as the target never pays
    assert plan_training(TINYLLAMA, slow, 2, LARGE_HEADS, replace(student, costs=costs(1.0))).kind == HEAD


def test_the_expected_gain_follows_from_the_measured_costs() -> None:
    """Rounds of TinyLlama in int8 with SmolLM2-135M, whose weights have 8 bits too, on two idle cores."""
    measured = {1: 1.23, 3: 1.75, 6: 2.6}
    plan = plan_training(
        TINYLLAMA, replace(MACHINE, tokens=120), 2, LARGE_HEADS, Student("small", 135_000_000, measured)
    )
    assert plan.kind == STUDENT
    assert plan.speedup == pytest.approx(max((1 + 0.65) / 1.23, (1 + 0.65 + 0.65**2) / 1.49), abs=0.01)


def test_costs_are_those_of_rounds_with_full_drafts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftree.train.costs.ENOUGH_SECONDS", 0.0)
    loaded = load_model(model, dtype="float32")
    measured = head_costs(loaded, (8, 16, 32))
    assert measured.keys() == {8, 16, 32}
    for length in LENGTHS:
        small, middle, large = (measured[vocab][length] for vocab in (8, 16, 32))
        assert middle == pytest.approx(small + (large - small) / 3)
    # a draft model of the target's own size
    own = round_costs(loaded, f"model:{model}")
    assert own.keys() == set(LENGTHS)
    assert own[6] > own[1] > 1


def test_data_and_training_fill_the_time() -> None:
    for target, tokens in ((SMOLLM2, 900), (SMOLLM2, 10), (TINYLLAMA, 120)):
        plan = plan_training(target, replace(MACHINE, tokens=tokens), 2, heads(target), None)
        assert plan.data_tokens / tokens / 60 + plan.minutes == pytest.approx(108, rel=0.01)
        assert plan.predictions >= 0.99 * plan.data_tokens


def test_time_that_the_prompts_do_not_need_is_for_training() -> None:
    plan = plan_training(SMOLLM2, replace(MACHINE, most_tokens=90_000), 2, SMALL_HEADS, None)
    assert plan.data_tokens == 90_000
    assert plan.minutes == pytest.approx(0.9 * 120 - 100 / 60)


def test_more_time_is_expected_to_bring_more() -> None:
    speedups = [plan_training(SMOLLM2, MACHINE, hours, SMALL_HEADS, None).speedup for hours in (0.02, 0.2, 2)]
    assert speedups == sorted(speedups)
    assert speedups[0] < speedups[-1]


def test_a_wide_target_gets_a_larger_draft_vocabulary() -> None:
    wide = replace(TINYLLAMA, hidden=4096, inner=28_672, vocab=128_000)
    chosen = plan_training(wide, MACHINE, 2, heads(wide, 0.01, 0.001), None).draft_vocab
    small = plan_training(SMOLLM2, MACHINE, 2, SMALL_HEADS, None).draft_vocab
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

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(TrainingRun, "_update", interrupted)
        assert run(command) == 130
    said = capfd.readouterr()
    assert "the same command continues" in said.err
    assert "--resume" not in said.err
    assert run(command) == 0
    said = capfd.readouterr()
    assert "resumed after 0 updates" in said.err
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
    for hours in ("0", "nan", "inf", "1e300"):
        assert run(["train", "auto", str(model), "--hours", hours]) == 1
        assert f"hours is {float(hours)}: it must be above 0 and at most 10,000" in capfd.readouterr().err
    prompts = prompts_file(tmp_path / "prompts.jsonl", 2)
    command = ["train", "auto", str(model), "--hours", "0.01", "--prompts", str(prompts)]
    assert run([*command, "--output", str(tmp_path / "out")]) == 1
    assert "2 prompts are too few" in capfd.readouterr().err


def test_folders_of_other_things_are_refused(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    command = ["train", "auto", str(model), "--hours", "0.01", "--output", str(output)]
    output.write_text("a file")
    assert run(command) == 1
    assert f"'{output}' exists, and no run of 'train auto'" in capfd.readouterr().err
    output.unlink()
    output.mkdir()
    (output / "letter.txt").write_text("not a plan")
    assert run(command) == 1
    assert f"'{output}' exists, and no run of 'train auto'" in capfd.readouterr().err
    assert [path.name for path in output.iterdir()] == ["letter.txt"]


def test_plans_for_another_model_or_time_and_damaged_ones_are_refused(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    plan = plan_training(SMOLLM2, MACHINE, 0.01, SMALL_HEADS, None)
    plan.write(output / "plan.json")
    command = ["train", "auto", str(model), "--output", str(output), "--dtype", "float32"]
    assert run([*command, "--hours", "0.01"]) == 1
    assert "is for another model: choose another --output" in capfd.readouterr().err
    fingerprint = LLM(str(model), None, dtype="float32").model.fingerprint
    replace(plan, target=fingerprint).write(output / "plan.json")
    assert run([*command, "--hours", "1"]) == 1
    assert "is for --hours 0.01: give the same" in capfd.readouterr().err
    for changes in ({"kind": "tail"}, {"minutes": -1}, {"minutes": "1"}, {"data_tokens": None}, {"draft_vocab": 0}):
        damaged = replace(plan, target=fingerprint, **changes)  # type: ignore[arg-type]
        damaged.write(output / "plan.json")
        with pytest.raises(ConfigurationError, match="is damaged: delete it"):
            TrainingPlan.read(output / "plan.json")
    assert [path.name for path in output.iterdir()] == ["plan.json"]


def test_one_process_works_in_a_folder_and_a_failed_plan_leaves_none(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    command = ["train", "auto", str(model), "--hours", "0.01", "--output", str(output)]
    output.mkdir()
    lock = PathLock(output)
    assert run(command) == 1
    assert "another process works in" in capfd.readouterr().err
    lock.release()
    (tmp_path / "long.txt").write_text("the fox " * 900)
    assert run([*command, "--prompts", str(tmp_path / "long.txt")]) == 1
    assert "can answer none of the prompts" in capfd.readouterr().err
    assert not output.exists()


def test_a_student_is_trained_as_a_plan_says(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRAFTREE_CONFIG", str(tmp_path / "config"))
    monkeypatch.setattr("draftree.train.automatic.MEASURED", 0.5)
    output = tmp_path / "out"
    output.mkdir()
    fingerprint = LLM(str(model), None, dtype="float32").model.fingerprint
    TrainingPlan(fingerprint, 0.01, STUDENT, str(model), None, 20_000, 0.05, 100, 1.9, 1.4).write(output / "plan.json")
    prompts = prompts_file(tmp_path / "prompts.jsonl", 120)
    command = ["train", "auto", str(model), "--hours", "0.01", "--prompts", str(prompts), "--output", str(output)]
    assert run([*command, "--dtype", "float32"]) in (0, 1)  # 1 on a busy machine, which measures too few texts
    said = capfd.readouterr()
    assert f"the plan of '{output / 'plan.json'}' is continued" in said.err
    assert f"model:{output / 'drafter'}" in said.out
    for kind in ("head", "block"):
        command = ["train", kind, str(model), "--data", str(output / "data"), "--steps", "1"]
        assert run([*command, "--output", str(tmp_path / kind), "--unseen-share", "0.2"]) == 1
        assert "make data without '--features none'" in capfd.readouterr().err
