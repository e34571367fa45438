"""The user's cache of model folders: one writer per name at a time, and only complete folders.

A folder is built under a temporary name next to its final place and renamed once it is complete and on the disk. All
work on a name holds that name's lock, so a temporary folder that exists when the lock is acquired was left by a dead
process and is removed.
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

from draftree.core.errors import WeightsError
from draftree.core.files import MANIFEST, MODELS, WORK, JsonError, expanded, home_folder, read_json
from draftree.weights.sums import sums_of

__all__ = ["DISK_FULL", "Cache", "require_space"]

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

logger = logging.getLogger(__name__)

SUMS = "sums"
"""Key of the checksums in a manifest; the manifest is written last into every folder."""


class Cache:
    """Model folders below one root.

    The root is `DRAFTREE_CACHE`, else `XDG_CACHE_HOME/draftree`, else `~/.cache/draftree`.
    Thread- and process-safe for writers; readers need no lock, because a folder appears by one rename.
    """

    __slots__ = ("root",)

    def __init__(self, root: Path | None = None) -> None:
        self.root = root if root is not None else default_root()

    @property
    def models(self) -> Path:
        """The folder of complete model folders."""
        return self.root / MODELS

    @property
    def work(self) -> Path:
        """The folder of locks and unfinished model folders; on the same file system as `models`."""
        return self.root / WORK

    def folder(self, name: str) -> Path:
        """Return the path of the model of that name, whether it exists or not."""
        return self.models / name

    def manifest(self, name: str) -> dict[str, object] | None:
        """Return the manifest of that name's folder; None if there is no complete folder."""
        try:
            return read_json(self.folder(name) / MANIFEST)
        except (FileNotFoundError, JsonError):
            return None

    def holds(self, name: str, origin: Mapping[str, object]) -> bool:
        """Return whether there is a complete folder of that name whose manifest matches all entries of `origin`."""
        manifest = self.manifest(name)
        return manifest is not None and all(manifest.get(key) == value for key, value in origin.items())

    def names(self) -> list[str]:
        """Return the names of all complete folders."""
        if not self.models.is_dir():
            return []
        return sorted(path.name for path in self.models.iterdir() if (path / MANIFEST).is_file())

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Hold the lock of a name; waits for other processes, and removes unfinished folders of dead ones."""
        from filelock import FileLock, Timeout  # later starts need none

        self._make_work_folder()
        lock = FileLock(self.work / f"{name}.lock")
        try:
            lock.acquire(blocking=False)
        except Timeout:
            logger.warning("another process is building '%s': waiting for it", name)
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
        """Yield an empty folder to fill; on success it becomes the folder of that name, otherwise it is removed.

        The caller must hold `locked(name)`.

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
        """Yield a temporary folder for work on that name; it is always removed.

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
        """Remove the folder of that name; False if there was none."""
        with self.locked(name):
            place = self.folder(name)
            if not place.exists():
                return False
            with self.scratch(name) as parts:
                # Renamed first, so that a reader never finds a partly removed folder.
                place.rename(parts / "removed")
            return True

    def sweep(self) -> None:
        """Remove the unfinished folders of all names that no living process works on."""
        from filelock import FileLock, Timeout

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
            logger.info("removing '%s', which a dead process left unfinished", leftover)
            shutil.rmtree(leftover, ignore_errors=True)


def default_root() -> Path:
    """Return the cache root from the environment."""
    if own := os.environ.get("DRAFTREE_CACHE"):
        return expanded(own).absolute()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return expanded(shared).absolute() / "draftree"
    home = home_folder()
    return private_folder() if home is None else home / ".cache" / "draftree"


def private_folder() -> Path:
    """Return a folder for users without a home, below the temporary folder; no other user can write into it.

    Raises:
        WeightsError: it belongs to another user, or others can write into it.
    """
    folder = Path(tempfile.gettempdir()) / f"draftree-{os.getuid()}"
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.lstat()
    except OSError:
        return folder  # the first write there raises the error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise WeightsError(
            f"there is no home folder, and '{folder}' is open to other users: set DRAFTREE_CACHE to a folder of yours"
        )
    return folder


def require_space(name: str, folder: Path, needed_bytes: int) -> None:
    """Raise unless `folder`'s disk has enough free space.

    Raises:
        WeightsError: fewer than `needed_bytes` are free.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from error
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise WeightsError(
            f"'{name}' needs {needed_bytes / 1e6:.0f} MB of disk while it is built, and '{folder}' has "
            f"{free_bytes / 1e6:.0f} MB free: free some space, or set DRAFTREE_CACHE to a folder on another disk"
        )


def unwritable(folder: Path, error: OSError) -> WeightsError:
    """Return the error for a cache that is not writable."""
    if error.errno in DISK_FULL:
        return disk_full("the cache", folder)
    return WeightsError(
        f"the cache folder '{folder}' cannot be written ({error.strerror}): set DRAFTREE_CACHE to a writable folder"
    )


def disk_full(name: str, folder: Path) -> WeightsError:
    """Return the error for a disk that became full during the work."""
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    free_bytes = shutil.disk_usage(existing).free
    return WeightsError(
        f"the disk of '{folder}' became full while '{name}' was being built "
        f"({free_bytes / 1e6:.0f} MB free); nothing was kept: "
        "free some space, or set DRAFTREE_CACHE to a folder on another disk"
    )


def make_durable(folder: Path) -> None:
    """Flush every file below `folder` to the disk, so that the rename happens after the content is written."""
    for path in folder.rglob("*"):
        if path.is_file():
            sync(path)
    sync(folder)


def sync(path: Path) -> None:
    if os.name == "nt":
        return  # Windows cannot flush a folder or a file that is open for reading only.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
