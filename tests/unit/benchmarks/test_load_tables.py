"""Measurements of concurrent requests can be tabulated and plotted from their file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmark_scripts import FOLDER, script


def tabulated(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["load.py", "--table", *map(str, arguments)])
    assert script("load").main() == 0


def written(rows: list[dict[str, Any]], folder: Path) -> Path:
    file = folder / "rows.jsonl"
    lines = [{"kind": "header"}, *({"kind": "load", **row} for row in rows)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return file


def test_requests_at_once_are_tabulated_from_a_file_of_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = FOLDER / "results" / "load-smollm2-bfloat16.jsonl"
    tabulated(monkeypatch, file)
    heading, _, *table = capsys.readouterr().out.splitlines()
    rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()[1:]]
    assert heading.startswith("| at once | method | tokens/s |")
    found = [tuple(line.strip("| ").split(" | ")[:2]) for line in table]
    assert sorted(found) == sorted({(str(row["at_once"]), row["method"]) for row in rows})


def test_times_of_tokens_are_condensed_to_what_the_table_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script("load")
    from loads.at_once import condensed

    row = condensed([[(0.5, 1), (0.52, 2), (0.58, 5)], [], [(0.25, 1), (1.25, 3)]])
    assert row == {
        "tokens": 8,
        "last_token": 1.25,
        "first_token": [0.5, 0.25],
        "latencies": {"2000": 4, "50000": 2},
    }
    tabulated(monkeypatch, written([{"at_once": 3, "method": "ours", **row}], tmp_path))
    assert capsys.readouterr().out.splitlines()[2:] == ["| 3 | ours | 6.4 | 0.38 (0.50) | 20 (500) | - |"]


def test_waits_beside_a_long_prompt_are_tabulated_by_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"prefill_chunk_size": budget, "first_token": seconds, "gaps": [0.01, seconds / 10, 0.3]}
        for budget, seconds in ((64, 0.4), (16, 1.0), (64, 0.6))
    ]
    tabulated(monkeypatch, written(rows, tmp_path))
    assert capsys.readouterr().out.splitlines()[2:] == ["| 16 | 1.00 | 100 (300) |", "| 64 | 0.50 | 50 (300) |"]


def test_costs_are_tabulated_by_their_medians_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = [(1, 256, 1), (2, 256, 8), (1, 32, 8), (1, 256, 4)]
    rows = [{"batch": b, "prefix": p, "rows": r, "milliseconds": [9.0, 2.0 * b, 0.1]} for b, p, r in shapes]
    plot = tmp_path / "costs.svg"
    tabulated(monkeypatch, written(rows, tmp_path), "--plot", plot)
    assert capsys.readouterr().out.splitlines()[2:] == [f"| {b} | {p} | {r} | {2 * b:.1f} |" for b, p, r in shapes]
    assert "<svg" in plot.read_text("utf-8")
