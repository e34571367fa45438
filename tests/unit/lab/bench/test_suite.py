"""`draftree bench suite`: sets, scores, submissions, continuation, tables, and the comparison with a baseline."""

from __future__ import annotations

import copy
import csv
import io
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from draftree.cli.main import run
from draftree.core.errors import ConfigurationError
from draftree.lab.bench.benchmark import Runner
from draftree.lab.bench.records import Record
from draftree.lab.bench.suite.comparison import Tolerance, differences, regressions, to_csv
from draftree.lab.bench.suite.run import PromptSet, digest_of, read_sets
from draftree.lab.bench.suite.submission import ALL, SCHEMA, check, read_submission, scores_of
from suite_files import other_machine, suite, suite_home


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return suite_home(tmp_path_factory.mktemp("suite"))


@pytest.fixture(scope="module")
def output(home: Path) -> Path:
    """A submission of a real run."""
    path = home / "first.json"
    assert suite(home, "--draft", "ngram@fixed", "--draft", "suffix@fixed", "--output", path) == 0
    return path


@pytest.fixture
def submission(output: Path) -> dict[str, Any]:
    return dict(json.loads(output.read_text()))


def test_a_run_writes_a_submission_that_the_schema_and_the_check_accept(
    home: Path, output: Path, submission: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    jsonschema.validate(submission, json.loads(SCHEMA.read_text()))
    assert check(submission) == []
    assert [one["name"] for one in submission["sets"]] == ["spec-bench", "humaneval"]
    assert [one["name"] for one in submission["methods"]] == ["plain", "ngram@fixed", "suffix@fixed"]
    ids = [prompt["id"] for prompt in submission["prompts"]]
    assert ids == ["spec-bench/81", "spec-bench/81/2", "spec-bench/82", "spec-bench/83", "humaneval/HumanEval/0"]
    assert [prompt.get("first_turn") for prompt in submission["prompts"]] == [None, "spec-bench/81", None, None, None]
    categories = {one["category"] for one in submission["scores"]}
    assert categories == {"all", "spec-bench/writing", "spec-bench/math", "humaneval/code-completion"}
    assert all(one["exact"] == one["prompts"] for one in submission["scores"])
    assert str(home) not in output.read_text()
    assert run(["bench", "suite-check", str(output)]) == 0
    assert "valid, 3 methods on 5 prompts" in capsys.readouterr().out


def test_the_methods_of_a_suite_without_named_ones(home: Path, tmp_path: Path) -> None:
    assert suite(home, "--limit", 1, "--output", tmp_path / "default.json") == 0
    names = [one["name"] for one in read_submission(tmp_path / "default.json")["methods"]]
    assert names == ["plain", "ngram", "suffix", "lookahead"]


def test_an_interrupted_run_continues_and_gives_the_same_counts(
    home: Path,
    submission: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole_run, path = Runner.run, tmp_path / "again.json"
    methods = ["--draft", "ngram@fixed", "--draft", "suffix@fixed", "--output", path]

    def cut_short(self: Runner, groups: Any, **numbers: Any) -> Iterator[list[Record]]:
        found = whole_run(self, groups, **numbers)
        yield next(found)
        yield next(found)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "run", cut_short)
        assert suite(home, *methods) == 130
    assert "the same command continues" in capsys.readouterr().err
    assert not path.exists()
    journal = path.with_suffix(".jsonl")
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[:-1]) + lines[-1][:20])  # killed within a line: its prompt is run again
    assert suite(home, "--draft", "ngram@fixed", "--output", path) == 1
    assert "of a run with another methods" in capsys.readouterr().err
    assert suite(home, *methods) == 0
    assert "1 of 4 prompts of an earlier run are used" in capsys.readouterr().err
    again = read_submission(path)
    assert differences(again, submission) == []
    for one, other in zip(again["prompts"], submission["prompts"], strict=True):
        assert [one["id"], counts(one)] == [other["id"], counts(other)]
    assert suite(home, *methods) == 1
    assert "already exists" in capsys.readouterr().err
    path.unlink()
    assert suite(home, *methods) == 1
    assert "is complete" in capsys.readouterr().err


def counts(prompt: dict[str, Any]) -> dict[str, Any]:
    """What depends on no clock."""
    return {
        name: {key: value for key, value in one.items() if key != "tokens_per_second"}
        for name, one in prompt["methods"].items()
    }


CHANGES: list[tuple[tuple[Any, ...], Any]] = [
    (("format",), "other"),
    (("date",), "yesterday"),
    (("machine", "cpu"), ""),
    (("model", "sha256"), "0"),
    (("model", "folder"), "/home"),
    (("arguments", "max_tokens"), 0),
    (("arguments", "max_tokens"), True),
    (("arguments", "temperature"), -0.5),
    (("sets", 0, "name"), "mine"),
    (("sets",), []),
    (("execution", "exact"), None),
    (("execution", "threads"), 1.5),
    (("scores", 0, "score", "value"), 0),
    (("scores", 0, "tokens_per_pass"), None),
    (("prompts", 0, "methods", "plain", "rounds"), "3"),
    (("prompts", 0, "text"), "a text"),
    (("versions",), []),
    (("notes",), None),
]


@pytest.mark.parametrize(("place", "value"), CHANGES, ids=str)
def test_a_wrong_value_is_refused_with_its_place(
    submission: dict[str, Any], place: tuple[Any, ...], value: Any
) -> None:
    inner: Any = submission
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    assert str(place[-1]) in check(submission)[0]


def test_every_missing_field_is_refused(submission: dict[str, Any]) -> None:
    for name in submission:
        without = {key: value for key, value in submission.items() if key != name}
        assert name in check(without)[0]
    for broken in (None, [], "text", 3):
        assert check(broken)


@pytest.mark.parametrize("change", ["score", "exact", "missing", "added", "method", "twice", "version", "turn"])
def test_scores_that_do_not_follow_from_the_prompts_are_detected(
    submission: dict[str, Any], change: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = copy.deepcopy(submission)
    if change == "score":
        changed["scores"][4]["score"]["value"] *= 1.1
    elif change == "exact":
        changed["prompts"][0]["methods"]["ngram@fixed"]["equal"] = False
    elif change == "missing":
        changed["scores"].pop()
    elif change == "added":
        changed["scores"].append(changed["scores"][0] | {"category": "poems"})
    elif change == "method":
        del changed["prompts"][0]["methods"]["ngram@fixed"]
    elif change == "turn":
        changed["prompts"][1]["first_turn"] = "spec-bench/80"
    elif change == "twice":
        changed["prompts"].append(changed["prompts"][0])
    else:
        changed["version"] = 2
    words = {"added": "has no prompts", "missing": "is missing", "version": "reads version 1", "twice": "once"}
    words |= {"turn": "follows 'spec-bench/80', which is not in the document"}
    words |= {"method": "exactly the methods", "score": "does not follow", "exact": "does not follow"}
    (tmp_path / "changed.json").write_text(json.dumps(changed))
    assert run(["bench", "suite-check", str(tmp_path / "changed.json")]) == 1
    assert words[change] in capsys.readouterr().err


def test_a_table_of_several_submissions(
    output: Path, submission: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    second = tmp_path / "second.json"
    second.write_text(json.dumps(other_machine(submission)))
    capsys.readouterr()
    assert run(["bench", "suite-table", str(output), str(second)]) == 0
    shown = capsys.readouterr().out
    assert "another processor" in shown
    assert "| second | tiny, float32 | another processor" in shown
    assert "| second: ngram@fixed |" in shown
    assert "| spec-bench/math | 1.00 |" in shown
    assert run(["bench", "suite-table", "--csv", str(output), str(second)]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == 2 * 3 * 4
    of = {(row["submission"], row["method"], row["category"]): row for row in rows}
    one, two = (of[name, "ngram@fixed", "all"] for name in ("first", "second"))
    assert float(two["score"]) == pytest.approx(2 * float(one["score"]), rel=1e-3)
    assert two["tokens_per_pass"] == one["tokens_per_pass"]
    assert to_csv({"first": submission}).count("\n") == 13


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("arguments", "max_tokens"), 16, "max_tokens is 8 and 16"),
        (("arguments", "temperature"), 1.0, "temperature is 0.0 and 1.0"),
        (("arguments", "seed"), 5, "seed is 0 and 5"),
        (("prompts_sha256",), "f" * 64, "other prompts"),
    ],
)
def test_submissions_that_are_not_comparable_are_refused_with_the_reason(
    output: Path,
    submission: dict[str, Any],
    tmp_path: Path,
    place: tuple[str, ...],
    value: Any,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    inner: Any = submission
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    (tmp_path / "other.json").write_text(json.dumps(submission))
    assert run(["bench", "suite-table", str(output), str(tmp_path / "other.json")]) == 1
    shown = capsys.readouterr().err
    assert "'first' and 'other' are not comparable" in shown
    assert words in shown


def test_a_baseline_is_met_by_the_same_code_and_not_by_a_worse_method(
    home: Path, output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loose = ["--baseline", output, "--score-tolerance", 0.95]
    assert suite(home, "--draft", "ngram@fixed", "--draft", "suffix@fixed", *loose) == 0
    assert "nothing is worse than the baseline" in capsys.readouterr().out
    better = json.loads(output.read_text())
    for prompt in better["prompts"]:
        prompt["methods"]["suffix@fixed"]["rounds"] = 1
    better["scores"] = scores_of(better["prompts"])
    (tmp_path / "better.json").write_text(json.dumps(better))
    loose[1] = tmp_path / "better.json"
    assert suite(home, "--draft", "ngram@fixed", "--draft", "suffix@fixed", *loose) == 1
    assert "worse than the baseline: suffix@fixed on all: tokens per pass" in capsys.readouterr().err


def test_a_baseline_of_another_run_is_refused(submission: dict[str, Any]) -> None:
    other = copy.deepcopy(submission)
    other["arguments"]["seed"] = 1
    other["methods"].pop()
    with pytest.raises(ConfigurationError, match=r"another run: seed is 1 and 0; methods .* not run: suffix@fixed"):
        regressions(other, submission)


def test_regressions_are_losses_beyond_the_tolerance(submission: dict[str, Any]) -> None:
    slow = other_machine(submission)
    assert regressions(slow, submission) == []
    found = regressions(submission, slow)
    assert {one.value for one in found} == {"speed over plain"}
    assert {one.method for one in found} == {"ngram@fixed", "suffix@fixed"}
    assert regressions(submission, slow, Tolerance(score=0.9)) == []
    changed = copy.deepcopy(submission)
    changed["scores"][4]["tokens_per_pass"]["value"] *= 0.97
    changed["scores"][5]["exact"] -= 1
    assert [one.value for one in regressions(changed, submission)] == ["tokens per pass", "texts as plain"]
    assert [one.value for one in regressions(changed, submission, Tolerance(tokens=0.05))] == ["texts as plain"]
    for values in ({"tokens": 1.0}, {"score": -0.1}):
        with pytest.raises(ConfigurationError, match="tolerance"):
            Tolerance(**values)


def test_sets_are_read_in_their_formats(home: Path, tmp_path: Path) -> None:
    workload, facts = read_sets([PromptSet("shipped"), PromptSet("humaneval", home / "tasks.jsonl")])
    assert [fact["name"] for fact in facts] == ["shipped", "humaneval"]
    assert {"humaneval/code-completion", "shipped/story"} <= {task.category for task in workload.tasks}
    with pytest.raises(ConfigurationError, match=r"line 1 has no 'task_id'.*format of humaneval"):
        read_sets([PromptSet("humaneval", home / "questions.jsonl")])
    with pytest.raises(ConfigurationError, match=r"line 1 has no 'question_id'.*format of spec-bench"):
        read_sets([PromptSet("spec-bench", home / "tasks.jsonl")])
    with pytest.raises(ConfigurationError, match="does not exist"):
        read_sets([PromptSet("spec-bench", tmp_path / "nowhere")])
    with pytest.raises(ConfigurationError, match="there is no prompt set"):
        read_sets([])


def test_a_digest_names_prompts_and_not_files(home: Path, tmp_path: Path) -> None:
    one, _ = read_sets([PromptSet("spec-bench", home / "questions.jsonl")])
    (tmp_path / "copy.jsonl").write_text("\n" + (home / "questions.jsonl").read_text())
    other, _ = read_sets([PromptSet("spec-bench", tmp_path / "copy.jsonl")])
    assert digest_of(one.tasks) == digest_of(other.tasks)
    assert digest_of(one.tasks) != digest_of(one.tasks[:-1])
    first, *others = one.tasks
    assert first.turns == ("and again",)
    assert digest_of(one.tasks) != digest_of([replace(first, turns=()), *others]), "later turns are prompts as well"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--baseline", "/nowhere.json"], "cannot be read"),
        (["--output", "results.jsonl"], "end it with .json"),
        (["--tokens-tolerance", "2"], "tolerance of tokens is 2.0"),
        (["--draft", "ngrm"], "ngrm"),
        (["--category", "poems"], "category 'poems' does not occur"),
    ],
)
def test_wrong_settings_are_refused(
    home: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert suite(home, *arguments) == 1
    assert words in capsys.readouterr().err


def counts_at(speed: float | None, *, rounds: int = 10, equal: bool = True) -> dict[str, Any]:
    counts = {"tokens": 20, "rounds": rounds, "drafted": 20, "accepted": 5}
    return counts | {"tokens_per_second": speed, "equal": equal}


def prompt(name: str, category: str, plain: dict[str, Any], **methods: dict[str, Any]) -> dict[str, Any]:
    return {"id": name, "category": category, "methods": {"plain": plain} | methods}


def score_of(prompts: list[dict[str, Any]], method: str = "fast", category: str = ALL) -> dict[str, Any]:
    (score,) = (one for one in scores_of(prompts) if (one["method"], one["category"]) == (method, category))
    return score


def test_scores_are_geometric_means_of_prompts_and_then_of_categories() -> None:
    prompts = [
        prompt("a", "x", counts_at(10.0, rounds=20), fast=counts_at(20.0)),
        prompt("b", "x", counts_at(20.0, rounds=20), fast=counts_at(160.0, rounds=5)),
        prompt("c", "y", counts_at(10.0, rounds=20), fast=counts_at(10.0, equal=False)),
    ]
    whole, first, second = (score_of(prompts, category=category) for category in (ALL, "x", "y"))
    assert first["score"] == pytest.approx({"value": math.sqrt(2 * 8), "low": 2.0, "high": 8.0})
    assert second["score"] == pytest.approx({"value": 1.0, "low": 1.0, "high": 1.0})
    assert whole["score"]["value"] == pytest.approx(math.sqrt(4.0)), "the mean of categories, not of prompts"
    assert first["tokens_per_pass"]["value"] == pytest.approx(40 / 15)
    assert whole["tokens_per_pass"]["value"] == pytest.approx(math.sqrt(40 / 15 * 2.0))
    assert (first["exact"], second["exact"], whole["exact"]) == (2, 0, 2)
    assert (first["prompts"], whole["prompts"]) == (2, 3)
    assert first["acceptance"] == pytest.approx(0.25)
    assert score_of(prompts, "plain")["score"] == {"value": 1.0, "low": 1.0, "high": 1.0}


def test_intervals_cover_the_true_value_about_as_often_as_they_say() -> None:
    random, hits = np.random.default_rng(0), 0
    for _ in range(60):
        speeds = np.exp(random.normal(0.5, 0.3, 25))
        prompts = [
            prompt(str(place), "x", counts_at(1.0), fast=counts_at(float(speed))) for place, speed in enumerate(speeds)
        ]
        score = score_of(prompts)["score"]
        hits += score["low"] <= math.exp(0.5) <= score["high"]
    assert 51 <= hits <= 60


def test_texts_that_were_not_timed_are_left_out_of_the_score_only() -> None:
    timed, untimed = ((counts_at(slow), counts_at(fast)) for slow, fast in ((10.0, 20.0), (None, None)))
    score = score_of([prompt("a", "x", timed[0], fast=timed[1]), prompt("b", "x", untimed[0], fast=untimed[1])])
    assert score["score"]["value"] == pytest.approx(2.0)
    assert score["tokens_per_pass"]["value"] == pytest.approx(2.0)
    assert score_of([prompt("b", "x", untimed[0])], "plain")["score"] is None


def test_turns_of_a_conversation_are_resampled_together() -> None:
    speeds = {"a": 2.0, "b": 8.0}
    apart = [
        prompt(name + turn, "x", counts_at(1.0), fast=counts_at(speed))
        for name, speed in speeds.items()
        for turn in ("", "/2", "/3", "/4")
    ]
    joined = [one | ({"first_turn": one["id"][0]} if "/" in one["id"] else {}) for one in apart]
    alone, together = score_of(apart), score_of(joined)
    assert (together["score"]["value"], alone["score"]["value"]) == pytest.approx((4.0, 4.0))
    assert (together["prompts"], together["exact"]) == (8, 8)
    assert (together["score"]["low"], together["score"]["high"]) == (2.0, 8.0), "one of two conversations twice"
    assert alone["score"]["high"] < 8.0, "all eight prompts are rarely of one conversation"
