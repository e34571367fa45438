"""A compiled library is loaded only if it is whole and only this user or root could have written it.

Real processes load them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from draftree.models.native import build
from draftree.models.native import build as library_files

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

PROGRAM = """
import ctypes, logging, sys
from pathlib import Path
from draftree.models.native import build
logging.basicConfig(level=logging.INFO)
build.SOURCES = (Path(sys.argv[1]),)
path = build.built_library()
print(path)
print(oct(path.parent.stat().st_mode & 0o7777))
print(ctypes.CDLL(str(path)).answer())
"""
ONLY_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
STRANGER = 65534


class Bench:
    """A source, a cache, and processes that load what was built."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cache = folder, folder / "cache"
        self.native = self.cache / "native"
        self.source = folder / "small.c"
        self.source.write_text("int answer(void) { return 42; }")
        self.marker = folder / "the constructor ran"

    def start(self, **environment: str) -> subprocess.Popen[str]:
        known = os.environ | {"DRAFTREE_CACHE": str(self.cache), "TMPDIR": str(self.temporary)} | environment
        command = [sys.executable, "-c", PROGRAM, str(self.source)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=known, stdout=pipe, stderr=pipe, text=True)

    def wait_until_started(self, process: subprocess.Popen[str]) -> None:
        """Wait until a compiler of `_compiler` runs in a process."""
        while not (self.folder / "started").exists():
            assert process.poll() is None, "the compiler runs"
            time.sleep(0.05)

    @property
    def temporary(self) -> Path:
        place = self.folder / "tmp"
        place.mkdir(exist_ok=True)
        return place

    def load(self, **environment: str) -> tuple[Path, str]:
        """The path of the library that a process loads, and the log of that process."""
        process = self.start(**environment)
        out, log = process.communicate(timeout=120)
        assert process.returncode == 0, log
        path, self.mode, answer = out.splitlines()
        assert answer == "42"
        return Path(path), log

    @property
    def library(self) -> Path:
        (found,) = self.native.glob("*.so")
        return found

    def plant(self) -> Path:
        """Put a library with a constructor in the place of the built one, under a name that fits its content."""
        evil = self.folder / "evil.c"
        evil.write_text(
            f"""#include <fcntl.h>
            __attribute__((constructor)) static void run(void) {{ open("{self.marker}", O_CREAT | O_WRONLY, 0600); }}
            int answer(void) {{ return 66; }}"""
        )
        old = self.library
        fresh = self.folder / "evil.so"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", str(fresh), str(evil)], check=True)
        name = f"{old.name.rpartition('-')[0]}-{hashlib.sha256(fresh.read_bytes()).hexdigest()[:32]}.so"
        old.unlink()
        planted = old.with_name(name)
        shutil.copy(fresh, planted)
        return planted


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_the_second_process_loads_what_the_first_one_built(bench: Bench) -> None:
    first, _ = bench.load()
    status = first.stat()
    second, log = bench.load()
    assert (second, second.stat().st_ino, second.stat().st_mtime_ns) == (first, status.st_ino, status.st_mtime_ns)
    assert "compiling" not in log
    assert first.stat().st_mode & 0o022 == 0


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "truncated": lambda content: content[: len(content) // 3],
    "one bit": lambda content: content[:700] + bytes([content[700] ^ 4]) + content[701:],
    "zeros": lambda content: bytes(len(content)),
    "more at the end": lambda content: content + b"x",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_built_anew(bench: Bench, damage: str) -> None:
    path, _ = bench.load()
    whole = path.read_bytes()
    path.write_bytes(DAMAGES[damage](whole))
    again, log = bench.load()
    assert "is damaged" in log
    assert hashlib.sha256(again.read_bytes()).hexdigest()[:32] in again.name
    assert [bench.library] == [again]
    assert "compiling" not in bench.load()[1]


@ONLY_ROOT
def test_a_library_of_another_user_is_not_loaded(bench: Bench) -> None:
    bench.load()
    os.chown(bench.plant(), STRANGER, STRANGER)
    _, log = bench.load()
    assert "belongs to user 65534" in log
    assert not bench.marker.exists()


@pytest.mark.parametrize("mode", [0o666, 0o757])
def test_a_library_that_others_can_write_is_not_loaded(bench: Bench, mode: int) -> None:
    bench.load()
    bench.plant().chmod(mode)
    _, log = bench.load()
    assert "can be written by others" in log
    assert not bench.marker.exists()


def test_a_link_to_a_library_is_not_followed(bench: Bench) -> None:
    bench.load()
    planted = bench.plant()
    elsewhere = bench.folder / planted.name
    planted.rename(elsewhere)
    planted.symlink_to(elsewhere)
    bench.load()
    assert not bench.marker.exists()


def test_a_planted_library_would_run(bench: Bench) -> None:
    """The tests above would notice: with the right owner and mode this library is loaded."""
    bench.load()
    bench.plant()
    process = bench.start()
    process.communicate(timeout=120)
    assert bench.marker.exists()


def _open_to_all(place: Path) -> None:
    place.chmod(0o777)


def _given_away(place: Path) -> None:
    os.chown(place, STRANGER, STRANGER)


@pytest.mark.parametrize("change", [_open_to_all, pytest.param(_given_away, marks=ONLY_ROOT)])
@pytest.mark.parametrize("place", ["cache/native", "cache", "."])
def test_a_folder_of_others_is_not_used(bench: Bench, place: str, change: Callable[[Path], None]) -> None:
    bench.load()
    bench.plant()
    change(bench.folder / place)
    path, log = bench.load(TMPDIR="/tmp")
    assert not bench.marker.exists()
    assert path.parent.parent == Path("/tmp")
    assert bench.mode == "0o700"
    assert not path.parent.exists()
    assert ("can be written by others" if change is _open_to_all else "belongs to user 65534") in log
    assert [bench.library] == sorted(bench.native.glob("[!.]*"))


def test_a_sticky_folder_above_is_no_obstacle(bench: Bench) -> None:
    bench.folder.chmod(0o1777)
    assert bench.load()[0].parent == bench.native


def test_a_new_folder_is_not_writable_by_others_whatever_the_umask(bench: Bench) -> None:
    before = os.umask(0)
    try:
        bench.cache.mkdir(mode=0o755)
        path, _ = bench.load()
    finally:
        os.umask(before)
    assert path.parent == bench.native
    assert bench.mode == "0o755"
    assert path.stat().st_mode & 0o022 == 0
    assert "compiling" not in bench.load()[1]


def _compiler(folder: Path, body: str) -> str:
    script = folder / "compiler"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    return str(script)


def test_leftovers_of_a_killed_build_are_removed(bench: Bench) -> None:
    waiting = _compiler(bench.folder, f"echo started > {bench.folder}/started; exec sleep 60")
    process = bench.start(CC=waiting)
    bench.wait_until_started(process)
    (left,) = bench.native.glob(f"{library_files.WORK}*")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    for child in _children_in(left):
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    assert left.is_dir()
    bench.load()
    assert not left.exists()
    assert [bench.library] == sorted(bench.native.glob("[!.]*"))


def _children_in(folder: Path) -> list[int]:
    """Processes whose command line names the folder."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.fsencode(folder) in (place / "environ").read_bytes():
                found.append(int(place.name))
    return found


def test_content_is_on_the_disk_before_the_name(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    sync, replace = library_files.sync, os.replace

    def syncing(path: Path) -> None:
        happened.append("folder" if path.is_dir() else "file")
        sync(path)

    def replacing(source: Path, place: Path) -> None:
        happened.append("rename")
        replace(source, place)

    monkeypatch.setattr(library_files, "sync", syncing)
    monkeypatch.setattr(library_files.os, "replace", replacing)
    monkeypatch.setenv("DRAFTREE_CACHE", str(bench.cache))
    monkeypatch.setattr(build, "SOURCES", (bench.source,))
    build.built_library()
    assert happened == ["file", "rename", "folder"]
