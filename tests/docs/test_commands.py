"""Commands in README and docs exist, with the options that they are given; cheap ones of the guide are run."""

from __future__ import annotations

import io
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT, Block, commands, documents, guide, matches
from generator import examples

from draftree.cli import generate
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
OTHER_PROGRAMS = (
    ".",
    "bash",
    "git",
    "cd",
    "python",
    "pip",
    "cat",
    "echo",
    "export",
    "docker",
    "kubectl",
    "openssl",
    "serve",
    "vllm",
)


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
    monkeypatch.setattr(generate, "write_and_report", check)
    monkeypatch.setattr(generate, "compare_and_report", check)
    monkeypatch.setattr(generate, "write_batch_and_report", check)
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
