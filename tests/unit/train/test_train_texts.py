"""Which texts a training uses: a part of the data, kept distributions of a part, and a resumed run on other texts."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftree.cli.main import run
from draftree.core.errors import ConfigurationError
from draftree.options import ModelOptions
from draftree.train.checkpoints import TrainingError
from draftree.train.data.shards import TrainingData
from draftree.train.head_trainee import DISTRIBUTIONS
from draftree.train.preparing import TrainingJob, first_texts
from draftree.train.settings import Limits
from train_folders import write_data
from train_samples import settings, texts, tiny_head, trainee
from training_runs import started

SHARE = 0.2


@pytest.fixture(scope="module")
def data(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(model, tmp_path_factory.mktemp("texts") / "data", count=60)


def train(model: Path, data: Path, output: Path, *options: str) -> int:
    sizes = [] if "--from" in options else ["--draft-vocab", "300"]
    fixed = [*sizes, "--batch-tokens", "600", "--unseen-share", str(SHARE), "--dtype", "float32"]
    return run(
        ["train", "head", str(model), "--data", str(data), "--output", str(output), "--depth", "2", *fixed, *options]
    )


def test_the_first_texts_with_so_many_tokens_are_chosen(data: Path) -> None:
    stored = TrainingData(data)
    seen, _ = stored.split(SHARE)
    sizes = [stored[number].num_rows for number in seen]
    assert first_texts(stored, seen, None) == seen
    assert first_texts(stored, seen, 1) == seen[:1]
    assert first_texts(stored, seen, sizes[0] + 1) == seen[:2]
    assert first_texts(stored, seen, sum(sizes)) == seen
    with pytest.raises(ConfigurationError, match="the texts of training have"):
        first_texts(stored, seen, sum(sizes) + 1)


def test_a_number_of_tokens_below_one_is_refused(data: Path) -> None:
    with pytest.raises(ConfigurationError, match="data_tokens is 0: it must be at least 1"):
        TrainingJob(options=ModelOptions("any"), data=(data,), output=data, data_tokens=0)


def test_a_part_of_the_data_leaves_the_unseen_texts(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = TrainingData(data)
    seen, unseen = stored.split(SHARE)
    wanted = sum(stored[number].num_rows for number in seen[:10])
    assert train(model, data, tmp_path / "part", "--steps", "1", "--data-tokens", str(wanted)) == 0
    facts = json.loads((tmp_path / "part" / "recipe.json").read_text())["data"]
    assert facts["texts"] == {"seen": 10, "unseen": len(unseen)}
    assert facts["data_tokens"] == wanted
    assert "10 answers of the target" in (tmp_path / "part" / "README.md").read_text()
    capsys.readouterr()
    assert train(model, data, tmp_path / "more", "--steps", "1", "--data-tokens", "1000000") == 1
    assert "leave --data-tokens out" in capsys.readouterr().err


def test_a_run_is_not_resumed_with_other_texts(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(model, data, tmp_path / "run", "--steps", "2", "--data-tokens", "400") == 0
    before = (tmp_path / "run" / "recipe.json").read_bytes()
    assert train(model, data, tmp_path / "run", "--steps", "4", "--resume") == 1
    assert "resume with the same data" in capsys.readouterr().err
    assert (tmp_path / "run" / "recipe.json").read_bytes() == before
    assert train(model, data, tmp_path / "run", "--steps", "4", "--data-tokens", "400", "--resume") == 0


def test_a_checkpoint_names_its_texts(tmp_path: Path) -> None:
    chosen = settings(limits=Limits(steps=4))
    started(trainee(tiny_head(), chosen), chosen, tmp_path).run()
    fewer = started(trainee(tiny_head(), chosen, data=texts(40)), replace(chosen, limits=Limits(steps=8)), tmp_path)
    with pytest.raises(TrainingError, match=r"was made with 48 texts of .* and this run has 28 of"):
        fewer.resume()


def test_distributions_of_a_part_are_completed_by_a_run_on_all_texts(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vocabulary is that of the head to start from, so that both runs have the same file."""
    data = Path(shutil.copytree(data, tmp_path / "data", ignore=shutil.ignore_patterns(DISTRIBUTIONS)))
    seen, _ = TrainingData(data).split(SHARE)
    assert train(model, data, tmp_path / "first", "--steps", "1") == 0
    assert not (data / DISTRIBUTIONS).exists()
    start = ["--from", str(tmp_path / "first"), "--steps", "12"]
    assert train(model, data, tmp_path / "part", *start, "--data-tokens", "300") == 0
    (path,) = (data / DISTRIBUTIONS).iterdir()
    part = kept(path)
    assert 0 < len(part) < len(seen)
    assert train(model, data, tmp_path / "all", *start) == 0
    assert list((data / DISTRIBUTIONS).iterdir()) == [path]
    assert kept(path) == set(seen) > part
    monkeypatch.setattr("draftree.train.teacher.TargetRows._distributions", refuse)
    assert train(model, data, tmp_path / "again", *start) == 0
    assert weights(tmp_path / "again") == weights(tmp_path / "all")
    # boosting reads those of the earlier head as well
    boosted = ["--data", str(data), "--output", str(tmp_path / "boosted"), "--earlier", str(tmp_path / "all"), *start]
    assert run(["train", "boost", str(model), *boosted, "--unseen-share", str(SHARE), "--dtype", "float32"]) == 0


def kept(path: Path) -> set[int]:
    from draftree.train.checkpoints import load_checkpoint

    return {int(name.partition("/")[0]) for name in load_checkpoint(path)[0]}


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def refuse(*arguments: Any) -> Any:
    raise AssertionError("a distribution is computed again")
