"""`draftree tune MODEL`: kept results, and `draft="auto"` that uses them."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

from bench_samples import write_model
from draftree import LLM
from draftree.cli.main import run
from draftree.lab.tune.candidates import Candidate
from draftree.lab.tune.contest import Cell, Contest, Sample
from draftree.lab.tune.drafts import DraftSearch, with_full_paths
from draftree.lab.tune.replays import Replays
from draftree.loading.auto_draft import all_tuned, keep_tuned
from draftree.models.replay import RecordedText
from private_cache import private_cache

REPLAYED = ["--kernels", "torch", "--dtype", "float32", "--max-tokens", "6"]
HOW = [*REPLAYED, "--no-replay"]


def test_paths_are_kept_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "stories15m").mkdir()
    assert with_full_paths("head:mine,k=2+suffix") == f"head:{tmp_path}/mine,k=2+suffix"
    assert with_full_paths("model:stories15m") == "model:stories15m", "a name of the catalogue precedes a folder"
    assert with_full_paths("ngram,k=3") == "ngram,k=3"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTREE_CACHE", private_cache(tmp_path / "cache"))
    monkeypatch.setenv("DRAFTREE_CONFIG", str(tmp_path / "config"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"the {word} fox", "category": word} for word in ("quick", "lazy")]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def made_up(monkeypatch: pytest.MonkeyPatch, fast: str, *, stops_after: int | None = None) -> list[str]:
    """One drafter is twice as fast as plain decoding, all others half as fast; Ctrl-C after a number of texts."""
    asked: list[str] = []

    def write(self: DraftSearch, candidate: Candidate, cell: Cell) -> Sample:
        if len(asked) == stops_after:
            raise KeyboardInterrupt
        asked.append(candidate.name)
        return Sample(1.0 if candidate.is_plain else 0.5 if candidate.name == fast else 2.0, 1.5, "text")

    monkeypatch.setattr(DraftSearch, "_write", write)
    return asked


def test_the_command_measures_real_texts_and_auto_takes_the_result(
    folder: Path, prompts: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["tune", str(folder), "--prompts", str(prompts), *HOW, "--draft", "ngram,min=1,k=2"]) == 0
    shown = capfd.readouterr().out
    assert "all texts are equal to those of plain decoding" in shown
    (kept,) = all_tuned()
    assert kept.texts >= 8
    llm = LLM(str(folder), "auto", dtype="float32", kernels="torch")
    assert llm.drafts == (() if kept.draft == "none" else (kept.draft,))
    assert "'draftree tune' measured" in llm.draft_note


def test_the_fastest_is_kept_with_its_conditions(
    folder: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    made_up(monkeypatch, "suffix@fixed")
    line = ["tune", str(folder), "--prompts", str(prompts), *HOW]
    assert run([*line, "--dry-run"]) == 0
    assert "not kept (--dry-run)" in capfd.readouterr().out
    assert not all_tuned()
    asked = made_up(monkeypatch, "suffix@fixed")
    assert run(line) == 0
    assert not asked, "the measurements of the dry run are used"
    shown = capfd.readouterr().out
    assert "fastest: suffix with plan fixed, 2.00 times plain decoding in the median of " in shown
    (kept,) = all_tuned()
    assert (kept.draft, kept.plan, kept.speedup) == ("suffix", "fixed", 2.0)
    assert (kept.conditions["threads"], kept.conditions["dtype"]) == (torch.get_num_threads(), "float32")
    llm = LLM(str(folder), "auto", dtype="float32", kernels="torch")
    assert llm.drafts == ("suffix",)
    assert type(llm.planner).__name__ == "FixedPlanner"
    assert "'draftree tune' measured 2.00 times plain decoding in the median" in llm.draft_note


def test_a_result_of_other_conditions_is_ignored_with_the_reason(
    folder: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up(monkeypatch, "ngram")
    assert run(["tune", str(folder), "--prompts", str(prompts), *HOW]) == 0
    assert LLM(str(folder), "auto", dtype="float32", kernels="torch").drafts == ("ngram",)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    llm = LLM(str(folder), "auto", dtype="float32", kernels="torch")
    assert llm.drafts == ("suffix",)
    assert f"'draftree tune' is ignored, because threads was {threads}, and is {threads + 1}" in llm.draft_note
    assert run(["tune", str(folder), "--prompts", str(prompts), *HOW]) == 0
    assert len(all_tuned()) == 2, "a result for each of the conditions"


def test_a_kept_drafter_that_is_gone_is_left_out_with_the_reason(
    folder: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import dataclasses

    made_up(monkeypatch, "ngram")
    assert run(["tune", str(folder), "--prompts", str(prompts), *HOW]) == 0
    (kept,) = all_tuned()
    keep_tuned(dataclasses.replace(kept, draft=f"head:{tmp_path}/gone"))
    llm = LLM(str(folder), "auto", dtype="float32", kernels="torch")
    assert llm.drafts == ("suffix",)
    assert "gone' cannot be used: there is no folder" in llm.draft_note


def test_plain_decoding_is_kept_if_it_is_fastest(
    folder: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    made_up(monkeypatch, "")
    assert run(["tune", str(folder), "--prompts", str(prompts), *HOW]) == 0
    assert "fastest: plain decoding, 1.00 times" in capfd.readouterr().out
    llm = LLM(str(folder), "auto", dtype="float32", kernels="torch")
    assert llm.drafts == ()
    assert LLM(str(folder), "auto", plan="fixed", dtype="float32", kernels="torch").drafts == ("suffix",)


def test_ctrl_c_keeps_the_measurements_and_the_same_command_continues(
    folder: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    line = ["tune", str(folder), "--prompts", str(prompts), *HOW]
    first = made_up(monkeypatch, "ngram", stops_after=40)
    assert run(line) == 130
    shown = capfd.readouterr()
    assert "interrupted: 40 measurements are kept in " in shown.err
    assert "no drafter was kept" in shown.err
    assert "ngram " in shown.out, "the table of what was measured"
    assert not all_tuned()
    second = made_up(monkeypatch, "ngram")
    assert run(line) == 0
    assert "40 measurements of an earlier run are used" in capfd.readouterr().err
    assert run(["tune", "--forget", str(folder)]) == 0
    whole = made_up(monkeypatch, "ngram")
    assert run(line) == 0
    assert Counter(first + second) == Counter(whole)


def test_results_are_shown_and_removed(
    folder: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["tune", "--show"]) == 0
    assert "nothing is kept: run 'draftree tune MODEL'" in capfd.readouterr().out
    made_up(monkeypatch, "ngram")
    assert run(["tune", str(folder), "--prompts", str(prompts), *HOW]) == 0
    capfd.readouterr()
    assert run(["tune", "--show", str(folder)]) == 0
    shown = capfd.readouterr().out
    assert f"{folder}: ngram, 2.00 times plain decoding" in shown
    assert "dtype float32" in shown
    assert run(["tune", "--forget", "elsewhere"]) == 1
    assert f"nothing is kept for 'elsewhere'; kept: {folder}" in capfd.readouterr().err
    assert run(["tune", "--forget", str(folder)]) == 0
    assert "removed 1 result of" in capfd.readouterr().out
    assert not all_tuned()


def test_too_few_texts_are_not_kept(
    folder: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    made_up(monkeypatch, "ngram")
    monkeypatch.setattr(Contest, "is_over", property(lambda self: self._next > 1))
    assert run(["tune", str(folder), "--prompts", str(prompts), *HOW]) == 1
    assert "the time ended after 2 texts, and 4 are needed" in capfd.readouterr().err
    assert not all_tuned()


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (["--minutes", "0"], 1, "minutes is 0.0: it must be positive"),
        (["--max-tokens", "1"], 1, "it must be at least 2"),
        (["--temperature", "-1"], 1, "none below 0"),
        (["--draft", "ngrm"], 1, "ngrm"),
        (["--draft", "none"], 1, "no drafter to measure"),
        (["--show", "--forget"], 2, "leave one of them out"),
        (["--prompts", "/nowhere"], 1, "does not exist"),
    ],
)
def test_wrong_settings_are_refused(
    folder: Path, capfd: pytest.CaptureFixture[str], options: list[str], status: int, words: str
) -> None:
    assert run(["tune", str(folder), *options]) == status
    assert words in capfd.readouterr().err


def test_a_model_is_needed(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", "--minutes", "1"]) == 2
    assert "name a model" in capfd.readouterr().err
    assert run(["tune", "--forget"]) == 2
    assert "name the model whose results" in capfd.readouterr().err


def test_a_damaged_file_of_results_is_named(
    folder: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made_up(monkeypatch, "ngram")
    line = ["tune", str(folder), "--prompts", str(prompts), *HOW]
    assert run(line) == 0
    (path,) = (tmp_path / "config" / "tuned").glob("*.json")
    path.write_text("{")
    assert run(line) == 1
    assert "is damaged or unreadable: delete it" in capfd.readouterr().err


def test_drafters_are_replayed_first_and_the_best_three_are_measured(
    folder: Path, prompts: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line = ["tune", str(folder), "--prompts", str(prompts), *REPLAYED, "--draft", "early-exit:1", "--dry-run"]
    assert run(line) == 0
    shown = capfd.readouterr()
    assert "not replayed, measured for real: early-exit:1 (it drafts with layers of the target" in shown.err
    rows = [row.split() for row in shown.out.splitlines()]
    head = next(row for row in rows if row[0] == "drafter")
    assert head == [
        "drafter",
        "texts",
        "tokens/s",
        "median",
        "quartiles",
        "mean",
        "accepted",
        "predicted",
        "replayed",
    ]
    measured = {row[0]: row for row in rows if len(row) >= 9 and row[1].isdigit()}
    replayed = [row for row in rows if len(row) >= 9 and row[1] == "–"]
    assert measured["plain"][7:9] == ["1.00", "1.00"]
    assert measured["early-exit:1"][7:9] == ["–", "–"]
    finalists = [row for name, row in measured.items() if row[7] != "–" and name != "plain"]
    assert len(finalists) == 3
    assert all("slower in replays after" in " ".join(row) for row in replayed)
    assert len(replayed) > 3
    assert run(line) == 0
    assert "measurements of an earlier run are used" in capfd.readouterr().err


def test_ctrl_c_in_the_replays_keeps_the_predictions(
    folder: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    line = ["tune", str(folder), "--prompts", str(prompts), *REPLAYED]
    replay, asked = Replays.write, list[str]()

    def write(self: Replays, candidate: Candidate, text: RecordedText) -> Sample:
        if len(asked) == 20:
            raise KeyboardInterrupt
        asked.append(candidate.name)
        return replay(self, candidate, text)

    with monkeypatch.context() as patch:
        patch.setattr(Replays, "write", write)
        assert run(line) == 130
    shown = capfd.readouterr()
    assert "no drafter was kept" in shown.err
    (number,) = re.findall(r"interrupted: (\d+) measurements are kept", shown.err)
    assert 0 < int(number) <= 20
    assert not all_tuned()
    assert run([*line, "--dry-run"]) == 0
    (known,) = re.findall(r"(\d+) measurements of an earlier run are used", capfd.readouterr().err)
    assert int(known) >= int(number)
