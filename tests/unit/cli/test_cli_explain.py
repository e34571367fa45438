"""`draftree explain` and `draftree generate` take the options of a run: rule, kernels, quantization, threads, chat."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from draftree import LLM
from draftree.cli import runs
from draftree.cli.main import run

LINE = ["--draft", "ngram", "--max-tokens", "12"]


@pytest.fixture
def threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[LLM]:
    """The models at work, plain decoding first."""
    found: list[LLM] = []

    class Kept(LLM):
        def __init__(self, *given: Any, **more: Any) -> None:
            super().__init__(*given, **more)
            found.append(self)

    monkeypatch.setattr("draftree.llm.LLM", Kept)
    return found


def test_explain_takes_the_rule_the_kernels_and_the_threads(
    chat: str, made: list[LLM], threads: None, capfd: pytest.CaptureFixture[str]
) -> None:
    how = ["--verify", "match", "--kernels", "torch", "--dtype", "float32", "--threads", "2"]
    assert run(["explain", chat, "ab", *LINE, *how]) == 0
    assert capfd.readouterr().out.startswith("Drafting ")
    assert torch.get_num_threads() == 2
    assert made[-1].kernels == "torch"
    assert type(made[-1].engine.parts.verifier).__name__ == "Match"


def test_explain_takes_a_quantization(chat: str, made: list[LLM], capfd: pytest.CaptureFixture[str]) -> None:
    status = run(["explain", chat, "ab", *LINE, "--quantization", "int8"])
    err = capfd.readouterr().err
    # refused where there are no native kernels, and never ignored
    assert (status == 0 and made[-1].quantization == "int8") or "native kernels" in err


@pytest.mark.parametrize(
    ("arguments", "length"),
    [
        ([], len("[user] ab\n[assistant] ")),
        (["--system", "hm"], len("[system] hm\n[user] ab\n[assistant] ")),
        (["--no-chat"], len("ab")),
    ],
)
def test_explain_uses_the_chat_template_as_generate_does(
    chat: str, arguments: list[str], length: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lengths = []
    write = runs.write

    def noting(*given: Any, **more: Any) -> Any:
        done = write(*given, **more)
        lengths.append(done.completions[0].stats.prompt_tokens)
        return done

    monkeypatch.setattr(runs, "write", noting)
    assert run(["explain", chat, "ab", *LINE, *arguments]) == 0
    assert lengths == [length, length]


def test_explain_announces_a_lossy_rule(chat: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", chat, "ab", *LINE, "--verify", "typical", "--temperature", "1"]) == 0
    assert capfd.readouterr().err.count("is lossy at temperature 1") == 1


def test_generate_takes_threads(chat: str, threads: None, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", chat, "ab", *LINE, "--threads", "2"]) == 0
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("command", ["generate", "explain"])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--threads", "0"], "threads is 0: it must be a whole number of at least 1"),
        (["--kernels", "fast"], "fast"),
        (["--quantization", "int3"], "int3"),
        (["--verify", "nothing"], "nothing"),
    ],
)
def test_wrong_values_are_refused_before_a_model_is_resolved(
    command: str, given: list[str], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run([command, str(Path("no-such-model")), "ab", *LINE, *given]) == 1
    err = capfd.readouterr().err
    assert words in err
    assert "no-such-model" not in err
