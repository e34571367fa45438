"""The entry point: exit statuses, and the output after Ctrl-C, a closed pipe or a request for help."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from cli_samples import LONG_CONTEXT, save_tiny_model
from draftree import LLM, SamplingParams, __version__
from draftree.cli import commands
from draftree.cli.main import run

PROGRAM = [sys.executable, "-W", "error", "-c", "from draftree.cli.main import main; main()"]


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that writes more than a pipe holds."""
    return str(save_tiny_model(tmp_path_factory.mktemp("endless"), chat=False, context=LONG_CONTEXT))


def start(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*PROGRAM, *arguments],
        bufsize=0,  # a buffer would keep what ``communicate`` cannot see
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"draftree {__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_lists_every_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 0
    out = capsys.readouterr().out
    for entry in commands.COMMANDS.values():
        assert f"  {entry.name}" in out
        assert entry.summary in " ".join(out.split())


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_every_command_has_help_with_its_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"Usage: draftree {name} ")
    examples = commands.COMMANDS[name].examples
    assert examples
    for example in examples:
        assert f"  {example}\n" in out


def test_listing_and_help_do_not_wait_for_torch() -> None:
    code = (
        "import sys; from draftree.cli.main import run\n"
        "for line in ('--help', 'methods', 'models', 'generate --help', 'chat --help', 'demo --help',"
        "    'generate nowhere', 'x'):\n"
        "    run(line.split())\n"
        "    assert 'torch' not in sys.modules, line\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


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
    assert LLM(endless).generate("ab", tokens)[0].text.startswith(text)


def test_a_closed_pipe_prints_nothing() -> None:
    process = start(["methods"])
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    with process.stderr:
        err = process.stderr.read()
    assert process.wait(timeout=600) == 141
    assert err == b""


def test_a_closed_standard_input_gives_no_prompt(endless: str) -> None:
    done = subprocess.run(
        ["/bin/sh", "-c", 'exec "$@" <&-', "sh", *PROGRAM, "generate", endless], capture_output=True, check=False
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


def test_the_console_script_is_this_entry_point() -> None:
    import tomllib

    text = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    assert tomllib.loads(text)["project"]["scripts"]["draftree"] == "draftree.cli.main:main"
