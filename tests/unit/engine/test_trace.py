"""Round trip of traces in format 2, traces of format 1, and refused files."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftree import LLM, SamplingParams
from draftree.core.errors import ConfigurationError
from draftree.core.types import RoundRecord
from draftree.engine.trace import TABLES, Trace, TraceHeader, TraceWriter, acceptance_length, rows_of, write_csv
from draftree.lab.analysis.export import chrome_events, summary
from draftree.models.table import TableLM, hashed

MODEL = TableLM(hashed(6, seed=3, scale=3.0), order=2)
PROMPTS = [[1, 2, 3], [4, 5, 1, 2]]
ABOUT = {"temperature": 0.9, "seed": 2}
LETTERS = "abcdef"


def record(path: Path, *, plan: str = "fixed:3", clock: Callable[[], float] | None = None) -> list[RoundRecord]:
    with path.open("x", encoding="utf-8") as stream:
        writer = TraceWriter(stream) if clock is None else TraceWriter(stream, clock)
        rounds: list[RoundRecord] = []
        llm = LLM(MODEL, "synthetic,accept=0.7,k=3", plan=plan, on_round=lambda one: (writer(one), rounds.append(one)))  # type: ignore[func-returns-value]
        llm.requests.records_picks = True
        writer.begin(TraceHeader("table", "synthetic", "coupled", plan, llm.planner.parts, {1: 0.5}, ABOUT))
        llm.generate(PROMPTS, SamplingParams(max_tokens=24, temperature=0.9, seed=2))
        writer.end(LETTERS.__getitem__)
    return rounds


def test_a_trace_holds_what_the_rounds_held(tmp_path: Path) -> None:
    records = record(tmp_path / "t.jsonl")
    trace = Trace.read(tmp_path / "t.jsonl")
    assert trace.header.about == ABOUT
    assert len(trace.rounds) == len(records)
    for one, found in zip(records, trace.rounds, strict=True):
        assert found.num_rows == one.num_rows
        assert found.seconds["total"] == one.total_seconds
        for row, step in zip(one.sequences, found.steps, strict=True):
            assert step.tree.tokens == row.drafted.tokens
            assert step.tree.parents == row.drafted.parents
            assert (step.path, step.bonus, step.num_written) == (row.path, row.bonus, row.num_written)
            assert step.picks == row.picks
            assert len(step.picks) == len(step.scored) + 1
    occurring = {token for one in trace.rounds for step in one.steps for token in (*step.tokens, *step.tree.tokens)}
    assert occurring <= set(trace.texts)
    assert trace.text_of(2) == "c"
    assert trace.text_of(77) == "[77]"


def test_picks_of_a_greedy_walk_are_the_written_tokens(tmp_path: Path) -> None:
    record(tmp_path / "t.jsonl")
    for one in Trace.read(tmp_path / "t.jsonl").rounds:
        for step in one.steps:
            rows = (0, *(node + 1 for node in step.path))
            assert tuple(step.picks[row] for row in rows) == step.tokens


def test_starts_follow_the_clock(tmp_path: Path) -> None:
    ticks = iter(range(1000))
    record(tmp_path / "t.jsonl", clock=lambda: float(next(ticks)))
    trace = Trace.read(tmp_path / "t.jsonl")
    for number, one in enumerate(trace.rounds, 1):
        assert one.start == pytest.approx(number - one.seconds["total"], abs=1e-6)


def rewritten(path: Path, change: Callable[[list[dict[str, Any]]], object]) -> Path:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    found = path.with_name("changed.jsonl")
    found.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return found


def test_traces_of_format_1_are_read(tmp_path: Path) -> None:
    record(tmp_path / "t.jsonl")

    def older(lines: list[dict[str, Any]]) -> None:
        lines.pop()
        lines[0]["format"] = 1
        del lines[0]["about"]
        for line in lines[1:]:
            del line["start"]
            for entry in line["sequences"]:
                del entry["picks"]

    new, old = Trace.read(tmp_path / "t.jsonl"), Trace.read(rewritten(tmp_path / "t.jsonl", older))
    assert acceptance_length(old.rounds) == acceptance_length(new.rounds)
    assert (old.rounds[0].start, old.rounds[0].steps[0].picks, old.texts, old.header.about) == (None, (), {}, {})
    without = dataclasses.replace(new.rounds[0].steps[0], picks=())
    assert old.rounds[0].steps[0] == without


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda lines: lines[0].update(format=3), "format 3; this version reads formats 1 and 2"),
        (lambda lines: lines[0].update(kind="header"), "is not a trace"),
        (lambda lines: lines[1].pop("seconds"), "damaged"),
        (lambda lines: lines[1].update(kind="other"), "damaged"),
        (lambda lines: lines[0].pop("parts"), "damaged"),
        (lambda lines: lines.__setitem__(1, 5), "line 2: it does not hold a JSON object"),
        (lambda lines: lines.clear(), "is not a trace"),
    ],
)
def test_other_files_are_refused(change: Callable[[list[Any]], object], words: str, tmp_path: Path) -> None:
    record(tmp_path / "t.jsonl")
    with pytest.raises(ConfigurationError, match=words):
        Trace.read(rewritten(tmp_path / "t.jsonl", change))


def test_a_last_line_that_is_not_complete_is_left_out(tmp_path: Path) -> None:
    record(tmp_path / "t.jsonl")
    path = tmp_path / "t.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3]) + lines[3][:40])
    assert len(Trace.read(path).rounds) == 2


def test_a_timeline_has_a_slice_for_every_round_and_phase(tmp_path: Path) -> None:
    record(tmp_path / "t.jsonl")
    trace = Trace.read(tmp_path / "t.jsonl")
    events = json.loads(json.dumps(chrome_events(trace)))["traceEvents"]
    rounds = [event for event in events if event["ph"] == "X" and event["name"].startswith("round ")]
    assert len(rounds) == len(trace.rounds)
    assert sum(event["args"]["tokens"] for event in rounds) == 48
    for event, one in zip(rounds, trace.rounds, strict=True):
        assert event["dur"] == pytest.approx(1e6 * one.seconds["total"], abs=1e-2)
        inside = [e for e in events if e["ph"] == "X" and e["tid"] == 2 and e["args"]["round"] == rounds.index(event)]
        assert [e["name"] for e in inside] == ["plan", "draft", "score", "verify", "commit"]
        assert inside[-1]["ts"] + inside[-1]["dur"] <= event["ts"] + event["dur"] + 0.1
    texts = [event["name"] for event in events if event["ph"] == "X" and event["tid"] == 10]
    assert sum(map(len, texts)) == 24
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"rounds", "phases"} < names


def test_tables_count_what_the_trace_counts(tmp_path: Path) -> None:
    record(tmp_path / "t.jsonl")
    trace = Trace.read(tmp_path / "t.jsonl")
    rounds, steps, nodes = (list(rows_of(trace, name)) for name in TABLES)
    assert sum(row["written"] for row in rounds) == sum(row["written"] for row in steps) == 48
    assert len(nodes) == sum(row["drafted"] for row in steps) == summary(trace)["scored_nodes"]
    assert sum(row["accepted"] for row in nodes) == summary(trace)["accepted_nodes"]
    assert {row["depth"] for row in nodes} <= {1, 2, 3}
    written = io.StringIO()
    write_csv(trace, "steps", written)
    assert len(written.getvalue().splitlines()) == len(steps) + 1
    with pytest.raises(ConfigurationError, match="no table 'rows'"):
        rows_of(trace, "rows")


def test_a_data_frame_has_the_rows_of_the_table(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    record(tmp_path / "t.jsonl")
    trace = Trace.read(tmp_path / "t.jsonl")
    frame = trace.to_pandas("steps")
    assert frame["written"].sum() == 48
    assert len(trace.to_pandas()) == len(trace.rounds)


def test_a_missing_pandas_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path / "t.jsonl")
    monkeypatch.setattr("draftree.core.errors.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'draftree\[pandas\]'"):
        Trace.read(tmp_path / "t.jsonl").to_pandas()
