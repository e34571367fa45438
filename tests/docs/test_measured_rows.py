"""Measured rows on the pages of methods come from results files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from documents import DOCS
from generator import measured

from draftree.drafters import DRAFTERS
from draftree.planners import PLANNERS
from draftree.verifiers import VERIFIERS

ALL = [
    f"{seam} {name}"
    for seam, registry in (("drafter", DRAFTERS), ("verifier", VERIFIERS), ("planner", PLANNERS))
    for name in registry.names()
]
PLAIN = {"method": "plain", "repeat": 1, "texts": [{"text": "ab", "tokens": 10, "rounds": 10, "seconds": 2.0}]}
FORCED = {"method": "grammar", "repeat": 1, "texts": [{"text": "ab", "tokens": 10, "rounds": 5, "seconds": 1.0}]}


@pytest.mark.parametrize("key", ALL)
def test_every_method_has_rows_or_the_reason_why_not(key: str) -> None:
    text = "\n".join(measured.blocks(*key.split()))
    rows = [line for line in text.splitlines() if line.startswith("| [")]
    assert bool(rows) == (key in measured.FILES)
    assert rows or key in measured.NOTES or "temperature sweep" in text
    assert {match[1] for row in rows if (match := re.search(r"/(\w[^/]*)\.jsonl\)", row))} == set(
        measured.FILES.get(key, ())
    )


def test_only_methods_have_files_and_notes() -> None:
    assert set(measured.FILES) | set(measured.NOTES) <= set(ALL)


def test_an_unknown_method_is_not_measured() -> None:
    assert list(measured.blocks("planner", "dummy"))[-1] == "Not measured: no results file has this method."


def test_a_file_without_the_method_is_refused() -> None:
    with pytest.raises(ValueError, match="no row of drafter 'head'"):
        measured.rows_of("smollm2-lookahead", "drafter", "head")


def test_methods_of_a_run_show_one_part() -> None:
    assert measured.belongs("ngram,k=3@fixed", "drafter", "ngram")
    assert not measured.belongs("ngram+suffix@fixed", "drafter", "ngram")
    assert not measured.belongs("ngram@fixed@match", "drafter", "ngram")
    assert measured.belongs("ngram@fixed:4", "planner", "fixed")
    assert measured.belongs("ngram@fixed", "verifier", "coupled")
    assert not measured.belongs("plain", "verifier", "coupled")


def test_rows_of_records_are_sums_over_texts(tmp_path: Path) -> None:
    file = tmp_path / "grammar.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in ({"machine": {}}, PLAIN, FORCED)))
    ((method, row),) = measured.grammar_rows(file)
    assert (method, row[1:]) == ("grammar", ("`grammar`", "10.0", "2.00", "2.00", "1 of 1"))


def test_rows_equal_those_of_the_lab_note() -> None:
    note = (DOCS / "lab" / "2026-11-21-trees.md").read_text(encoding="utf-8")
    (row,) = (
        r for r in measured.rows_of("tinyllama-widths-story-greedy", "drafter", "model") if "best-15,k=4@fixed" in r[1]
    )
    assert f"| `tree=best-15,k=4` | {row[2]} | {row[3]} | {row[4]} |" in note
