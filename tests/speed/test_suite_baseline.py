"""Regression check of methods: rounds on recorded texts, exactly, and a suite of a real model against its baseline.

The recorded texts need no model and no clock: a method that drafts worse writes them in more rounds. After a change
that is meant to alter drafts, `python tests/support/recorded_texts.py` records them again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftree.cli.main import run
from draftree.lab.bench.suite.submission import read_submission
from real_weights import folder_of
from recorded_texts import FILE, METHODS, rounds_of, text_of

BASELINE = Path(__file__).with_name("suite_baseline.json")
SUITE = [
    *["bench", "suite", "smollm2-135m-instruct", "--dtype", "float32", "--max-tokens", "32", "--limit", "1"],
    *["--category", "shipped/story", "--category", "shipped/chat", "--category", "shipped/rewrite-code"],
    *["--draft", "ngram@fixed", "--draft", "suffix@fixed", "--draft", "head:smollm2-135m-instruct@fixed"],
    *["--draft", "head:smollm2-135m-instruct+suffix@fixed"],
]
"""With --output FILE the command writes the baseline."""


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return dict(json.loads(FILE.read_text("utf-8")))


def worse_texts(before: list[int], now: list[int]) -> list[int]:
    """Indices of texts that need more rounds."""
    return [index for index, (one, other) in enumerate(zip(before, now, strict=True)) if other > one]


@pytest.mark.parametrize(("draft", "plan"), METHODS)
def test_a_method_needs_no_more_rounds_than_before(recorded: dict[str, Any], draft: str, plan: str) -> None:
    texts = [text_of(line) for line in recorded["texts"]]
    before = recorded["rounds"][f"{draft}@{plan}"]
    now = rounds_of(texts, draft, plan, recorded["vocab_size"])
    assert sum(now) <= sum(before), f"worse on texts {worse_texts(before, now)}: {sum(before)} rounds became {sum(now)}"
    assert sum(before) < sum(len(text.tokens) for text in texts), "the method gains on these texts"


@pytest.mark.parametrize(
    ("draft", "worse"), [("ngram", "ngram,k=1"), ("suffix", "suffix,k=1"), ("lookahead", "lookahead,candidates=1,n=2")]
)
def test_a_worse_method_is_detected(recorded: dict[str, Any], draft: str, worse: str) -> None:
    texts = [text_of(line) for line in recorded["texts"]]
    now = rounds_of(texts, worse, "fixed", recorded["vocab_size"])
    assert sum(now) > sum(recorded["rounds"][f"{draft}@fixed"])


@pytest.mark.weights
def test_a_real_model_is_not_worse_than_its_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    """Most of a speed-up may be lost to other work on the machine; tokens per pass depend on rounding only."""
    folder_of("smollm2-135m-instruct")
    status = run([*SUITE, "--baseline", str(BASELINE), "--score-tolerance", "0.8"])
    assert status == 0, capsys.readouterr().err


def test_the_baseline_is_a_submission_whose_methods_gain() -> None:
    stored = read_submission(BASELINE)
    whole = {one["method"]: one["tokens_per_pass"]["value"] for one in stored["scores"] if one["category"] == "all"}
    assert whole.pop("plain") == 1.0
    assert min(whole.values()) > 1.05
