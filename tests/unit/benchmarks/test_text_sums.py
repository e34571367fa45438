"""Sums of texts of arms that took turns."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

SCALE = Path(__file__).parents[3] / "benchmarks" / "scale"


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCALE))
    yield importlib.import_module("text_sums")
    sys.modules.pop("text_sums", None)


@pytest.fixture
def summary(sums: Any) -> Any:
    yield importlib.import_module("offload_summary")
    sys.modules.pop("offload_summary", None)


def line(arm: str, prompt: str, seconds: float, tokens: int = 5, **other: Any) -> dict[str, Any]:
    found = {"arm": arm, "prompt": prompt, "seconds": seconds, "first_seconds": 1.0, "tokens": tokens}
    found |= {"first_tokens": 1, "rounds": tokens, "nodes": 8, "read": 1000, "draft_seconds": 0.1}
    found |= {"score_seconds": 0.4, "token_ids": [1, 2, 3, 4, 5][:tokens], "pass_bytes": 300}
    return found | {"weight_bytes": 1000, "target_bytes": 200, "drafter_bytes": 40, "drafter_cache_bytes": 10} | other


def written(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in lines), encoding="utf-8")
    return path


def test_only_prompts_that_all_arms_have_are_summed(sums: Any, tmp_path: Path) -> None:
    lines = [line("a", "x", 3.0), line("b", "y", 4.0), line("b", "x", 5.0), line("a", "z", 6.0), line("b", "z", 7.0)]
    arms = sums.arms_of(written(tmp_path / "lines.jsonl", lines))
    assert {name: [text["prompt"] for text in texts] for name, texts in arms.items()} == {
        "a": ["x", "z"],
        "b": ["x", "z"],
    }


def test_the_first_round_of_a_text_is_left_out_of_its_speed(sums: Any) -> None:
    assert sums.decode_ms([line("a", "x", 3.0), line("a", "y", 5.0)]) == pytest.approx(1000 * (2 + 4) / 8)


def test_intervals_contain_the_ratio_and_shrink_to_it_without_spread(sums: Any) -> None:
    plain = [line("a", str(index), 9.0 + index % 3) for index in range(12)]
    ours = [line("b", str(index), 3.0 + index % 2) for index in range(12)]
    found = sums.speeds(ours, plain)
    assert found["speedup_95"][0] < found["speedup"] < found["speedup_95"][1]
    same = sums.speeds([line("b", str(index), 3.0) for index in range(4)], [line("a", "0", 5.0)] * 4)
    assert (same["speedup"], same["speedup_95"]) == (2.0, (2.0, 2.0))


@pytest.mark.parametrize(("tokens", "same"), [([1, 2], True), ([1, 3], False), ([1, 2, 3, 4, 5], True)])
def test_texts_of_other_lengths_are_compared_by_their_beginning(sums: Any, tokens: list[int], same: bool) -> None:
    assert sums.are_same([line("a", "x", 2.0, token_ids=tokens)], [line("b", "x", 2.0)]) == same


def test_a_drafter_is_compared_with_plain_decoding_in_the_same_memory(summary: Any, tmp_path: Path) -> None:
    lines = [
        line("none", "x", 9.0),
        line("none|total=9MB", "x", 5.0),
        line("d|total=9MB", "x", 2.0),
        line("d", "x", 3.0),
    ]
    rows = {row["arm"]: row for row in summary.rows(written(tmp_path / "lines.jsonl", lines))}
    assert {name: row["speedup"] for name, row in rows.items()} == {
        "none": 1.0,
        "none|total=9MB": 2.0,
        "d|total=9MB": 4.0,
        "d": 4.0,
    }
    assert rows["d"]["memory_share"] == 0.25
    assert rows["d"]["same_texts"]
