"""Machines without a home, with a read-only cache, with a full disk: one sentence, or it works."""

from __future__ import annotations

import ctypes
import errno
import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli_samples import save_tiny_model
from draftree.cli.main import run
from draftree.core.errors import ConfigurationError, WeightsError
from draftree.core.files import expanded, home_folder
from draftree.loading.resolve import resolve_model
from draftree.weights import cache as cache_module
from draftree.weights import cache as sums
from draftree.weights.cache import Cache, fingerprint, private_folder, silent

needs_root = pytest.mark.skipif(
    os.name == "nt" or os.getuid() != 0, reason="only root may become another user or mount"
)


@pytest.fixture
def stranger(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A user id without an entry in the system, and its temporary folder."""

    def unknown(uid: int) -> Any:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    for name in ("HOME", "DRAFTREE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cache_module.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("home", [None, ""])
def test_without_a_home_the_cache_is_a_private_folder(
    home: str | None, stranger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if home is not None:
        monkeypatch.setenv("HOME", home)
    assert home_folder() is None
    assert Cache().root == stranger / f"draftree-{os.getuid()}"
    assert Cache().root.stat().st_mode & 0o777 == 0o700
    with pytest.raises(ConfigurationError, match="give a full path"):
        expanded("~/model")
    with pytest.raises(ConfigurationError, match="give a full path"):
        resolve_model("~nobody-of-that-name/model")


def test_an_empty_home_is_that_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "")
    monkeypatch.delenv("DRAFTREE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    assert Cache().root == home / ".cache" / "draftree"
    assert expanded("~/model") == home / "model"


def test_a_folder_that_others_can_write_is_not_used(stranger: Path) -> None:
    folder = stranger / f"draftree-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(WeightsError, match=r"open to other users: set DRAFTREE_CACHE"):
        private_folder()
    folder.rmdir()
    (stranger / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(stranger / "elsewhere")
    with pytest.raises(WeightsError, match="open to other users"):
        private_folder()


@needs_root
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv is not installed")
def test_a_user_of_an_unknown_number_writes_a_text(tmp_path_factory: pytest.TempPathFactory) -> None:
    top = tmp_path_factory.mktemp("open")
    for folder in (top, *list(top.parents)[:2]):
        folder.chmod(0o755)
    model, temporary = save_tiny_model(top / "model", chat=False), top / "tmp"
    temporary.mkdir()
    temporary.chmod(0o1777)
    reads_all = ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]
    become = ["setpriv", *reads_all, "--reuid", "54321", "--regid", "54321", "--clear-groups", "env", "-i"]
    become += [f"PATH={os.environ['PATH']}", f"PYTHONPATH={os.environ.get('PYTHONPATH', '')}", f"TMPDIR={temporary}"]

    def run_at(home: list[str], *command: str) -> tuple[int, str]:
        done = subprocess.run([*become, *home, sys.executable, *command], capture_output=True, text=True, check=False)
        return done.returncode, done.stderr

    if run_at([], "-c", "import draftree.cli.main")[0]:
        pytest.skip("another user cannot run this Python")
    # torch's kernels: its own cache has no native ones, and they take long to compile
    generate = ("-m", "draftree", "generate", str(model), "ab", "--max-tokens", "3", "--kernels", "torch")
    status, said = run_at([], *generate)
    assert (status, "Traceback" in said) == (0, False), said
    for home in ([], ["HOME="], ["HOME=/"]):
        status, said = run_at(home, "-m", "draftree", "models", "path", "stories15m")
        assert status == 1
        assert said.startswith("error: the model 'stories15m' is not on this machine")


@pytest.fixture
def unwritable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache below a file: nothing can be made there, not even by root."""
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path / "file" / "cache"))
    return tmp_path / "file" / "cache"


def test_a_gguf_file_and_a_cache_that_cannot_be_written(
    gguf_file: Path, unwritable: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert len(fingerprint(gguf_file, Cache(), progress=silent)) == 64
    with pytest.raises(WeightsError, match=r"cache folder .* cannot be written .*: set DRAFTREE_CACHE"):
        resolve_model(gguf_file)
    assert run(["generate", str(gguf_file), "ab"]) == 1
    said = capfd.readouterr().err
    assert said.splitlines()[-1].startswith("error: the cache folder")  # below the bar
    assert "Traceback" not in said


def mount(folder: Path, options: str) -> None:
    """A file system in memory."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.mount(b"none", os.fsencode(folder), b"tmpfs", 0, options.encode()) != 0:
        pytest.skip(f"nothing can be mounted: {os.strerror(ctypes.get_errno())}")


def unmount(folder: Path) -> None:
    ctypes.CDLL(None).umount2(os.fsencode(folder), 2)


@needs_root
def test_a_converted_file_in_a_cache_that_is_read_only(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "cache"
    root.mkdir()
    monkeypatch.setenv("DRAFTREE_CACHE", str(root))
    mount(root, "size=64m")
    try:
        folder = resolve_model(gguf_file)
        if subprocess.run(["mount", "-o", "remount,ro", str(root)], capture_output=True, check=False).returncode:
            pytest.skip("nothing can be mounted anew")
        assert resolve_model(gguf_file) == folder
        other = tmp_path / "other.gguf"
        other.write_bytes(gguf_file.read_bytes() + b"\0")
        with pytest.raises(WeightsError, match=r"cannot be written \(Read-only file system\): set DRAFTREE_CACHE"):
            resolve_model(other)
    finally:
        unmount(root)


@needs_root
@pytest.mark.parametrize("size", ["4k", "64k"])
def test_a_disk_that_is_full(size: str, gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "cache"
    root.mkdir()
    monkeypatch.setenv("DRAFTREE_CACHE", str(root))
    monkeypatch.setattr("draftree.weights.install.TOKENIZER_BYTES", -(10**9))  # believed to fit
    mount(root, f"size={size}")
    try:
        with pytest.raises(WeightsError, match=r"became full .*free some space, or set DRAFTREE_CACHE"):
            resolve_model(gguf_file)
        left = list((root / "work").glob("*.part-*")) if (root / "work").exists() else []
        assert left == []
    finally:
        unmount(root)


def test_a_full_disk_costs_records_and_notes_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gguf_file: Path
) -> None:
    def full(*given: Any, **named: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    cache = Cache(tmp_path / "cache")
    assert len(fingerprint(gguf_file, cache, progress=silent)) == 64
    sums.keep_sums(gguf_file.parent, cache.root)
    assert not list(cache.root.rglob("*.json"))
