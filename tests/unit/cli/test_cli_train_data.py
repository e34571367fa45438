"""`draftree train data`: from a model and prompts to a folder of training data."""

from __future__ import annotations

import json
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest

from cli_samples import save_tiny_model
from draftree.cli.main import run
from draftree.engine.engine import Engine
from draftree.train.data.shards import TrainingData

OPTIONS = ["--max-tokens", "10", "--batch", "4", "--seed", "3"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("chat"), chat=True))


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "own.jsonl"
    messages = [{"role": "system", "content": "hm"}, {"role": "user", "content": "ab"}]
    lines: list[dict[str, Any]] = [{"messages": messages}, *({"prompt": f"prompt {i}"} for i in range(7))]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_prompts_of_a_file_are_answered(
    model: str, file: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "data")
    assert run(["train", "data", model, "--output", folder, "--prompts", file, *OPTIONS]) == 0
    printed = capfd.readouterr()
    assert printed.out == f"{folder}: 8 texts, {TrainingData(folder).num_tokens} tokens\n"
    assert "prompts: own.jsonl (8); layers 0, 1, 2; teacher hidden; " in printed.err
    assert "8 texts of full length: at most" in printed.err
    data = TrainingData(folder)
    assert data.recipe.chat
    assert data.recipe.temperatures == (0.0, 0.8)
    assert data.recipe.prompts[0].name == "own.jsonl"
    assert all(len(text.tokens) <= text.prompt_length + 10 for text in data)
    assert run(["train", "data", model, "--output", folder, "--prompts", file, *OPTIONS]) == 0
    assert "holds 8 texts" in capfd.readouterr().err


def test_named_prompts_and_other_options(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    some = sorted(distributions(), key=lambda one: str(one.metadata["Name"]).lower())[:30]
    monkeypatch.setattr("draftree.train.data.prompts.distributions", lambda: some)  # all of them take seconds
    folder = str(tmp_path / "data")
    own = ["--prompts", "shipped", "--prompts", "expanded:50", "--prompts", "packages:20"]
    others = ["--limit-tokens", "300", "--temperature", "0.5", "--teacher", "top-k:5", "--features", "1,-1", "--raw"]
    arguments = ["train", "data", model, "--output", folder, *own, *others, *OPTIONS]
    assert run([*arguments, "--dry-run"]) == 0
    assert not Path(folder).exists()
    assert "tokens/s measured" in capfd.readouterr().err
    assert run([*arguments, "--draft", "ngram"]) == 0
    data = TrainingData(folder)
    assert [source.name for source in data.recipe.prompts] == ["shipped", "expanded", "packages"]
    assert (data.recipe.features, data.recipe.top_k, data.recipe.chat) == ((1, 2), 5, False)
    assert {text.temperature for text in data} == {0.5}
    assert "skipped (prompt too long)" in capfd.readouterr().out, "the context of the model is short"


def test_ctrl_c_keeps_texts_and_the_command_continues(
    model: str, file: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["train", "data", model, "--prompts", file, "--max-tokens", "10", "--batch", "1"]
    whole, cut = str(tmp_path / "whole"), str(tmp_path / "cut")
    assert run([*arguments, "--output", whole]) == 0
    step, left = Engine.step, 60

    def interrupted(self: Engine) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Engine, "step", interrupted)
    assert run([*arguments, "--output", cut]) == 130
    kept = TrainingData(cut)
    assert 0 < len(kept) < 8
    assert f"interrupted: {len(kept)} texts are stored; the same command continues" in capfd.readouterr().err
    monkeypatch.setattr(Engine, "step", step)
    assert run([*arguments, "--output", cut]) == 0
    texts = [[text.tokens.tolist() for text in TrainingData(folder)] for folder in (whole, cut)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompts", "missing.txt"], "prompts file 'missing.txt' cannot be read"),
        (["--prompts", "expanded:x"], "prompts are 'expanded:x': give 'shipped'"),
        (["--features", "9"], "features name layer 9, but the target has 2 layers"),
        (["--teacher", "top"], "teacher is 'top': give 'hidden' or 'top-k:K'"),
        (["--max-tokens", "0"], "max_tokens is 0: it must be at least 1"),
        (["--temperature", "-1"], "temperatures are [-1.0]"),
    ],
)
def test_bad_input_is_refused(
    model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert run(["train", "data", model, "--output", str(tmp_path / "data"), *options]) == 1
    assert message in capfd.readouterr().err
    assert not (tmp_path / "data").exists()


def test_another_recipe_is_refused(model: str, file: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "data", model, "--output", str(tmp_path / "data"), "--prompts", file]
    assert run([*arguments, *OPTIONS]) == 0
    assert run([*arguments, "--max-tokens", "11"]) == 1
    assert "cannot be continued: max_tokens is 11, and was 10" in capfd.readouterr().err
