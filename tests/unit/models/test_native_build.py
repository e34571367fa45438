"""Where libraries of kernels are found and how they are compiled. Real compilers build small sources."""

from __future__ import annotations

import errno
import importlib.util
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftree.core.errors import ConfigurationError
from draftree.models.native import build
from draftree.models.native import library as libraries
from draftree.models.native.build import (
    NativeUnavailableError,
    build_all,
    built_library,
    find_compiler,
    native_variants,
    preferred_variants,
    prefix_of,
    runnable_variants,
)
from draftree.models.native.library import Library, NotLoadableError, TilesRefusedError

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")

BEST = preferred_variants()[0]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(build, "_private", {})
    source = tmp_path / "small.c"
    source.write_text("int answer(void) { return 42; }")
    monkeypatch.setattr(build, "SOURCES", (source,))
    return tmp_path / "cache"


def compiler(folder: Path, body: str, name: str = "compiler") -> str:
    folder.mkdir(exist_ok=True)
    script = folder / name
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    return str(script)


def arguments_in(folder: Path) -> list[str]:
    return (folder / "arguments").read_text().split()


@pytest.fixture
def noting(tmp_path: Path) -> str:
    """A compiler that notes its arguments."""
    return compiler(tmp_path, f'echo "$@" >> {tmp_path}/arguments; exec cc "$@"')


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


def libraries_in(cache: Path) -> list[Path]:
    return list((cache / "native").glob("*.so"))


@pytest.mark.usefixtures("no_compiler")
def test_a_library_of_the_package_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packaged = tmp_path / "lib"
    packaged.mkdir()
    library = packaged / f"{prefix_of(BEST)}0123.so"
    library.touch()
    (packaged / f"{prefix_of(BEST).removesuffix('-')}0-0123.so").touch()  # of other sources
    monkeypatch.setattr(build, "PACKAGED", packaged)
    assert built_library() == library


@pytest.mark.parametrize("command", ["", "/nowhere/gcc"])
def test_a_compiled_library_needs_no_compiler(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = built_library()
    monkeypatch.setenv("CC", command)
    monkeypatch.setenv("PATH", "/nowhere")
    assert built_library() == first


@pytest.mark.usefixtures("no_compiler")
def test_without_library_and_compiler_the_reason_has_cost_and_remedy() -> None:
    with pytest.raises(NativeUnavailableError) as caught:
        built_library()
    for words in ("no C compiler", "a quarter of the speed", "gcc or clang", "pip install 'draftree[compiler]'"):
        assert words in str(caught.value)


@pytest.mark.usefixtures("no_compiler")
def test_zig_is_the_last_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace() if name == "ziglang" else None)
    assert find_compiler() == (sys.executable, "-m", "ziglang", "cc")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    clang = compiler(tmp_path / "bin", "", name="clang")
    assert find_compiler() == (clang,)


def test_zig_is_told_the_processor_in_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zig = compiler(tmp_path, f'echo "$@" > {tmp_path}/arguments; exit 1', name="zig")
    monkeypatch.setenv("CC", f"{zig} cc")
    with pytest.raises(NativeUnavailableError):
        built_library()
    assert f"-mcpu={BEST.zig_cpu}" in arguments_in(tmp_path)
    assert not set(BEST.flags) & set(arguments_in(tmp_path))


def test_other_sources_are_compiled_anew() -> None:
    first = built_library()
    build.SOURCES[0].write_text("int answer(void) { return 43; }")
    assert built_library().name.split("-")[-2] != first.name.split("-")[-2]


def test_a_launcher_before_the_compiler_and_options_after_it(
    tmp_path: Path, noting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = compiler(tmp_path, 'exec "$@"', name="ccache")
    monkeypatch.setenv("CC", f"{launcher} {noting} -DOPTION")
    assert find_compiler() == (launcher, noting, "-DOPTION")
    built_library()
    assert {"-DOPTION", "-O3", "-ffp-contract=off", *BEST.flags} <= set(arguments_in(tmp_path))


def test_a_path_with_spaces_is_one_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noting: str) -> None:
    place = tmp_path / "my tools"
    place.mkdir()
    monkeypatch.setenv("CC", str(shutil.copy(noting, place / "cc")))
    built_library()
    assert arguments_in(tmp_path)


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
    tmp_path: Path, body: str, message: str, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    monkeypatch.setenv("CC", compiler(tmp_path, body))
    with pytest.raises(NativeUnavailableError, match=message):
        built_library()
    assert not libraries_in(own_cache)


def test_a_cc_that_is_not_a_program_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "cc"
    broken.write_bytes(b"\x7fELF not really")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(NativeUnavailableError, match="cannot be run"):
        built_library()


@pytest.mark.parametrize(
    ("value", "message"),
    [("no-such-compiler -O2", "'no-such-compiler -O2' of CC"), ("gcc 'unclosed", "which is not a command")],
)
def test_a_cc_that_names_nothing_is_reported(value: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", value)
    with pytest.raises(NativeUnavailableError, match=message):
        built_library()


def test_sources_are_compiled_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other.c"
    other.write_text("int question(void) { return 0; }")
    monkeypatch.setattr(build, "SOURCES", (*build.SOURCES, other))
    monkeypatch.setattr(build, "usable_cores", lambda: 2)
    both = f"touch {tmp_path}/$$.started; while [ $(ls {tmp_path}/*.started | wc -l) -lt 2 ]; do sleep 0.02; done"
    monkeypatch.setenv("CC", compiler(tmp_path, f'case "$*" in *" -c "*) {both};; esac; exec cc "$@"'))
    assert built_library().exists()


@pytest.mark.skipif(len(runnable_variants()) < 2, reason="needs two variants")
def test_all_variants_are_compiled_but_those_that_the_compiler_does_not_know(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refused = BEST.flags[-1]
    body = f"case \"$*\" in *{refused}*) echo 'cc: error: unrecognized option' >&2; exit 1;; esac"
    monkeypatch.setenv("CC", compiler(tmp_path, f'{body}\nexec cc "$@"'))
    paths = build_all()
    known = [variant for variant in runnable_variants() if refused not in variant.flags]
    assert list(paths) == known
    assert set(paths.values()) == set(libraries_in(own_cache))
    assert f"no variant '{BEST.name}'" in caplog.text
    assert built_library(known[0]) == paths[known[0]]


PROGRAM = """
import ctypes, sys
from pathlib import Path
from draftree.models.native import build
build.SOURCES = (Path(sys.argv[1]),)
path = build.built_library()
assert build.built_library() == path, "compiled once"
print(path, oct(path.parent.stat().st_mode & 0o7777), ctypes.CDLL(str(path)).answer())
"""


def program(*, text: str = PROGRAM, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", text, str(build.SOURCES[0])]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=os.environ | environment, stdout=pipe, stderr=pipe, text=True)


def test_processes_that_need_the_same_library_compile_it_once(tmp_path: Path, noting: str) -> None:
    processes = [program(CC=noting) for _ in range(3)]
    outputs = [process.communicate() for process in processes]
    assert all(output.endswith("42\n") for output, _ in outputs), outputs
    assert len((tmp_path / "arguments").read_text().splitlines()) == 2  # one source and the link


def test_an_interrupt_ends_the_compilers(tmp_path: Path, own_cache: Path) -> None:
    waiting = compiler(tmp_path, f"sleep 600 & echo $! > {tmp_path}/child; echo $$ > {tmp_path}/started; wait")
    process = program(CC=waiting)
    while not (tmp_path / "started").exists() or not (tmp_path / "started").read_text():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in process.communicate()[1]
    for name in ("started", "child"):
        status = Path(f"/proc/{(tmp_path / name).read_text().strip()}/stat")
        while status.exists() and status.read_text().split()[2] != "Z":
            time.sleep(0.05)  # it has been killed, which the system may still be busy with
    assert not list((own_cache / "native").glob(f"{build.WORK}*"))


TRYING_AGAIN = """
import atexit, contextlib, os, sys, threading, time
from pathlib import Path
from draftree.models.native import build
build.SOURCES = (Path(sys.argv[1]),)
started = Path(sys.argv[1]).with_name("started")

def load():
    while True:
        with contextlib.suppress(Exception):
            build.built_library()

loading = threading.Thread(target=load, daemon=True)
loading.start()
while not started.exists():
    time.sleep(0.05)
atexit._run_exitfuncs()
while loading.is_alive() and started.stat().st_size == 1:
    time.sleep(0.05)
print(started.stat().st_size)
os._exit(0)
"""


def test_no_compiler_starts_after_the_process_ended_the_others(tmp_path: Path) -> None:
    output, log = program(
        text=TRYING_AGAIN, CC=compiler(tmp_path, f"printf . >> {tmp_path}/started; exec sleep 600")
    ).communicate()
    assert output == "1\n", log


def test_a_cache_that_cannot_be_made_gives_a_private_library(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    out, log = program(DRAFTREE_CACHE=str(tmp_path / "file" / "cache"), TMPDIR=str(temporary)).communicate()
    path, mode, answer = out.split()
    assert Path(path).parent.parent == temporary
    assert (mode, answer) == ("0o700", "42")
    assert "compiled for this process only" in log
    assert log.count("\n") == 1
    assert not list(temporary.iterdir())


def test_a_full_cache_gives_a_private_library(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path) -> None:
        if own_cache in path.parents:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(build, "sync", full)
    path = built_library()
    assert own_cache not in path.parents
    assert "No space left on device" in caplog.text
    assert not libraries_in(own_cache)


def test_a_cache_that_the_compiler_cannot_write_gives_a_private_library(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = f"case \"$@\" in *{own_cache}*) echo 'ld: final link failed: No space left on device' >&2; exit 1;; esac"
    monkeypatch.setenv("CC", compiler(tmp_path, f'{body}\nexec cc "$@"'))
    assert own_cache not in built_library().parents


def test_a_library_that_does_not_load_from_the_cache_is_loaded_from_elsewhere(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Path] = []

    class Refused(Library):
        def __init__(self, path: Path) -> None:
            loaded.append(path)
            if own_cache in path.parents:
                raise NotLoadableError("failed to map segment: Operation not permitted")

    monkeypatch.setattr(libraries, "Library", Refused)
    libraries.library.__wrapped__()
    assert [own_cache in path.parents for path in loaded] == [True, False]


def test_the_next_variant_is_loaded_where_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def load(variant: build.Variant) -> str:
        tried.append(variant)
        if len(tried) == 1:
            raise TilesRefusedError("no tiles here")
        return "the library"

    monkeypatch.setattr(libraries, "load_library", load)
    monkeypatch.setattr(libraries, "preferred_variants", lambda: native_variants()[:3])
    assert libraries.library.__wrapped__() == "the library"
    assert tried == list(native_variants()[:2])


def test_a_private_folder_of_a_dead_process_is_removed(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    for _ in range(2):
        process = program(text=f"{PROGRAM}\nimport os; os._exit(1)", DRAFTREE_CACHE="/proc/none", TMPDIR=str(temporary))
        process.communicate()
        assert len(list(temporary.iterdir())) == 1


def test_a_temporary_folder_of_others_is_not_used_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    temporary.chmod(0o777)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setenv("DRAFTREE_CACHE", "/proc/none")
    with pytest.raises(NativeUnavailableError, match="can be written by others"):
        built_library()


def test_a_private_folder_in_use_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = build.private_folder()
    assert build.private_folder() != folder
    assert folder.exists()


AVX512 = "avx2 fma f16c bmi2 popcnt avx512f avx512bw avx512cd avx512dq avx512vl"
MACHINES = {
    "Zen 5": ("AuthenticAMD", f"{AVX512} avx512_vnni avx512_bf16 avx_vnni", "avx512-bf16 avx512-vnni avx512 avx2-vnni"),
    "Sapphire Rapids": (
        "GenuineIntel",
        f"{AVX512} avx512_vnni avx512_bf16 avx_vnni amx_tile amx_int8 amx_bf16",
        "amx avx512-vnni avx512 avx2-vnni",
    ),
    "Alder Lake": ("GenuineIntel", "avx2 fma f16c bmi2 popcnt avx_vnni", "avx2-vnni"),
    "Haswell": ("GenuineIntel", "avx2 fma f16c bmi2 popcnt", ""),
    "Knights Landing": ("GenuineIntel", "avx2 fma f16c bmi2 popcnt avx512f avx512cd", ""),
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[str]:
    vendor, flags, names = MACHINES[request.param]
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(build.sys, "platform", "linux")
    monkeypatch.setattr(build, "cpu_info", {"vendor_id": vendor, "flags": flags}.get)
    return [*names.split(), "avx2", "sse2"]


@pytest.mark.parametrize("machine", MACHINES, indirect=True)
def test_the_order_of_variants_on_a_machine(machine: list[str]) -> None:
    assert [variant.name for variant in preferred_variants()] == machine


@pytest.mark.parametrize("machine", ["Haswell"], indirect=True)
def test_the_environment_names_a_variant_that_the_machine_runs(
    machine: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTREE_VARIANT", "sse2")
    assert [variant.name for variant in preferred_variants()] == ["sse2"]
    monkeypatch.setenv("DRAFTREE_VARIANT", "avx512")
    with pytest.raises(ConfigurationError, match="'avx512', but this machine runs avx2, sse2"):
        preferred_variants()


def test_progress_is_logged_before_compilers_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("CC", compiler(tmp_path, "exit 1"))
    with pytest.raises(NativeUnavailableError):
        built_library()
    assert f"compiling native kernels ({BEST.name}) with {tmp_path}/compiler" in caplog.text
