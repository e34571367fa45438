"""Kernels in use, and reasons against native ones, appear on standard error, in JSON, in statistics, on `LLM`."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import subprocess
from pathlib import Path

import pytest

import forked
from cli_samples import save_tiny_model
from draftree import LLM, AsyncLLM, SamplingParams
from draftree.cli.main import run
from draftree.models.native import decoder
from draftree.models.native.build import HOW_TO_GET_KERNELS, built_library
from draftree.models.native.library import Library
from families import drafter_folder, fresh
from native_samples import SIZES

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="native kernels need a C compiler")

WHY = f"no C compiler was found: {HOW_TO_GET_KERNELS}"
LINE = f"kernels: torch ({WHY})\n"
GREEDY = ["--temperature", "0", "--max-tokens", "5"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", chat=False)


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(decoder, "library", lambda: Library(built_library()))


@pytest.mark.usefixtures("no_compiler")
def test_generate_reports_the_fallback_reason(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", str(folder), "ab", *GREEDY]) == 0
    assert capsys.readouterr().err.startswith(LINE)
    assert run(["generate", str(folder), "ab", *GREEDY, "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == LINE
    assert (found["kernels"], found["fallback_reason"]) == ("torch", WHY)
    assert (found["stats"]["kernels"], found["stats"]["fallback_reason"]) == ("torch", WHY)


@pytest.mark.usefixtures("no_compiler")
def test_nothing_is_reported_if_torch_was_requested(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", str(folder), "ab", *GREEDY, "--kernels", "torch", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert (json.loads(out)["kernels"], json.loads(out)["fallback_reason"]) == ("torch", None)


def test_nothing_is_reported_if_native_kernels_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", str(folder), "ab", *GREEDY, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert json.loads(out)["kernels"].startswith("native (")
    assert json.loads(out)["fallback_reason"] is None


COMMANDS = {
    "bench run": ["--prompts", "prompts.jsonl", "--max-tokens", "4", "--repeats", "1", "--output", "results.jsonl"],
    "bench passes": ["--rows", "1,2", "--repeats", "1", "--prefix", "4", "--output", "results.jsonl"],
    "bench perplexity": ["--text", "text.txt", "--output", "results.jsonl"],
    "tune layers": ["--prompts", "prompts.jsonl", "--trials", "1", "--max-tokens", "2", "--keep-anyway"],
}


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("command", COMMANDS)
def test_other_commands_report_and_record_the_kernels(
    command: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if command == "tune layers":
        pytest.importorskip("optuna")
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("the quick brown fox")
    Path("prompts.jsonl").write_text('{"name": "one", "category": "short", "prompt": "ab"}\n' * 4)
    assert run([*command.split(), str(folder), *COMMANDS[command]]) == 0
    assert capsys.readouterr().err.count(LINE) == 1
    if "results.jsonl" in COMMANDS[command]:
        records = [json.loads(line) for line in Path("results.jsonl").read_text().splitlines()]
        record = [line for line in records if "kernels" in line][-1]
        assert (record["kernels"], record["fallback_reason"]) == ("torch", WHY)


@pytest.mark.usefixtures("no_compiler")
def test_llm_and_its_completions_report_the_kernels(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    params = SamplingParams(max_tokens=4, temperature=0)
    llm = LLM(folder, "none")
    assert (llm.kernels, llm.fallback_reason) == ("torch", WHY)
    assert [entry.levelno for entry in caplog.records if WHY in entry.getMessage()] == [logging.WARNING]
    done = [*llm.generate(["ab", "cd"], params)]
    stream = llm.stream_updates("ab", params)
    while True:
        try:
            next(stream)
        except StopIteration as end:
            done.append(end.value)
            break

    async def ask() -> None:
        async with AsyncLLM(folder, "none") as other:
            done.extend(await other.generate("ab", params))

    asyncio.run(ask())
    assert {(one.stats.kernels, one.stats.fallback_reason) for one in done} == {("torch", WHY)}


def test_an_unsupported_family_reports_its_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM(drafter_folder("cohere", tmp_path, distance=0.0, use_qk_norm=True, **SIZES), "none")
    assert llm.kernels == "torch"
    assert "norms of heads" in str(llm.fallback_reason)
    assert "kernels: torch (" in caplog.text


def test_a_drafter_of_an_unsupported_family_reports_its_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = drafter_folder("llama", tmp_path / "target", distance=0.0, **SIZES)
    other = drafter_folder("cohere", tmp_path / "drafter", use_qk_norm=True, **SIZES)
    llm = LLM(target, f"model:{other}")
    assert llm.fallback_reason is None
    (entry,) = [entry.getMessage() for entry in caplog.records if "kernels: torch" in entry.getMessage()]
    assert entry.startswith("drafter '")
    assert "norms of heads" in entry


def test_a_loaded_model_has_a_reason_and_no_line(caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM(fresh("llama", **SIZES), "none")
    assert (llm.kernels, llm.fallback_reason) == ("torch", "it was loaded before, and its weights stay unchanged")
    assert "kernels" not in caplog.text


def test_a_process_reports_the_kernels_on_standard_error(folder: Path, tmp_path: Path) -> None:
    program = f"from draftree import LLM; LLM({str(folder)!r})"
    environment = os.environ | {"DRAFTREE_CACHE": str(tmp_path), "CC": "no-such-compiler"}
    done = subprocess.run(
        [*forked.python(), "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stderr.endswith(
        "kernels: torch (the C compiler 'no-such-compiler' of CC was not found: correct CC or unset it)\n"
    )
