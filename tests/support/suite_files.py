"""A tiny model and files of prompts for tests of `draftree bench suite`. Not a test itself."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_samples import write_model
from draftree.cli.main import run
from draftree.lab.bench.suite.submission import check, scores_of
from text_backends import CHAT_TEMPLATE

QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["The quick brown fox", "and again"]},
    {"question_id": 82, "category": "writing", "turns": ["the lazy dog sleeps"]},
    {"question_id": 83, "category": "math", "turns": ["one two one two"]},
]
TASKS = [{"task_id": "HumanEval/0", "prompt": "def add(first, second):", "entry_point": "add"}]
HOW = ["--dtype", "float32", "--kernels", "torch", "--no-shipped", "--max-tokens", "8"]


def write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> Path:
    """Write a file of JSON lines."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def suite_home(folder: Path) -> Path:
    """A folder with the model and the files."""
    write_model(folder / "tiny", chat_template=CHAT_TEMPLATE)
    write_lines(folder / "questions.jsonl", QUESTIONS)
    write_lines(folder / "tasks.jsonl", TASKS)
    return folder


def suite(home: Path, *arguments: object) -> int:
    """Run the command over both files; the exit status."""
    sets = ["--spec-bench", str(home / "questions.jsonl"), "--humaneval", str(home / "tasks.jsonl")]
    return run(["bench", "suite", str(home / "tiny"), *HOW, *sets, *map(str, arguments)])


def other_machine(submission: dict[str, Any]) -> dict[str, Any]:
    """The same run on a machine that is twice as fast with drafts."""
    other = copy.deepcopy(submission)
    other["machine"]["cpu"] = "another processor"
    for prompt in other["prompts"]:
        for name in ("ngram@fixed", "suffix@fixed"):
            prompt["methods"][name]["tokens_per_second"] *= 2
    other["scores"] = scores_of(other["prompts"])
    assert check(other) == []
    return other
