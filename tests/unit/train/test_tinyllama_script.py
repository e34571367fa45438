"""The script that makes a drafter for TinyLlama, on a tiny model in its place."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import forked
from draftree import LLM, SamplingParams
from draftree.cli.main import run
from draftree.weights.catalogue import CATALOGUE
from train_folders import learnable_model, prompts_file

SCRIPT = Path(__file__).parents[3] / "scripts" / "tinyllama_drafter.sh"


def test_the_script_makes_a_drafter_and_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = learnable_model(tmp_path / "model")
    own = {
        "TARGET": str(model),
        "START": str(model),
        "DRAFTREE": " ".join([*forked.python(), "-m", "draftree"]),
        "PROMPTS": str(prompts_file(tmp_path / "prompts.jsonl", 60)),
        "TOKENS": "1500",
        "DATA_OPTIONS": "--raw --max-tokens 24 --dtype float32 --kernels torch",
        "TRAIN_OPTIONS": "--steps 2 --unseen-share 0.2 --dtype float32 --depth 2",
    }
    for _ in range(2):
        done = subprocess.run(
            ["bash", str(SCRIPT), str(tmp_path / "out")],
            env=os.environ | own,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert f"tune {model} --draft model:{tmp_path}/out/drafter" in done.stdout
    llm = LLM(str(model), f"model:{tmp_path}/out/drafter", plan="fixed", dtype="float32", kernels="torch")
    (text,) = llm.generate("the fox", SamplingParams(max_tokens=8, temperature=0))
    assert sum(text.stats.accepted_by_depth) > 0
    for kind in ("head", "block"):
        command = ["train", kind, str(model), "--data", str(tmp_path / "out" / "data"), "--steps", "1"]
        assert run([*command, "--output", str(tmp_path / kind), "--unseen-share", "0.2", "--dtype", "float32"]) == 1
        assert "make data without '--features none'" in capsys.readouterr().err


def test_the_models_of_the_script_are_in_the_catalogue() -> None:
    text = SCRIPT.read_text()
    for name in ("tinyllama-1.1b-chat", "smollm2-135m-instruct"):
        assert name in CATALOGUE
        assert f":-{name}}}" in text
