"""Commands in README and docs exist, with their options; those of the tutorial and cheap ones of a guide run."""

from __future__ import annotations

import io
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from documents import DOCS, ROOT, Block, blocks, commands, documents, guide, matches
from generator import examples

from draftree.cli import batch
from draftree.cli import prompt as prompts
from draftree.cli import runs as commanded
from draftree.cli.commands import Entry
from draftree.cli.main import run
from draftree.drafters import head
from draftree.heads.config import HeadConfig
from draftree.heads.folders import read_config
from draftree.parallel.world import VARIABLES
from draftree.weights.catalogue import CATALOGUE
from real_weights import folder_of

SMALL = "stories15m"
ALL = [(block, line) for path in documents() for block, line in commands(path)]
TARGETS = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
OTHER_PROGRAMS = {".", "bash", "git", "cd", "python", "pip", "cat", "echo", "export", "docker", "kubectl", "openssl"}
OTHER_PROGRAMS |= {"serve", "vllm"}


def identity(value: object) -> str:
    return value.place if isinstance(value, Block) else str(value)


def programs(line: str) -> list[list[str]]:
    """The programs of a pipe, each with its arguments."""
    words, found = shlex.split(line, comments=True), [[]]
    for word in words:
        if word == "|":
            found.append([])
        else:
            found[-1].append(word)
    return found


def silence(command: Any) -> Any:
    """The command takes its arguments, and does nothing."""
    command.callback = None
    for below in getattr(command, "commands", {}).values():
        silence(below)
    return command


def head_of_examples(folder: str) -> HeadConfig:
    """The head that examples name, which the reader of a page would have trained or fetched."""
    return read_config(folder) if Path(folder).exists() else examples.HEAD_CONFIG


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands read what they are given, and refuse it or not; nothing is loaded or written."""
    load = Entry.load

    def quiet(entry: Entry) -> Any:
        return load(entry) if entry.name == "generate" else silence(load(entry))

    def check(setup: Any, *rest: Any, **more: Any) -> None:
        setup.methods()

    monkeypatch.setattr(Entry, "load", quiet)
    monkeypatch.setattr(head, "read_config", head_of_examples)
    monkeypatch.setattr(commanded, "write_and_report", check)
    monkeypatch.setattr(commanded, "compare_and_report", check)
    monkeypatch.setattr(batch, "write_prompts", check)
    monkeypatch.setattr(prompts, "read_images", lambda images: images)  # pictures that a reader would have
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a prompt")))


@pytest.mark.parametrize(("block", "line"), ALL, ids=identity)
def test_command_is_understood(
    block: Block, line: str, read_only: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for program, *arguments in programs(line):
        name = program.rpartition("/")[2]
        if name == "torchrun":  # each of its processes runs the same command
            for variable in VARIABLES:
                monkeypatch.setenv(variable, "0")
            monkeypatch.setenv("WORLD_SIZE", arguments[arguments.index("--nproc-per-node") + 1])
            name, arguments = "draftree", arguments[arguments.index("draftree") + 1 :]
        if name == "make":
            names = [word for word in arguments if "=" not in word]
            assert set(names) <= set(TARGETS), block.place
        elif name == "draftree":
            status = run(arguments)
            assert (status != 0) == (block.info == "fails"), f"{block.place}: {capsys.readouterr().err}"
        else:
            assert name in OTHER_PROGRAMS, f"{block.place}: '{name}' is not known here"


@pytest.mark.parametrize(
    "line",
    [
        "draftree generate",
        "draftree generat stories15m x",
        "draftree generate stories15m x --dreft ngram",
        "draftree generate stories15m x --draft ngrm",
        "draftree generate stories15m x --temperature -1",
        "draftree bench stories15m --repeets 3",
        "draftree models fetch stories15m",
    ],
)
def test_commands_that_do_not_exist_are_detected(
    line: str, read_only: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert run(shlex.split(line)[1:]) != 0
    assert capsys.readouterr().err.startswith("error: ")


def is_cheap(line: str) -> bool:
    """Loads the smallest model or none, changes nothing, measures nothing, needs no server."""
    words = line.split()
    large = [name for name in CATALOGUE if name != SMALL]
    changes = {"get", "remove", "bench", "demo", "watch"} & set(words)
    return words[0] in ("draftree", "echo") and not changes and not any(name in line for name in (*large, "remote:"))


CHEAP = [(block, line) for block, line in commands(guide("command-line")) if is_cheap(line)]


@pytest.mark.weights
@pytest.mark.parametrize(("block", "line"), CHEAP, ids=identity)
def test_command_behaves_as_in_the_guide(
    block: Block, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder_of(SMALL)
    *before, (program, *arguments) = programs(line)
    assert program == "draftree"
    if before:
        ((echo, text),) = before
        assert echo == "echo"
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{text}\n".encode())))
    status = run(arguments)
    printed = capsys.readouterr()
    assert (status != 0) == (block.info == "fails"), printed.err
    shown = printed.err if block.info == "fails" else printed.out
    assert shown.strip()
    if block.expected is not None:
        assert matches(shown, block.expected)


def test_the_guide_has_commands_to_run() -> None:
    assert len(CHEAP) >= 8


MODEL = "smollm2-135m-instruct"
TUTORIAL = DOCS / "tutorial.md"
NOT_RUN = ("python", "pip", ". ", "draftree models get", "draftree serve")
"""Installation, the download, which other tests do, and a command that does not end."""
SHOWN = {
    "doctor": ["native kernels", "keys, values"],
    "--compare": ["plain: ", "acceptance length ", "speed-up "],
    "explain": ["acceptance rate of scored tokens by depth: ", "Drafting "],
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
