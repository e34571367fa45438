"""Curves of acceptance over runs that continue each other."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmark_scripts import script
from draftree.core.errors import ConfigurationError

curves = script("training_curves")


def evaluation(run: str, tokens: int, seconds: float, greedy: float, sampled: float) -> dict[str, Any]:
    modes = {kind: {"starts": {"acceptance_length": value}} for kind, value in (("0", greedy), ("0.8", sampled))}
    return {"run": run, "kind": "evaluation", "tokens": tokens, "seconds": seconds, "modes": modes}


LINES = [
    {"run": "one", "kind": "update", "tokens": 5},
    evaluation("one", 500, 60, 1.2, 1.1),
    evaluation("one", 1000, 120, 1.5, 1.3),
    evaluation("two", 1000, 30, 2.0, 1.5),
    evaluation("two", 3000, 90, 2.5, 1.9),
]


def test_a_run_continues_the_one_before() -> None:
    points = curves.points_of(LINES)
    assert [one.predictions for one in points] == [500, 1000, 2000, 4000]
    assert [one.minutes for one in points] == [1, 2, 2.5, 3.5]
    assert [one.predictions for one in curves.ends_of(points)] == [1000, 4000]


def test_the_table_has_the_gain_of_each_doubling() -> None:
    *_, first, second = curves.table(curves.points_of(LINES))
    assert first == "| one | 1,000 | 2 | 1.50 | 1.30 |"
    # two doublings from 1,000 to 4,000 predictions
    assert second == "| two | 4,000 | 4 | 2.50 (+0.50 a doubling) | 1.90 (+0.30 a doubling) |"


def test_a_log_without_evaluations_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no evaluations"):
        curves.points_of(LINES[:1])


def test_the_figure_is_named_like_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "runs.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    monkeypatch.setattr(sys, "argv", ["training_curves.py", str(file), "--output", str(tmp_path / "plots")])
    curves.main()
    assert "| two | 4,000 |" in capsys.readouterr().out
    figure = (tmp_path / "plots" / "runs.svg").read_text()
    assert "temperature 0.8" in figure
    assert "minutes of one thread" in figure
