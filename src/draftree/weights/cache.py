"""The user's cache of model folders: found by name, written by one process at a time, never half-written.

A folder is made under a temporary name beside its place and renamed once it is complete and on the disk. All work on a
name happens under that name's lock, so whatever temporary folder lies there when the lock is got belongs to a process
that is gone, and is removed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from filelock import FileLock, Timeout

from draftree.core.errors import WeightsError
from draftree.core.paths import expanded, home_folder
from draftree.core.remedies import MANIFEST
from draftree.weights.sums import sums_of

__all__ = ["DISK_FULL", "Cache", "require_space"]

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

logger = logging.getLogger(__name__)

SUMS = "sums"
"""The entry of a manifest that holds the checksums of its folder; the manifest is written last into every folder."""


class Cache:
    """Model folders below one root.

    The root is `DRAFTREE_CACHE`, else `XDG_CACHE_HOME/draftree`, else `~/.cache/draftree`.
    Thread- and process-safe for writers; readers need no lock, because folders appear by one rename.
    """

    __slots__ = ("root",)

    def __init__(self, root: Path | None = None) -> None:
        self.root = root if root is not None else default_root()

    @property
    def models(self) -> Path:
        """The folder of complete model folders."""
        return self.root / "models"

    @property
    def work(self) -> Path:
        """The folder of locks and unfinished model folders; on the same file system as `models`."""
        return self.root / "work"

    def folder(self, name: str) -> Path:
        """Where the model of that name lies, or would lie."""
        return self.models / name

    def manifest(self, name: str) -> dict[str, object] | None:
        """What the folder of that name says of itself; None if there is no complete one."""
        try:
            content = json.loads((self.folder(name) / MANIFEST).read_text("utf-8"))
        except (OSError, ValueError):
            return None
        return content if isinstance(content, dict) else None

    def holds(self, name: str, origin: Mapping[str, object]) -> bool:
        """Whether there is a complete folder of that name whose manifest agrees with all that `origin` says."""
        manifest = self.manifest(name)
        return manifest is not None and all(manifest.get(key) == value for key, value in origin.items())

    def names(self) -> list[str]:
        """Names of all complete folders."""
        if not self.models.is_dir():
            return []
        return sorted(path.name for path in self.models.iterdir() if (path / MANIFEST).is_file())

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Holds the name for this process; waits for another one that holds it, and clears what dead ones left."""
        self._make_work_folder()
        lock = FileLock(self.work / f"{name}.lock")
        try:
            lock.acquire(blocking=False)
        except Timeout:
            logger.warning("another process is making '%s': waiting for it", name)
            lock.acquire()
        except OSError as error:
            raise unwritable(self.work, error) from error
        try:
            self._clear_unfinished(name)
            yield
        finally:
            lock.release()

    @contextlib.contextmanager
    def publish(self, name: str, manifest: Mapping[str, object]) -> Iterator[Path]:
        """Yields an empty folder to fill; on success it becomes the folder of that name, else it vanishes.

        The caller holds `locked(name)`.

        Raises:
            WeightsError: The disk is full.
        """
        with self.scratch(name) as parts:
            fresh = parts / "fresh"
            fresh.mkdir()
            yield fresh
            whole = {**manifest, SUMS: sums_of(fresh)}
            (fresh / MANIFEST).write_text(json.dumps(whole, indent=2) + "\n", "utf-8")
            make_durable(fresh)
            place = self.folder(name)
            place.parent.mkdir(parents=True, exist_ok=True)
            if place.exists():
                place.rename(parts / "replaced")
            fresh.rename(place)
            sync(place.parent)

    @contextlib.contextmanager
    def scratch(self, name: str) -> Iterator[Path]:
        """A temporary folder for work on that name, removed in every case.

        Raises:
            WeightsError: The disk is full.
        """
        self._make_work_folder()
        try:
            folder = Path(tempfile.mkdtemp(prefix=f"{name}.part-", dir=self.work))
        except OSError as error:
            raise unwritable(self.work, error) from error
        try:
            yield folder
        except OSError as error:
            if error.errno in DISK_FULL:
                raise disk_full(name, self.root) from error
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def remove(self, name: str) -> bool:
        """Removes the folder of that name; False if there was none."""
        with self.locked(name):
            place = self.folder(name)
            if not place.exists():
                return False
            with self.scratch(name) as parts:
                # Renamed first: a reader never meets a folder that is half gone.
                place.rename(parts / "removed")
            return True

    def sweep(self) -> None:
        """Removes the unfinished folders of all names that no living process works on."""
        if not self.work.is_dir():
            return
        for name in {path.name.partition(".part-")[0] for path in self.work.glob("*.part-*")}:
            with contextlib.suppress(Timeout), FileLock(self.work / f"{name}.lock", blocking=False):
                self._clear_unfinished(name)

    def _make_work_folder(self) -> None:
        try:
            self.work.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(self.root, error) from error

    def _clear_unfinished(self, name: str) -> None:
        for leftover in self.work.glob(f"{name}.part-*"):
            logger.info("removing '%s', left unfinished by a process that is gone", leftover)
            shutil.rmtree(leftover, ignore_errors=True)


def default_root() -> Path:
    """The cache root the environment asks for."""
    if own := os.environ.get("DRAFTREE_CACHE"):
        return expanded(own).absolute()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return expanded(shared).absolute() / "draftree"
    home = home_folder()
    return private_folder() if home is None else home / ".cache" / "draftree"


def private_folder() -> Path:
    """A folder for users without a home, below the one for temporary files; no other user can write into it.

    Raises:
        WeightsError: it belongs to somebody else, or others can write into it.
    """
    folder = Path(tempfile.gettempdir()) / f"draftree-{os.getuid()}"
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.lstat()
    except OSError:
        return folder  # what is written there says why it is not
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise WeightsError(
            f"there is no home folder, and '{folder}' is open to other users: set DRAFTREE_CACHE to a folder of yours"
        )
    return folder


def require_space(name: str, folder: Path, needed_bytes: int) -> None:
    """Refuses work that would not fit on the disk of `folder`.

    Raises:
        WeightsError: Fewer than `needed_bytes` are free.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from error
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise WeightsError(
            f"'{name}' needs {needed_bytes / 1e6:.0f} MB of disk while it is made, and '{folder}' has "
            f"{free_bytes / 1e6:.0f} MB free: make room, or set DRAFTREE_CACHE to a folder on another disk"
        )


def unwritable(folder: Path, error: OSError) -> WeightsError:
    """The error for a cache that cannot be written."""
    if error.errno in DISK_FULL:
        return disk_full("the cache", folder)
    return WeightsError(
        f"the cache folder '{folder}' cannot be written ({error.strerror}): set DRAFTREE_CACHE to a folder that can"
    )


def disk_full(name: str, folder: Path) -> WeightsError:
    """The error for a disk that ran full on the way."""
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    free_bytes = shutil.disk_usage(existing).free
    return WeightsError(
        f"the disk of '{folder}' ran full while '{name}' was being made "
        f"({free_bytes / 1e6:.0f} MB free); nothing was kept: "
        "make room, or set DRAFTREE_CACHE to a folder on another disk"
    )


def make_durable(folder: Path) -> None:
    """Waits until every file below `folder` is on the disk, so that a rename cannot outrun the content."""
    for path in folder.rglob("*"):
        if path.is_file():
            sync(path)
    sync(folder)


def sync(path: Path) -> None:
    if os.name == "nt":
        return  # Windows flushes neither a folder nor a file that is open for reading only.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
