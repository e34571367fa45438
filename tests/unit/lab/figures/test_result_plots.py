"""Tables and plots of trees and distributions: from records to numbers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench_samples import HEADER, METHODS, record
from draftree.core.errors import ConfigurationError
from draftree.lab.bench.records import DistributionRecord, Results, TreeRecord
from draftree.lab.bench.summary import Report
from draftree.lab.bench.tables import grids_of, tree_grids
from draftree.lab.figures.results import draw_all

WAYS = {"tree": 11.0, "chain": 10.0, "batched": 30.0, "one by one": 40.0}
SCORED = [TreeRecord("2-2", how, 6, 4, 9, (value - 1, value, value + 5)) for how, value in WAYS.items()]
DRAFTED = [
    TreeRecord("best-8", "drafted, temperature 0.8", 8, 0, 9, (6.0, 6.6, 7.0)),
    TreeRecord("best-8", "passes of drafting, temperature 0.8", 8, 0, 9, (5.0, 6.0, 6.5)),
]


def distribution(temperature: float) -> DistributionRecord:
    kept = {
        rule: [[0.5, 0.6, 0.7]] * 2 for rule in ("token", "coupled", "multistep", "recursive", "match", "likeliest")
    }
    return DistributionRecord("a", "story", temperature, 2, (1, 0), (1.0, 0.5, *[0.0] * 6), kept)


def texts(temperature: float) -> Results:
    ours = METHODS[:2]
    records = (record("plain"), record("ngram", stats={"decode_seconds": 1.0, "tokens_per_second": 20.0}))
    header: dict[str, Any] = {**HEADER, "methods": ours, "temperature": temperature}
    return Results(f"t{temperature:g}.jsonl", header, records)


def test_scoring_is_compared_with_a_chain_of_equal_size() -> None:
    (grid,) = tree_grids(SCORED)
    assert grid.rows == (("2-2", "6", "4", "11.0", "10.0", "1.100", "30.0 (2.73)", "40.0 (3.64)"),)


def test_drafting_is_compared_with_its_passes() -> None:
    (grid,) = tree_grids(DRAFTED)
    assert grid.rows == (("best-8 at 0.8", "8", "6.60", "6.00", "1.100"),)


def test_a_round_in_milliseconds() -> None:
    rounds = Report(texts(0.0)).round_milliseconds()
    assert rounds["plain"]["score"] == pytest.approx(1800 / 20)
    assert rounds["plain"]["all"] == pytest.approx(2000 / 20)
    assert any(grid.title.startswith("Milliseconds per round") for grid in grids_of(texts(0.0)))


def test_every_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = [
        texts(0.0),
        texts(1.0),
        Results("l.jsonl", HEADER, distributions=(distribution(0.0), distribution(1.0))),
        Results("p.jsonl", HEADER, trees=(*SCORED, *DRAFTED)),
    ]
    drawn = draw_all(results, tmp_path / "plots")
    assert {path.stem for path in drawn} == {
        "t0-speed",
        "t0-rounds",
        "t1-speed",
        "t1-rounds",
        "temperature-length",
        "temperature-speed",
        "guesses-story",
        "rules-story",
        "p-scoring",
    }
    assert {path.suffix for path in drawn} == {".svg", ".png", ".pdf"}
    shown = {
        path.stem: " ".join(ElementTree.parse(path).getroot().itertext()) for path in drawn if path.suffix == ".svg"
    }
    assert "Decode speed-up over plain decoding" in shown["t0-speed"]
    assert "quartiles over prompts" in shown["t0-speed"]
    for text in shown.values():
        assert "a processor" in text, "the provenance is below every figure"
    # the same numbers give the same file
    before = [path.read_bytes() for path in drawn]
    assert [path.read_bytes() for path in draw_all(results, tmp_path / "plots")] == before


def test_missing_data_for_plots_is_reported(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigurationError, match="no data for plots"):
        draw_all([Results("e.jsonl", HEADER)], tmp_path)


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigurationError, match=r"draftree\[plots\]"):
        draw_all([texts(0.0)], tmp_path)
