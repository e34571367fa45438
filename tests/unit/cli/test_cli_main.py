"""The entry point: exit statuses, and the output after Ctrl-C, a closed pipe or a request for help."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import forked
from cli_samples import LONG_CONTEXT, save_tiny_model
from draftree import LLM, SamplingParams, __version__
from draftree.cli import commands
from draftree.cli.commands import COMMANDS
from draftree.cli.main import run
from draftree.drafters import DRAFTERS
from draftree.planners import PLANNERS
from draftree.verifiers import VERIFIERS
from draftree.weights.catalogue import CATALOGUE

MAIN = ["-W", "error", "-c", "from draftree.cli.main import main; main()"]


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that writes more than a pipe holds."""
    return str(save_tiny_model(tmp_path_factory.mktemp("endless"), chat=False, context=LONG_CONTEXT))


def start(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*forked.python(), *MAIN, *arguments],
        bufsize=0,  # a buffer would keep what ``communicate`` cannot see
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_lists_every_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 0
    out = capsys.readouterr().out
    for entry in commands.COMMANDS.values():
        assert f"  {entry.name}" in out
        assert entry.summary in " ".join(out.split())


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_every_command_has_help_with_its_examples(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"Usage: draftree {name} ")
    examples = commands.COMMANDS[name].examples
    assert examples
    for example in examples:
        assert f"  {example}\n" in out
    assert len(out.splitlines()) <= 40
    command = commands.COMMANDS[name].load()
    below = getattr(command, "commands", {})
    for path, each in [((name, sub), each) for sub, each in below.items()] or [((name,), command)]:
        assert run([*path, "--help"]) == 0
        assert len(capsys.readouterr().out.splitlines()) <= 40
        assert run([*path, "--help-all"]) == 0
        out = capsys.readouterr().out
        options = [parameter.opts[0] for parameter in each.params if parameter.param_type_name == "option"]
        assert [option for option in options if f"  {option}" not in out] == []


def test_ctrl_c_shows_what_was_verified(endless: str) -> None:
    process = start(["generate", endless, "ab", "--stream", "--temperature", "0", "--max-tokens", "none"])
    assert process.stdout is not None
    first = process.stdout.read(40)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 130
    assert err.decode().splitlines()[-1] == "interrupted"
    assert b"Traceback" not in err
    shown = (first + out).decode()
    assert shown.endswith("\n")
    text = shown.removesuffix("\n")
    tokens = SamplingParams(temperature=0, max_tokens=len(shown.encode()))
    assert LLM(endless, "none").generate("ab", tokens)[0].text.startswith(text)


@pytest.mark.parametrize(("number", "status", "line"), [(2, 130, "interrupted"), (15, 143, "terminated")])
def test_a_signal_while_kernels_are_compiled_leaves_one_line_and_nothing_else(
    number: int, status: int, line: str, endless: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, compiler = tmp_path / "started", tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\nmkfifo {tmp_path}/$$\necho $$ >> {started}\nread line < {tmp_path}/$$\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path / "cache"))
    process = start(["generate", endless, "ab"])
    while not started.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(number)
    err = process.communicate(timeout=600)[1].decode()
    assert (process.returncode, err.splitlines()[-1]) == (status, line), err
    assert "Traceback" not in err
    for place in (Path(f"/proc/{pid}/stat") for pid in started.read_text().split()):
        while place.exists() and place.read_text().split()[2] != "Z":
            time.sleep(0.05)


def test_a_closed_standard_input_gives_no_prompt(endless: str) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", 'exec "$@" <&-', "sh", sys.executable, *MAIN, "generate", endless],
        capture_output=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.decode().startswith("error: invalid value for PROMPT: give a text, or pipe one")


@pytest.mark.parametrize(
    ("raised", "status", "text"),
    [
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (OSError(28, "No space left on device", "/a/b"), 1, "error: No space left on device: /a/b\n"),
        (ValueError("two\nlines"), None, ""),
    ],
)
def test_exceptions_become_exit_statuses(
    raised: BaseException,
    status: int | None,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(arguments: Sequence[str]) -> int:
        raise raised

    monkeypatch.setattr(commands, "invoke", fail)
    if status is None:
        # not raised on purpose: a bug, which must not look like bad input
        with pytest.raises(ValueError, match="two"):
            run([])
    else:
        assert run([]) == status
    assert capsys.readouterr().err == text


Complete = Callable[[str], list[str]]
SHELLS = ("bash", "zsh", "fish")


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "draftree", "-V"], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == (f"draftree {__version__}\n", "", 0)


def test_short_options_for_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("-V", "--version"):
        assert run([option]) == 0
        assert capsys.readouterr().out == f"draftree {__version__}\n"
    for path in ([], ["generate"], ["models", "get"], ["bench", "run"], ["tune", "layers"]):
        texts = []
        for option in ("-h", "--help"):
            assert run([*path, option]) == 0
            texts.append(capsys.readouterr().out)
        assert texts[0] == texts[1]
        assert texts[0].startswith(" ".join(["Usage: draftree", *path]))
        assert "-h, --help" in texts[0]


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Complete:
    """The completions that bash gets for a line."""
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path / "cache"))

    def call(line: str) -> list[str]:
        words = line.split(" ")
        monkeypatch.setenv("_DRAFTREE_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", "\n".join(words))
        monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
        status = run([])
        printed = capfd.readouterr()
        assert (status, printed.err) == (0, "")
        return printed.out.split()

    return call


def test_commands_and_options_are_completed(complete: Complete) -> None:
    assert set(complete("draftree ")) == set(COMMANDS)
    assert complete("draftree gen") == ["generate"]
    assert complete("draftree models g") == ["get"]
    assert complete("draftree generate stories15m ab --temp") == ["--temperature"]
    assert complete("draftree genrate x") == []


def test_models_are_completed(complete: Complete, tmp_path: Path) -> None:
    made = tmp_path / "cache" / "models" / "gguf-mine-012345"
    made.mkdir(parents=True)
    (made / "draftree.json").write_text("{}")
    assert set(complete("draftree generate ")) == {*CATALOGUE, "gguf-mine-012345"}
    assert complete("draftree generate tiny") == ["tinyllama-1.1b-chat"]
    assert complete("draftree models get smo") == ["smollm2-135m-instruct"]
    assert complete("draftree models remove g") == ["gguf-mine-012345"]
    assert complete("draftree doctor stor") == ["stories15m"]
    assert complete("draftree demo --model tiny") == ["tinyllama-1.1b-chat"]


def test_methods_are_completed(complete: Complete) -> None:
    drafters = {"auto", "none", *DRAFTERS.names()}
    assert {name.rstrip(":") for name in complete("draftree generate x ab --draft ")} == drafters
    assert complete("draftree generate x ab --draft ngr") == ["ngram"]
    assert complete("draftree generate x ab --draft suffix+ngr") == ["suffix+ngram"]
    assert "model:" in complete("draftree explain x --draft mod")
    assert set(complete("draftree doctor x --verify ")) == set(VERIFIERS.names())
    assert set(complete("draftree bench run x --plan ")) == set(PLANNERS.names())


@pytest.mark.parametrize("shell", SHELLS)
def test_the_completion_script_is_printed(
    shell: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_DRAFTREE_COMPLETE", f"source_{shell}")
    assert run([]) == 0
    script = capfd.readouterr().out
    assert f"_DRAFTREE_COMPLETE=complete_{shell}" in script
    if shutil.which(shell):
        assert subprocess.run([shell, "-n"], input=script, text=True, check=False).returncode == 0


def test_installing_and_showing_are_options(tmp_path: Path) -> None:
    environment = os.environ | {"HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    program = [sys.executable, "-m", "draftree"]
    shown = subprocess.run(
        [*program, "--show-completion", "bash"], capture_output=True, text=True, check=False, env=environment
    )
    assert shown.returncode == 0
    assert "complete -o default -F _draftree_completion draftree" in shown.stdout
    done = subprocess.run(
        [*program, "--install-completion", "bash"], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / ".bash_completions" / "draftree.sh").read_text() == shown.stdout.rstrip("\n")


def test_completion_does_not_wait_for_torch() -> None:
    code = (
        "import os, sys\n"
        "os.environ.update(_DRAFTREE_COMPLETE='complete_bash', COMP_CWORD='4')\n"
        "os.environ['COMP_WORDS'] = '\\n'.join(['draftree', 'generate', 'x', '--draft', ''])\n"
        "from draftree.cli.main import run\n"
        "assert run([]) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "ngram" in done.stdout.split()


GUESSES = [
    (["generate", "x", "ab", "--format", "json"], "--json"),
    (["methods", "--format=json"], "--json"),
    (["models", "list", "--output-format", "json"], "--json"),
    (["generate", "x", "ab", "--max-new-tokens", "5"], "--max-tokens"),
    (["generate", "x", "ab", "--temp", "0"], "--temperature"),
    (["generate", "x", "ab", "--draft-model", "stories15m"], "--draft model:NAME"),
    (["generate", "x", "ab", "--assistant-model", "stories15m"], "--draft model:NAME"),
    (["generate", "x", "--prompt-file", "f"], "--prompts"),
    (["generate", "x", "ab", "--top_p", "0.9"], "--top-p"),
    (["bench", "x", "--batch-size", "2"], "--batch"),
]


@pytest.mark.parametrize(("arguments", "option"), GUESSES, ids=[" ".join(arguments) for arguments, _ in GUESSES])
def test_an_option_of_another_program_gets_a_suggestion(
    arguments: list[str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"did you mean '{option}'?" in printed.err
    assert printed.err.count("\n") == 1


def test_only_options_that_the_command_has_are_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", "layers", "x", "--prompts", "f", "--format", "json"]) == 2
    assert "--json" not in capsys.readouterr().err
