"""The benchmark commands end to end: a run on a tiny model, its file, its tables, and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench_samples import write_model
from draftree.cli.main import run
from draftree.lab.bench.benchmark import Runner
from draftree.lab.bench.records import Record, read_results
from private_cache import private_cache
from text_backends import CHAT_TEMPLATE

PROMPTS = [
    {"id": "s1", "category": "story", "prompt": "The quick brown fox"},
    {"id": "s2", "category": "story", "prompt": "the dog sleeps on, the dog sleeps"},
    {"id": "c1", "category": "code", "messages": [{"role": "user", "content": "def add(first, second):"}]},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny", chat_template=CHAT_TEMPLATE)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTREE_CACHE", private_cache(tmp_path / "cache"))


@pytest.fixture
def prompts(tmp_path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    return path


def bench(*arguments: object) -> int:
    return run(["bench", *map(str, arguments), "--dtype", "float32"])


def test_a_run_writes_every_measurement_with_its_provenance(folder, prompts, tmp_path, capsys):
    small = write_model(tmp_path / "small", chat_template=CHAT_TEMPLATE)
    out = tmp_path / "out.jsonl"
    drafts = ["--draft", "ngram", "--draft", f"model:{small},k=2@token", "--peer"]
    assert bench(folder, *drafts, "--prompts", prompts, "--max-tokens", 12, "--repeats", 2, "--output", out) == 0
    results = read_results(out)
    names = [
        "plain",
        "ngram",
        "model:small,k=2@token",
        "transformers",
        "transformers lookup k=10",
        "transformers assistant small",
        "transformers assistant small k=2",
    ]
    assert [method["name"] for method in results.header["methods"]] == names
    assert len(results.records) == 3 * 7 * 2
    assert results.is_complete
    assert all(record.equal_to_plain and record.equal_to_other_plain for record in results.records)
    assert {r.form for r in results.records if r.task == "c1"} == {"chat"}
    assert {r.form for r in results.records if r.task == "s1"} == {"plain"}
    drafted = [r for r in results.records if r.method == "model:small,k=2@token"]
    assert all(r.stats["accepted_tokens"] == r.stats["draft_tokens"] for r in drafted)  # it is the same model
    assert str(tmp_path) not in out.read_text()
    shown = capsys.readouterr().out
    for name in names:
        assert name in shown


def test_prompts_are_written_in_batches(folder, prompts, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    how = ["--batch", 2, "--draft", "ngram", "--peer", "--max-tokens", 8, "--repeats", 1]
    assert bench(folder, "--prompts", prompts, *how, "--output", out) == 0
    results = read_results(out)
    assert [(r.task, r.group) for r in results.records if r.method == "plain"] == [("s1", 0), ("s2", 0), ("c1", 1)]
    assert [m["name"] for m in results.header["methods"]] == ["plain", "ngram", "transformers"]
    assert "for one prompt at a time only" in results.header["notes"][0]
    assert "for one prompt at a time only" in " ".join(capsys.readouterr().out.split())


def test_prompts_longer_than_the_context_are_left_out_and_named(folder, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"id": "long", "prompt": "fox " * 200}) + "\n" + json.dumps({"prompt": "fox"}) + "\n")
    out = tmp_path / "out.jsonl"
    assert bench(folder, "--prompts", path, "--max-tokens", 4, "--repeats", 1, "--output", out) == 0
    assert "1 prompts left out, longer than the context: long" in read_results(out).header["notes"]
    path.write_text(json.dumps({"prompt": "fox " * 200}) + "\n")
    assert bench(folder, "--prompts", path) == 1


def test_an_interrupt_keeps_what_is_complete(folder, prompts, tmp_path, capsys, monkeypatch):
    whole_run = Runner.run

    def cut_short(self: Runner, groups) -> Iterator[list[Record]]:
        yield next(whole_run(self, groups))
        raise KeyboardInterrupt

    monkeypatch.setattr(Runner, "run", cut_short)
    out = tmp_path / "out.jsonl"
    assert bench(folder, "--prompts", prompts, "--max-tokens", 4, "--repeats", 1, "--output", out) == 130
    results = read_results(out)
    assert [record.task for record in results.records] == ["s1"]
    assert not results.is_complete
    captured = capsys.readouterr()
    assert "interrupted" in captured.err
    assert "1 of 3 prompts" in " ".join(captured.out.split())
    assert "run not complete" in " ".join(captured.out.split())


def test_passes_and_their_report(folder, tmp_path, capsys):
    out = tmp_path / "passes.jsonl"
    how = ["--rows", "1,4", "--prefix", 8, "--repeats", 2, "--output", out]
    assert bench("passes", folder, *how) == 0
    assert "x floor" in capsys.readouterr().out
    assert run(["bench", "report", "--markdown", str(out)]) == 0
    text = capsys.readouterr().out
    assert "| rows | ms |" in text
    assert "tiny, float32" in text


def test_reports_wait_for_no_torch(folder, prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    assert bench(folder, "--prompts", prompts, "--max-tokens", 4, "--repeats", 1, "--output", out) == 0
    program = (
        "import sys; from draftree.cli.main import run; status = run(['bench', 'report', sys.argv[1]]); "
        "sys.exit(status or ('torch' in sys.modules) or ('transformers' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(out)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "tokens/round" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--category", "stroy"], "did you mean 'story'"),
        (["--prompts", "none.jsonl"], "prompts file 'none.jsonl' does not exist"),
        (["--draft", "ngramm"], "did you mean 'ngram'"),
        (["--repeats", 0], "repeats is 0"),
        (["--limit", 0], "limit is 0"),
        (["--batch", 0], "batch is 0"),
        (["--threads", 0], "threads is 0"),
        (["--max-tokens", 0], "max_tokens"),
        (["--temperature", -1], "temperature"),
        (["--output", "no/such/folder/x.jsonl"], "cannot be written"),
    ],
)
def test_bad_input_gets_one_sentence(folder, prompts, capsys, arguments, said):
    given = arguments if "--prompts" in arguments else [*arguments, "--prompts", prompts]
    assert bench(folder, *given) == 1
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_results_are_never_overwritten(folder, prompts, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    out.write_text("mine")
    assert bench(folder, "--prompts", prompts, "--output", out) == 1
    assert "already exists" in capsys.readouterr().err
    assert out.read_text() == "mine"


def test_rows_must_be_numbers(folder, capsys):
    assert bench("passes", folder, "--rows", "1,two") == 2
    assert "not a list of whole numbers" in capsys.readouterr().err
