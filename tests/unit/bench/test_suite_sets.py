"""Sets of prompts of suites, and settings that are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from draftree.bench.suite.sets import PromptSet, digest_of, read_sets
from draftree.core.errors import ConfigurationError
from suite_files import suite, suite_home


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return suite_home(tmp_path_factory.mktemp("suite"))


def test_sets_are_read_in_their_formats(home: Path, tmp_path: Path) -> None:
    workload, facts = read_sets([PromptSet("shipped"), PromptSet("humaneval", home / "tasks.jsonl")])
    assert [fact["name"] for fact in facts] == ["shipped", "humaneval"]
    assert "humaneval/code-completion" in workload.categories
    assert "shipped/story" in workload.categories
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
