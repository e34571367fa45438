"""`draftree demo` on a tiny model."""

from __future__ import annotations

import dataclasses

import pytest

from draftree.cli import demo, runs
from draftree.cli.demo import DEMO_PROMPTS, outline, verdict
from draftree.cli.main import run
from draftree.cli.options import Setup
from draftree.cli.runs import Run
from draftree.outputs import Completion
from paced import paced_llm


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers long enough to run in a circle, by a clock by which drafts of a circle pay."""
    monkeypatch.setattr("draftree.llm.LLM", paced_llm)
    monkeypatch.setattr(
        demo, "DEMO_PROMPTS", tuple(dataclasses.replace(demo_prompt, max_tokens=40) for demo_prompt in DEMO_PROMPTS)
    )


def test_both_prompts_are_answered_twice_and_compared(chat: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["demo", "--model", chat]) == 0
    captured = capfd.readouterr()
    assert captured.err == ""
    assert "\x1b" not in captured.out, "a pipe gets no colours"
    assert "torch " in captured.out
    assert "thread" in captured.out
    assert "float32" in captured.out or "bfloat16" in captured.out, "what the processor has instructions for"
    assert captured.out.count(" tokens/s · acceptance length 1.00\n") == 2
    assert captured.out.count("\nwith suffix\n") == 2
    assert captured.out.count(" · the two texts are the same\n") == 2


def test_texts_that_differ_are_an_error(
    chat: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runs, "are_equal", lambda plain, fast: False)
    assert run(["demo", "--model", chat]) == 1
    assert capfd.readouterr().out.count("the two texts DIFFER") == 2


def test_colours_tell_accepted_from_picked(chat: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["demo", "--model", chat, "--colour", "always"]) == 0
    out = capfd.readouterr().out
    plain, fast = out.split("── 2.")[0].split("with suffix")[-2:]
    assert "\x1b[32m" in fast
    assert "\x1b[32m" not in plain.split("plain")[-1]


def test_prompts_are_shown_without_their_code() -> None:
    assert list(outline("Do\n```python\na\n\nb\n```\n\nthis.")) == ["Do", "[3 lines of code]", "this."]
    assert [len(list(outline(demo_prompt.prompt))) for demo_prompt in DEMO_PROMPTS] == [2, 1]


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        (3.0, "tokens were drafted correctly, in 2 passes."),
        (1.05, "in 2 passes."),
        (1.0, "about the time that they saved"),
        (0.8, "more time than they saved"),
    ],
)
def test_the_summary_matches_the_ratio(ratio: float, words: str, chat: str) -> None:
    from draftree import LLM, SamplingParams

    completions: list[Completion] = LLM(chat, "none").generate("ab", SamplingParams(max_tokens=2))
    from draftree.cli.prompt import Task

    found = verdict(ratio, Run(Setup(chat, "ngram"), Task("ab"), completions, 1.0))
    assert words in found
    assert found.startswith("0 of 2 tokens")
