"""`draftree trace`: summaries, timelines, tables and pages from a recorded run."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from draftree import LLM, SamplingParams
from draftree.analysis import Trace
from draftree.analysis.trace import TraceHeader
from draftree.analysis.trace_writer import TraceWriter
from draftree.cli.main import run
from draftree.models.table import TableLM, hashed


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
