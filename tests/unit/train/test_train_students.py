"""`draftree train distill` on a tiny model: from data to texts with drafts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftree.cli.main import run
from draftree.train.data.reading import TrainingData
from families import fresh
from train_folders import DEPTH, learnable_model, lengths_of_unseen, write_data


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return learnable_model(tmp_path_factory.mktemp("train") / "target")


@pytest.fixture(scope="module")
def data(model: Path) -> Path:
    return write_data(model, model.parent / "data")


def test_a_distilled_model_drafts_accepted_tokens(model: Path, data: Path, tmp_path: Path) -> None:
    output = tmp_path / "student"
    arguments = ["--hidden", "32", "--layers", "1", "--heads", "2", "--steps", "150", "--learning-rate", "1e-2"]
    more = ["--batch-tokens", "600", "--depth", str(DEPTH), "--unseen-share", "0.2", "--dtype", "float32"]
    command = ["train", "distill", str(model), "--data", str(data), "--output", str(output)]
    assert run([*command, *arguments, *more]) == 0
    facts = json.loads((output / "recipe.json").read_text())
    longest = max(len(text.tokens) for text in TrainingData(data))
    assert json.loads((output / "config.json").read_text())["max_position_embeddings"] == longest
    stats = lengths_of_unseen(model, data, f"model:{output}", temperature=0.0)
    accepted = sum(one.accepted_by_depth[0] for one in stats) / sum(one.drafted_by_depth[0] for one in stats)
    assert accepted > 0.2
    assert accepted == pytest.approx(facts["unseen"]["0"]["rounds"]["all"]["conditional"][0], abs=0.06)


def test_distillation_starts_from_given_weights(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The target itself: its drafts are accepted before any update counts."""
    output = tmp_path / "same"
    arguments = ["--from", str(model), "--steps", "1", "--learning-rate", "1e-9", "--depth", str(DEPTH)]
    command = ["train", "distill", str(model), "--data", str(data), "--output", str(output), *arguments]
    assert run([*command, "--unseen-share", "0.2", "--dtype", "float32"]) == 0
    facts = json.loads((output / "recipe.json").read_text())
    for mode in facts["unseen"].values():
        assert mode["rounds"]["all"]["acceptance_length"] > DEPTH + 0.9
    assert "tokens per round" in capsys.readouterr().out


def test_a_start_with_a_table_of_positions_is_not_extended(
    model: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    fresh("gpt2", vocab_size=vocab, max_position_embeddings=16).save_pretrained(tmp_path / "start")
    command = ["train", "distill", str(model), "--data", str(data), "--output", str(tmp_path / "out"), "--steps", "1"]
    assert run([*command, "--from", str(tmp_path / "start"), "--unseen-share", "0.2", "--dtype", "float32"]) == 1
    assert "--max-length 16" in capsys.readouterr().err
