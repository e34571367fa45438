"""The build of the native library: folders, compilers and messages. Real processes build a small one."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from draftree.models.native import build as builds
from draftree.models.native import library as libraries
from draftree.models.native import library_files
from draftree.models.native.build import NativeUnavailableError, built_library, find_compiler
from draftree.models.native.library import Library

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(builds, "_private", {})
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "small.c"
    path.write_text("int answer(void) { return 42; }")
    return path


def compiler(folder: Path, body: str, name: str = "compiler") -> str:
    script = folder / name
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    return str(script)


def given(folder: Path) -> list[str]:
    return (folder / "given").read_text().split()


@pytest.fixture
def noting(tmp_path: Path) -> str:
    """A compiler that notes its arguments."""
    return compiler(tmp_path, f'echo "$@" > {tmp_path}/given; exec cc "$@"')


@pytest.mark.parametrize("both", [("", ""), ("cc", ""), ("", "/nowhere/gcc"), ("env cc", ""), ("cc -O1", "gcc -O1")])
def test_a_built_library_needs_no_compiler(
    source: Path, both: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", both[0])
    first = built_library([source])
    monkeypatch.setenv("CC", both[1])
    monkeypatch.setenv("PATH", "/nowhere")
    assert built_library([source]) == first


def test_a_built_library_needs_no_working_compiler(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = built_library([source])
    folder = tmp_path / "bin"
    folder.mkdir()
    compiler(folder, "echo 'fatal error: stdio.h' >&2; exit 1", name="cc")
    monkeypatch.setenv("PATH", str(folder))
    assert built_library([source]) == first


def test_without_library_and_compiler_the_reason_names_the_packages(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NativeUnavailableError, match="no C compiler found: install gcc or clang"):
        built_library([source])


def test_another_compiler_builds_anew(source: Path, noting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = built_library([source])
    monkeypatch.setenv("CC", noting)
    second = built_library([source])
    assert second != first
    Path(noting).write_text(Path(noting).read_text() + "# another version\n")
    assert built_library([source]) != second


def test_a_launcher_before_the_compiler(
    source: Path, tmp_path: Path, noting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = compiler(tmp_path, 'exec "$@"', name="ccache")
    monkeypatch.setenv("CC", f"{launcher} {noting}")
    assert find_compiler() == (launcher, noting)
    built_library([source])
    assert "-O3" in given(tmp_path)


@pytest.mark.parametrize(
    ("options", "without"), [("-O2", "-O3"), ("-march=x86-64", "-march=native"), ("-O1 -march=x86-64", "-O3")]
)
def test_options_in_cc_are_honoured(
    source: Path, tmp_path: Path, noting: str, options: str, without: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = built_library([source])
    monkeypatch.setenv("CC", f"{noting} {options}")
    path = built_library([source])
    found = given(tmp_path)
    assert all(option in found for option in options.split())
    assert without not in found
    assert "-ffp-contract=off" in found
    assert path.name.split("-")[1] != plain.name.split("-")[1]


def test_a_path_with_spaces_is_one_word(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noting: str
) -> None:
    place = tmp_path / "my tools"
    place.mkdir()
    monkeypatch.setenv("CC", str(shutil.copy(noting, place / "cc")))
    built_library([source])
    assert given(tmp_path)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("exit 3", "it ended with status 3"),
        ("echo 'small.c:1: error: no such thing' >&2; exit 1", "error: no such thing"),
        ("exit 0", "wrote no library"),
        (': > "$(echo "$@" | sed \'s/.*-o \\([^ ]*\\).*/\\1/\')"', "wrote no library"),
    ],
)
def test_a_broken_compiler_is_reported(
    source: Path, tmp_path: Path, body: str, message: str, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    monkeypatch.setenv("CC", compiler(tmp_path, body))
    with pytest.raises(NativeUnavailableError, match=message):
        built_library([source])
    assert not list((own_cache / "native").iterdir())


def test_a_cc_that_is_not_a_program_is_reported(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "cc"
    broken.write_bytes(b"\x7fELF not really")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(NativeUnavailableError, match="cannot be run"):
        built_library([source])


@pytest.mark.parametrize(
    ("value", "message"),
    [("no-such-compiler -O2", "'no-such-compiler' of CC was not found"), ("gcc 'unclosed", "which is not a command")],
)
def test_a_cc_that_names_nothing_is_reported(
    source: Path, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", value)
    with pytest.raises(NativeUnavailableError, match=message):
        built_library([source])


PROGRAM = """
import ctypes, sys
from pathlib import Path
from draftree.models.native.build import built_library
path = built_library([Path(sys.argv[1])])
assert built_library([Path(sys.argv[1])]) == path, "built once"
print(path, oct(path.parent.stat().st_mode & 0o7777), ctypes.CDLL(str(path)).answer())
"""


def test_a_cache_that_cannot_be_made_gives_a_private_build(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = os.environ | {"DRAFTREE_CACHE": str(tmp_path / "file" / "cache"), "TMPDIR": str(temporary)}
    command = [sys.executable, "-c", PROGRAM, str(source)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    path, mode, answer = done.stdout.split()
    assert Path(path).parent.parent == temporary
    assert (mode, answer) == ("0o700", "42")
    assert "is built for this process only" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(temporary.iterdir())


def test_a_full_cache_gives_a_private_build(
    source: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path) -> None:
        if own_cache in path.parents:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(library_files, "sync", full)
    path = built_library([source])
    assert own_cache not in path.parents
    assert "No space left on device" in caplog.text
    assert not list((own_cache / "native").iterdir())


def test_a_cache_that_the_compiler_cannot_write_gives_a_private_build(
    source: Path, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = f"case \"$@\" in *{own_cache}*) echo 'ld: final link failed: No space left on device' >&2; exit 1;; esac"
    monkeypatch.setenv("CC", compiler(tmp_path, f'{body}\nexec cc "$@"'))
    assert own_cache not in built_library([source]).parents


def test_a_library_that_does_not_load_from_the_cache_is_loaded_from_elsewhere(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Path] = []

    class Refused(Library):
        def __init__(self, path: Path) -> None:
            loaded.append(path)
            if own_cache in path.parents:
                raise libraries.NotLoadableError("failed to map segment: Operation not permitted")

    monkeypatch.setattr(libraries, "Library", Refused)
    monkeypatch.setattr(
        libraries,
        "built_library",
        lambda *, extra_flags=(), in_cache=True: built_library(
            [builds.SOURCES[1]], extra_flags=extra_flags, in_cache=in_cache
        ),
    )
    libraries.library.__wrapped__()
    assert [own_cache in path.parents for path in loaded] == [True, False]


def test_a_private_folder_of_a_dead_process_is_removed(
    tmp_path: Path, source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    program = f"{PROGRAM}\nimport os; os._exit(1)"
    environment = os.environ | {"DRAFTREE_CACHE": "/proc/none", "TMPDIR": str(temporary)}
    for _ in range(2):
        subprocess.run([sys.executable, "-c", program, str(source)], env=environment, capture_output=True, check=False)
        assert len(list(temporary.iterdir())) == 1


def test_a_temporary_folder_of_others_is_not_used_either(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    temporary.chmod(0o777)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setenv("DRAFTREE_CACHE", "/proc/none")
    with pytest.raises(NativeUnavailableError, match="can be written by others"):
        built_library([source])


@pytest.mark.parametrize(
    ("kind", "host", "process", "is_old", "is_removed"),
    [
        (library_files.WORK, "ours", "ours", False, False),
        (library_files.WORK, "ours", "ours", True, True),
        (library_files.WORK, "ours", "none", False, True),
        (library_files.WORK, "another", "none", False, False),
        (library_files.WORK, "another", "none", True, True),
        (library_files.PRIVATE, "ours", "ours", True, False),
        (library_files.PRIVATE, "ours", "none", False, True),
    ],
)
def test_which_leftovers_are_removed(
    tmp_path: Path, kind: str, host: str, process: str, is_old: bool, is_removed: bool
) -> None:
    own, number = library_files._owner().split("-")
    ended = subprocess.Popen(["true"])
    ended.wait()
    names = {"ours": number, "none": str(ended.pid)}
    place = tmp_path / f"{kind}-{own if host == 'ours' else '0' * 8}-{names[process]}-abc"
    place.mkdir()
    (place / "library.so").write_text("half of one")
    if is_old:
        os.utime(place, (0, 0))
    library_files.remove_leftovers(tmp_path, kind)
    assert place.exists() != is_removed


def test_folders_are_made_writable_for_this_user_alone_whatever_the_umask(source: Path, own_cache: Path) -> None:
    before = os.umask(0)
    try:
        first = built_library([source])
    finally:
        os.umask(before)
    assert own_cache.stat().st_mode & 0o022 == 0
    assert built_library([source]) == first
