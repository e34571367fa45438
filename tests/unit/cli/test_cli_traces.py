"""Traces from the command line, their simulation, and the planner's explanation."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench_samples import write_model
from draftree import assembly
from draftree.analysis.trace import acceptance_length, read_trace
from draftree.cli import writing
from draftree.cli.main import run
from paced import paced_llm

PROMPT = "one two three one two three one two"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("models") / "tiny"))


def test_a_text_is_recorded_and_replayed(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.jsonl"
    options = ["--draft", "ngram,min=1", "--plan", "fixed:4", "--no-chat", "--max-tokens", "30", "--temperature", "0"]
    assert run(["generate", model, PROMPT, *options, "--record", str(trace)]) == 0
    found = read_trace(trace)
    assert (found.header.draft, found.header.plan) == ("ngram,min=1", "fixed:4")
    capsys.readouterr()
    assert run(["bench", "simulate", str(trace), "--plan", "fixed:4", "--plan", "auto", "--sizes", "1,4"]) == 0
    shown = capsys.readouterr().out
    line = next(line for line in shown.splitlines() if line.startswith("fixed:4"))
    assert f"{acceptance_length(found.rounds):.2f}" in line
    assert "4 nodes" in shown
    assert run(["generate", model, PROMPT, *options, "--record", str(trace)]) == 1
    assert "already exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--draft", "none", "--record", "x.jsonl"], "without a drafter"),
        (["--draft", "ngram", "--compare", "--record", "x.jsonl"], "leave --compare out"),
    ],
)
def test_invalid_recordings_are_refused(
    options: list[str], reason: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", model, PROMPT, *options]) == 2
    assert reason in capsys.readouterr().err


def test_a_benchmark_records_every_drafting_method(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(f'{{"id": "a", "category": "c", "prompt": "{PROMPT}"}}\n')
    folder = tmp_path / "traces"
    options = ["--prompts", str(prompts), "--max-tokens", "8", "--repeats", "1", "--record", str(folder)]
    assert (
        run(
            ["bench", "run", model, "--draft", "ngram@fixed:3", "--draft", "suffix@auto", "--draft", "suffix", *options]
        )
        == 0
    )
    found = {path.stem: read_trace(path) for path in folder.iterdir()}
    plans = {"ngram@fixed_3": "fixed:3", "suffix@auto": "auto", "suffix": assembly.DEFAULT_PLAN}
    assert {name: trace.header.plan for name, trace in found.items()} == plans
    for trace in found.values():  # the one text of 8 tokens; the warm-up's rounds are not in it
        assert sum(step.num_written for one in trace.rounds for step in one.steps) == 8
    assert found["suffix@auto"].header.pass_seconds


def test_a_rule_whose_text_depends_on_the_draft_is_not_simulated(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "t.jsonl"
    options = ["--draft", "ngram", "--verify", "token", "--no-chat", "--max-tokens", "4", "--record", str(trace)]
    assert run(["generate", model, PROMPT, *options]) == 0
    assert run(["bench", "simulate", str(trace)]) == 1
    assert "coupled and match only" in capsys.readouterr().err


def test_explain_prints_a_reason(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(writing, "LLM", paced_llm)
    assert (
        run(["explain", model, PROMPT, "--draft", "synthetic,accept=0.5,k=3", "--plan", "auto", "--max-tokens", "24"])
        == 0
    )
    shown = capsys.readouterr().out
    assert shown.startswith("planner auto: a draft ")
    assert "tokens per round" in shown
    assert "1 rows" in shown


@pytest.mark.parametrize(
    ("given", "status", "words"),
    [
        (["--draft", "ngram", "--temperature", "-1"], 1, "temperature=-1.0 is refused"),
        (["--draft", "prediction"], 2, "nothing to draft from"),
        (["--draft", "none"], 1, "nothing to explain"),
    ],
)
def test_invalid_explanations_are_refused_before_a_model_is_resolved(
    given: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["explain", "no-such-model", PROMPT, *given]) == status
    assert words in " ".join(capsys.readouterr().err.split())
