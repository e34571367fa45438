"""Starts of the command line: what they import, and what a first one shows in a terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli_samples import save_tiny_model
from draftree.cli.render import progress_bars, waiting
from draftree.weights.cache import steps
from head_samples import saved_head
from terminals import CTRL_C, PATIENCE_SECONDS, PROGRAM, plain, terminal

HEAVY = {"transformers", "huggingface_hub", "accelerate", "scipy", "pandas", "matplotlib", "sympy", "sklearn"} | {
    "pydantic"
}
"""Packages that no later start needs; the first six are imported by transformers, sympy by torch, pydantic by typer."""
UNUSED = {
    "draftree.lab.analysis",
    "draftree.beam.search",
    "draftree.lab.bench.benchmark",
    "draftree.loading.lowering",
    "draftree.loading.references",
    "filelock",
}
"""Modules for first starts, searches and measurements."""
REPORT = """
import json, sys
from draftree.cli.main import run
status = run(json.loads(sys.argv[1]))
sys.stderr.write(json.dumps([status, sorted(sys.modules)]))
"""


def imported(*arguments: str) -> set[str]:
    """Return the modules that a command imports in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", REPORT, json.dumps(arguments)],
        capture_output=True,
        text=True,
        check=True,
        stdin=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if name != "DRAFTREE_BLUEPRINTS"},
    )
    status, modules = json.loads(done.stderr.splitlines()[-1])
    assert status == 0, done.stderr
    return set(modules)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model") / "tiny", chat=True))


@pytest.fixture(scope="module")
def head() -> str:
    """A head for the tiny model, which has two layers of width 32 and 257 tokens."""
    sizes = {"target_hidden": 32, "hidden": 32, "vocab_size": 257, "draft_vocab_size": 257, "head_dim": 8}
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return saved_head(features=(0, 1, -1), rope=rope, **sizes)


def test_a_later_start_with_a_head_imports_no_heavy_package(tmp_path: Path, head: str) -> None:
    folder = str(save_tiny_model(tmp_path / "unknown", chat=True, seed=2))  # no other test starts it
    command = ("generate", folder, "ab", "--max-tokens", "4", "--temperature", "0", "--draft", f"head:{head}+suffix")
    assert "transformers" in imported(*command)
    assert imported(*command) & HEAVY == set()


@pytest.mark.parametrize(
    "options", [("--draft", "none"), ("--draft", "suffix", "--compare"), ("--quantization", "int8")]
)
def test_a_later_start_with_other_options_imports_no_heavy_package(folder: str, options: tuple[str, ...]) -> None:
    command = ("generate", folder, "ab", "--max-tokens", "4", *options)
    imported(*command)
    assert imported(*command) & (HEAVY | UNUSED) == set()


@pytest.mark.weights
def test_a_later_start_of_a_shipped_head_imports_no_heavy_package() -> None:
    command = ("generate", "smollm2-135m-instruct", "Hi", "--max-tokens", "4")
    imported(*command)
    modules = imported(*command)
    assert modules & (HEAVY | UNUSED) == set()
    assert len([name for name in modules if name.startswith("draftree")]) < 420


@pytest.mark.parametrize(
    "line", ["--help", "generate --help", "chat --help", "demo --help", "serve --help", "train head --help", "methods"]
)
def test_help_and_lists_do_not_import_torch(line: str) -> None:
    assert imported(*line.split()) & {"torch", *HEAVY} == set()


def test_the_engine_is_imported_while_the_terminal_says_so() -> None:
    code = "import sys; from draftree.cli.options import import_engine; import_engine(); assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


class Stream:
    """A standard error that is a terminal or not."""

    def __init__(self, *, terminal: bool) -> None:
        self.terminal, self.text = terminal, ""

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


def test_each_step_leaves_one_line_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(terminal=True)
    monkeypatch.setattr(sys, "stderr", stream)
    with waiting("loading x"):
        steps.info("reading %s", "a\x1bb")
        steps.info("packing")
    lines = plain(stream.text.replace("\r", "\n")).splitlines()
    kept = [line for line in lines if line and not line.endswith("…")]
    assert [line.partition(": ")[0] for line in kept] == ["reading a\\x1bb", "packing"]
    assert all(line.endswith(" s") for line in kept)
    before = stream.text
    steps.info("later")
    assert stream.text == before, "the logger is as before"


def test_an_interrupted_step_leaves_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(terminal=True)
    monkeypatch.setattr(sys, "stderr", stream)
    with pytest.raises(KeyboardInterrupt), waiting("loading x"):
        steps.info("packing")
        raise KeyboardInterrupt
    assert stream.text.endswith("packing …\r\x1b[K")


def test_nothing_is_shown_through_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(terminal=False)
    monkeypatch.setattr(sys, "stderr", stream)
    with waiting("loading x"):
        steps.info("packing")
    with progress_bars("x") as report:
        report("download", 1, 2)
    assert stream.text == ""


LINGERING = """
import time
from draftree.weights.cache import steps

def linger(record):
    if {moment!r} in record.getMessage():
        steps.removeFilter(linger)
        steps.handle(record)
        time.sleep({seconds})
    return True

steps.addFilter(linger)
"""
"""A step of a tiny model's start may end before the key arrives: this one lasts."""


@pytest.mark.parametrize("moment", ["importing torch", "reading weights through transformers", "comparing logits"])
def test_ctrl_c_during_a_first_start_ends_cleanly_and_the_next_start_works(tmp_path: Path, moment: str) -> None:
    folder = save_tiny_model(tmp_path / "tiny", chat=False)
    command = ["generate", str(folder), "ab", "--max-tokens", "4", "--draft", "none"]
    is_forked = moment != "importing torch"
    program = LINGERING.format(moment=moment, seconds=PATIENCE_SECONDS) + PROGRAM if is_forked else PROGRAM
    with terminal(command, is_forked=is_forked, program=program) as shown:
        shown.wait_for(moment)
        shown.type(CTRL_C)
        assert shown.end() == 130
        assert "Traceback" not in shown.screen
    with terminal(command) as shown:
        assert shown.end() == 0
    assert "4 tokens in" in plain(shown.screen)
