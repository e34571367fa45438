"""Traces from the command line, their simulation, and the planner's explanation."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench_samples import write_model
from draftree import LLM, SamplingParams, build
from draftree.cli.explain import verdict
from draftree.cli.main import run
from draftree.engine.trace import Trace, TraceHeader, TraceWriter, acceptance_length, read_trace
from draftree.models.table import TableLM, hashed
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
    assert run(["bench", "simulate", str(trace), "--plan", "fixed:4", "--plan", "adaptive"]) == 0
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
            [
                *("bench", "run", model, "--draft", "ngram@fixed:3", "--draft", "suffix@adaptive", "--draft", "suffix"),
                *options,
            ]
        )
        == 0
    )
    found = {path.stem: read_trace(path) for path in folder.iterdir()}
    plans = {"ngram@fixed_3": "fixed:3", "suffix@adaptive": "adaptive", "suffix": build.DEFAULT_PLAN}
    assert {name: trace.header.plan for name, trace in found.items()} == plans
    for trace in found.values():  # the one text of 8 tokens; the warm-up's rounds are not in it
        assert sum(step.num_written for one in trace.rounds for step in one.steps) == 8
    assert found["suffix@adaptive"].header.pass_seconds


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
    monkeypatch.setattr("draftree.llm.LLM", paced_llm)
    assert run(["explain", model, PROMPT, *("--draft", "synthetic,accept=0.5,k=3", "--plan", "adaptive")]) == 0
    shown = capsys.readouterr().out
    verdict, planner, *_ = shown.splitlines()
    assert verdict.startswith("Drafting ")
    assert verdict.endswith(".")
    assert planner.startswith("planner adaptive: a draft ")
    assert "1 rows" in shown


def test_the_verdict_names_both_rates() -> None:
    def stats(rate: float, accepted: int = 0, drafted: int = 0) -> Any:
        return SimpleNamespace(
            tokens_per_second=rate, acceptance_length=1.5, accepted_tokens=accepted, draft_tokens=drafted
        )

    plain = stats(100.0)
    rates = "times plain decoding ({} against 100.0 tokens/s) at 1.50 tokens per round."
    assert verdict(stats(140.0, 5, 9), plain) == "Drafting pays on this text: 1.40 " + rates.format("140.0")
    assert verdict(stats(80.0, 5, 9), plain) == "Drafting costs time on this text: 0.80 " + rates.format("80.0")
    assert verdict(stats(102.0, 5, 9), plain).startswith("Drafting makes no difference on this text: 1.02 ")
    assert verdict(stats(140.0, 0, 9), plain) == "Drafting did not pay: no drafted token was accepted."
    assert verdict(stats(140.0), plain) == "Drafting did not pay: the planner drafted nothing."


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


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "t.jsonl"
    with path.open("x", encoding="utf-8") as stream:
        writer = TraceWriter(stream)
        model = TableLM(hashed(6, seed=3, scale=3.0), order=2)
        llm = LLM(model, "synthetic,accept=0.7,k=3", plan="fixed:3", on_round=writer)
        header = TraceHeader("table", "synthetic", "coupled", "fixed:3", llm.planner.parts, {}, {"seed": 2})
        writer.begin(header)
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=20, temperature=0.9, seed=2))
        writer.end("abcdef".__getitem__)
    return path


def test_a_summary_counts_the_trace(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trace", "show", str(trace), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tokens"], found["sequences"], found["about"]) == (20, 1, {"seed": 2})
    assert found["rounds"] == len(Trace.read(trace).rounds)
    assert run(["trace", "show", str(trace)]) == 0
    assert "tokens per round" in capsys.readouterr().out


def test_a_trace_becomes_a_timeline_a_table_and_a_page(trace: Path, tmp_path: Path) -> None:
    timeline, nodes, page = (tmp_path / name for name in ("t.json", "n.csv", "p.html"))
    assert run(["trace", "export", str(trace), "--output", str(timeline)]) == 0
    assert json.loads(timeline.read_text())["traceEvents"]
    assert run(["trace", "export", str(trace), "--to", "csv", "--table", "nodes", "--output", str(nodes)]) == 0
    drafted = sum(len(step.tree) for one in Trace.read(trace).rounds for step in one.steps)
    with nodes.open() as stream:
        assert len(list(csv.DictReader(stream))) == drafted
    assert run(["trace", "page", str(trace), "--output", str(page)]) == 0
    assert '"kind":"trace"' in page.read_text()


@pytest.mark.parametrize(
    ("given", "status", "words"),
    [
        (["export", "TRACE", "--table", "rounds", "--output", "x.json"], 2, "add --to csv"),
        (["export", "TRACE", "--to", "csv", "--table", "row", "--output", "x.csv"], 1, "no table 'row'"),
        (["export", "TRACE", "--to", "xml", "--output", "x.xml"], 2, "xml"),
        (["export", "nothing.jsonl", "--output", "x.json"], 1, "cannot be read"),
        (["export", "TRACE", "--output", "TRACE"], 1, "already exists"),
        (["page", "TRACE", "--output", "TRACE"], 1, "already exists"),
    ],
)
def test_invalid_commands_are_refused(
    given: list[str], status: int, words: str, trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert run(["trace", *(str(trace) if word == "TRACE" else word for word in given)]) == status
    assert words in " ".join(capsys.readouterr().err.split())
