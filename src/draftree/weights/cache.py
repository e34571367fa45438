"""The user's cache of model folders, and the checksums of files there and elsewhere."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from draftree.core.errors import ModelLoadError, WeightsError
from draftree.core.files import (
    MALFORMED,
    MANIFEST,
    MODELS,
    WORK,
    JsonError,
    get_again,
    read_json,
    user_folder,
    write_json,
)

Step = Literal["download", "check", "convert"]

Progress = Callable[[Step, int, int], None]
"""`progress(step, done_bytes, total_bytes)`; `done_bytes` never decreases within a step."""

steps = logging.getLogger("draftree.steps")
"""Each INFO record announces a step that begins; the command line shows it in a terminal."""


logger = logging.getLogger(__name__)


def silent(step: Step, done_bytes: int, total_bytes: int) -> None:
    """Ignore progress."""


# Checksums of a model's files: detect damage, and never record damaged files as good.
#
# Folders of the cache have the sums of their files in their manifest. For other folders a record in the cache holds
# them from the first start on. A file is read again only if its size or modification time differs from the recorded
# one, or after the model computed something else than before (`distrust`).

WEIGHT_FILES = ("*.safetensors", "*.bin")
PATTERNS = ("*.json", *WEIGHT_FILES, "*.jinja", "*.model", "*.tiktoken", "*.txt")
SUMS = "sums"  # key of the checksums in a manifest; the manifest is written last into every folder
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

Sum = tuple[int, int, str]  # bytes, modification time in nanoseconds, sha256


def are_pickled(folder: Path) -> bool:
    return not any(folder.glob("*.safetensors")) and any(folder.glob("*.bin"))


def sums_of(folder: Path) -> dict[str, Sum]:
    names = {path.name for pattern in PATTERNS for path in folder.glob(pattern) if path.is_file()} - {MANIFEST}
    return {name: _sum(folder / name) for name in sorted(names)}


def known_sums(sums: Any) -> dict[str, Sum]:
    """Return the valid sums in a manifest or a record; invalid entries are left out."""
    return {
        name: (entry[0], entry[1], entry[2])
        for name, entry in (sums.items() if isinstance(sums, dict) else ())
        if isinstance(entry, list) and len(entry) == 3 and all(map(isinstance, entry, (int, int, str)))
    }


def keep_sums(folder: Path, root: Path) -> None:
    """Record the current sums of a folder; an existing record is kept."""
    if not noted_sums(folder, root):
        _write_note(folder, root, {"files": sums_of(folder)})


def noted_sums(folder: Path, root: Path) -> dict[str, Sum]:
    return known_sums(_noted(folder, root).get("files"))


def distrust(folder: Path, root: Path) -> None:
    """Make the next check read all files, whatever their modification times, until they are found intact."""
    _write_note(folder, root, _noted(folder, root) | {"distrusted": True})


def is_distrusted(folder: Path, root: Path) -> bool:
    return bool(_noted(folder, root).get("distrusted"))


def require_intact(folder: Path, root: Path, stored: Mapping[str, Sum] | None = None, *, again: bool = False) -> None:
    """Compare a folder with its sums; files that are unchanged since the last comparison are not read.

    Sums `stored` in a manifest are binding whatever the modification times; other folders may be replaced.
    """
    note = _noted(folder, root)
    noted = known_sums(note.get("files"))
    doubted = again or bool(note.get("distrusted"))
    current: dict[str, Sum] = {}
    for name, entry in (noted if stored is None else stored).items():
        path, known = folder / name, noted.get(name)
        if stored is None and not path.is_file():
            continue  # the folder's owner removed it
        try:
            status = path.stat()
        except OSError as error:
            raise ModelLoadError(f"'{path}' is missing or unreadable; {get_again(folder)}") from error
        now = (status.st_size, status.st_mtime_ns)
        if not doubted and now in (entry[:2], known[:2] if known else None):
            current[name] = (*now, entry[2])
            continue
        current[name] = _sum(path)
        was_written = stored is None and now != entry[:2]
        if current[name][2] != entry[2] and not was_written:
            distrust(folder, root)
            raise ModelLoadError(f"'{path}' is damaged: its content differs from the stored one; {get_again(folder)}")
    if doubted or current != noted:
        _write_note(folder, root, {"files": current})


def _sum(path: Path) -> Sum:
    with path.open("rb") as stream:
        status = os.fstat(stream.fileno())
        return status.st_size, status.st_mtime_ns, hashlib.file_digest(stream, "sha256").hexdigest()


def _sums_file(folder: Path, root: Path) -> Path:
    return root / "sums" / f"{hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]}.json"


def _noted(folder: Path, root: Path) -> dict[str, Any]:
    try:
        return read_json(_sums_file(folder, root))
    except (FileNotFoundError, JsonError):
        return {}


def _write_note(folder: Path, root: Path, note: Mapping[str, Any]) -> None:
    try:
        write_json(_sums_file(folder, root), note)
    except OSError as error:
        logger.info("the sums of '%s' are not recorded: %s", folder, error)


class Cache:
    """Model folders below one root.

    The root is `DRAFTREE_CACHE`, else `XDG_CACHE_HOME/draftree`, else `~/.cache/draftree`.
    Thread- and process-safe for writers; readers need no lock, because a folder appears by one rename.
    """

    __slots__ = ("models", "root", "work")

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or user_folder("CACHE") or private_folder()
        self.models = self.root / MODELS
        self.work = self.root / WORK  # locks and unfinished folders, on the same file system as `models`

    def folder(self, name: str) -> Path:
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
            self.sweep()
            yield
        finally:
            lock.release()

    @contextlib.contextmanager
    def publish(self, name: str, manifest: Mapping[str, object]) -> Iterator[Path]:
        """Yield an empty folder to fill; on success it becomes the folder of that name, otherwise it is removed.

        The caller must hold `locked(name)`.
        """
        with self.scratch(name) as parts:
            fresh = parts / "fresh"
            fresh.mkdir()
            yield fresh
            whole = {**manifest, SUMS: sums_of(fresh)}
            (fresh / MANIFEST).write_text(json.dumps(whole, indent=2) + "\n", "utf-8")
            # the rename happens after the content is on the disk
            for path in (*fresh.rglob("*"), fresh):
                sync(path)
            place = self.folder(name)
            place.parent.mkdir(parents=True, exist_ok=True)
            if place.exists():
                place.rename(parts / "replaced")
            fresh.rename(place)
            sync(place.parent)

    @contextlib.contextmanager
    def scratch(self, name: str) -> Iterator[Path]:
        """Yield a temporary folder for work on that name; it is always removed."""
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


def private_folder() -> Path:
    """Return a folder for users without a home, below the temporary folder; no other user can write into it."""
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
    """Raise unless `folder`'s disk has enough free space."""
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
    if error.errno in DISK_FULL:
        return disk_full("the cache", folder)
    return WeightsError(
        f"the cache folder '{folder}' cannot be written ({error.strerror}): set DRAFTREE_CACHE to a writable folder"
    )


def disk_full(name: str, folder: Path) -> WeightsError:
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    free_bytes = shutil.disk_usage(existing).free
    return WeightsError(
        f"the disk of '{folder}' became full while '{name}' was being built "
        f"({free_bytes / 1e6:.0f} MB free); nothing was kept: "
        "free some space, or set DRAFTREE_CACHE to a folder on another disk"
    )


def sync(path: Path) -> None:
    if os.name == "nt":
        return  # Windows cannot flush a folder or a file that is open for reading only.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


HASHED_BYTES = 1 << 20


def recorded_fingerprint(path: Path, cache: Cache) -> str | None:
    """Return the cached sha256 of a file; None if there is none, or size, times or inode changed since."""
    status = status_of(path)
    try:
        known = read_json(_fingerprint_file(status, cache))
        return str(known["sha256"]) if {key: known[key] for key in status} == status else None
    except (OSError, *MALFORMED):
        return None  # a missing or damaged record only costs another read of the file


def fingerprint(path: Path, cache: Cache, *, progress: Progress) -> str:
    """Return the sha256 of the content; read again only if size, times or inode changed since the last read."""
    if (known := recorded_fingerprint(path, cache)) is not None:
        return known
    status = status_of(path)
    sha256 = file_sha256(path, on_bytes=lambda done: progress("check", done, status["num_bytes"]))
    try:
        write_json(_fingerprint_file(status, cache), status | {"sha256": sha256})
    except OSError as error:
        logger.info("the sum of '%s' is not cached: %s", path, error)
    return sha256


def status_of(path: Path) -> dict[str, Any]:
    """Return what changes when a file does: its resolved path, size, times and inode."""
    path = path.resolve()
    status = path.stat()
    return {
        "path": str(path),
        "num_bytes": status.st_size,
        "modified_ns": status.st_mtime_ns,
        "changed_ns": status.st_ctime_ns,
        "inode": status.st_ino,
    }


def _fingerprint_file(status: Mapping[str, Any], cache: Cache) -> Path:
    return cache.root / "fingerprints" / f"{hashlib.sha256(status['path'].encode()).hexdigest()[:16]}.json"


def file_sha256(path: Path, *, on_bytes: Callable[[int], None]) -> str:
    """Return the sha256 of a file's content; `on_bytes` is called with the bytes read so far."""
    digest = hashlib.sha256()
    done_bytes = 0
    with path.open("rb") as stream:
        while chunk := stream.read(HASHED_BYTES):
            digest.update(chunk)
            done_bytes += len(chunk)
            on_bytes(done_bytes)
    return digest.hexdigest()
