"""The commands of the tutorial run in their order, and print what it shows."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
from documents import DOCS, blocks, commands
from test_commands import programs

from draftree.cli.main import run
from real_weights import folder_of

MODEL = "smollm2-135m-instruct"
TUTORIAL = DOCS / "tutorial.md"
NOT_RUN = ("python", "pip", ". ", "draftree models get", "draftree serve")
"""Installation, the download, which other tests do, and a command that does not end."""
SHOWN = {
    "doctor": ["passes in C", "keys, values"],
    "--compare": ["plain: ", "acceptance length ", "speed-up "],
    "explain": ["acceptance rate of scored tokens by depth: ", "tokens per round, "],
    "trace show": ["rounds ", "tokens per round ", "scored nodes ", "seconds "],
}


def runs() -> list[str]:
    return [line for _, line in commands(TUTORIAL) if not line.startswith(NOT_RUN)]


def prompt() -> str:
    """The file that the reader saves."""
    (text,) = [block.text for block in blocks(TUTORIAL) if block.text.startswith("Write the whole code again.")]
    return text


@pytest.mark.weights
def test_the_commands_run_and_print_what_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder_of(MODEL)
    monkeypatch.chdir(tmp_path)
    Path("code.txt").write_text(prompt(), encoding="utf-8")
    for line in runs():
        *before, (_, *arguments) = programs(line)
        if before:
            assert before == [["cat", "code.txt"]]
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(Path("code.txt").read_bytes())))
        status = run(arguments)
        printed = capsys.readouterr()
        assert status == 0, printed.err
        if "--compare" in line:
            assert re.search(r"the texts are the same|texts differ", printed.out + printed.err)
        for command, lines in SHOWN.items():
            missing = [one for one in lines if command in line and one not in printed.out + printed.err]
            assert missing == [], f"{line} printed:\n{printed.out}{printed.err}"
    assert "<html" in Path("my-playground.html").read_text(encoding="utf-8")


def test_every_kind_of_output_is_looked_at() -> None:
    assert len(runs()) >= 8
    assert all(any(command in line for line in runs()) for command in SHOWN)


def test_the_tutorial_shows_lines_of_the_commands() -> None:
    shown = "".join(block.text for block in blocks(TUTORIAL) if block.language == "")
    assert [line for lines in SHOWN.values() for line in lines if line.strip() not in shown] == []
