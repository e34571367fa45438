"""Files of compiled libraries: search, checks before loading, atomic publication.

A file name ends with the checksum of the content, so one rename publishes both. Folders that other users can write are
not used. If the cache is unusable, a library is in a private folder that is removed when the process ends.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import os
import platform
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from draftree.weights.cache import sync

logger = logging.getLogger(__name__)

SUFFIX = ".so"
SUM_LENGTH = 32
WORK, PRIVATE, PACKING = ".build", "draftree-native", ".packing"
EXTRA_FLAGS = sum(getattr(os, flag, 0) for flag in ("O_NOFOLLOW", "O_CLOEXEC", "O_NONBLOCK"))
"""A link is not followed, and opening a named pipe does not wait for a writer."""
OTHERS, GROUP = stat.S_IWOTH, stat.S_IWGRP
DEAD_SECONDS = {WORK: 3600, PRIVATE: 3600, PACKING: 86400}
"""Age in seconds after which a working folder of another machine is abandoned."""


def usable(folder: Path, prefix: str) -> Path | None:
    """Return the newest intact library with this prefix that only this user or root can have written.

    Args:
        folder: a trusted folder.
        prefix: the name before the checksum.
    """
    for path in sorted(folder.glob(f"{prefix}*{SUFFIX}"), key=_modified, reverse=True):
        reason = why_unusable(path)
        if reason is None:
            return path
        logger.warning("%s: not loaded; building a new one", reason)
        with contextlib.suppress(OSError):
            path.unlink()
    return None


def _modified(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


def why_unusable(path: Path) -> str | None:
    """Return why a library must not be loaded; None if it may."""
    try:
        handle = os.open(path, os.O_RDONLY | EXTRA_FLAGS)
    except OSError as error:
        return f"'{path}' cannot be opened ({error.strerror})"
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        return f"'{path}' is not a file"
    with open(handle, "rb") as file:
        reason = why_untrusted(status, path)
        if reason is None and _sum(file.read()) != path.stem.rpartition("-")[2]:
            reason = f"'{path}' is damaged"
        return reason


def _sum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:SUM_LENGTH]


def publish(fresh: Path, folder: Path, prefix: str) -> Path:
    """Move a built file from the same file system to a folder, under its final name.

    Raises:
        OSError: the folder cannot be written, or its disk is full.
    """
    fresh.chmod(0o755 & ~0o022)
    sync(fresh)
    place = folder / f"{prefix}{_sum(fresh.read_bytes())}{SUFFIX}"
    os.replace(fresh, place)
    sync(folder)
    return place


def make_folder(folder: Path) -> None:
    """Create a folder and those above it, which only this user can write whatever the umask is.

    Raises:
        OSError: it cannot be created.
    """
    for missing in reversed([place for place in (folder, *folder.parents) if not place.exists()]):
        missing.mkdir(mode=0o755, exist_ok=True)


@contextlib.contextmanager
def working_folder(folder: Path, kind: str = WORK) -> Iterator[Path]:
    """Create a folder of this user inside `folder`, which is created if needed; remove it at the end.

    Folders that ended processes left behind are removed, too.

    Args:
        folder: where it is made.
        kind: WORK or PACKING.

    Raises:
        OSError: it cannot be created.
    """
    make_folder(folder)
    remove_leftovers(folder, kind)
    work = Path(tempfile.mkdtemp(prefix=f"{kind}-{_owner()}-", dir=folder))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def private_folder() -> Path:
    """Create a private folder of this user, removed when this process ends.

    Raises:
        OSError: no temporary folder can be written.
    """
    root = Path(tempfile.gettempdir())
    remove_leftovers(root, PRIVATE)
    folder = Path(tempfile.mkdtemp(prefix=f"{PRIVATE}-{_owner()}-", dir=root))
    atexit.register(_remove_own, folder, os.getpid())
    return folder


def _remove_own(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not in forked processes
        shutil.rmtree(folder, ignore_errors=True)


def _owner() -> str:
    return f"{_host()}-{os.getpid()}"


def _host() -> str:
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def remove_leftovers(folder: Path, kind: str) -> None:
    """Remove working folders of this user's ended processes."""
    for place in folder.glob(f"{kind}-*-*-*"):
        with contextlib.suppress(OSError, ValueError):
            host, process = place.name.removeprefix(f"{kind}-").split("-")[:2]
            status = place.lstat()
            if not stat.S_ISDIR(status.st_mode) or (hasattr(os, "geteuid") and status.st_uid != os.geteuid()):
                continue
            is_gone = host == _host() and not _lives(int(process))
            is_old = status.st_mtime < time.time() - DEAD_SECONDS[kind]
            if is_gone or (is_old and (kind == WORK or host != _host())):
                logger.info("removing '%s' of an ended process", place)
                shutil.rmtree(place, ignore_errors=True)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def why_untrusted(status: os.stat_result, name: str | os.PathLike[str]) -> str | None:
    """Return why another user could have written this file or folder; None if none could.

    Args:
        status: status of the file or folder.
        name: name in the message.
    """
    if not hasattr(os, "geteuid"):
        return None  # systems without owners and modes
    if status.st_uid not in (0, os.geteuid()):
        return f"'{os.fspath(name)}' belongs to user {status.st_uid}, not to user {os.geteuid()} or root"
    is_sticky_folder = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if is_sticky_folder:
        return None  # sticky bit: others can add files, but neither remove nor rename ours
    if status.st_mode & OTHERS or (status.st_mode & GROUP and not _is_private(status.st_gid)):
        return f"'{os.fspath(name)}' can be written by others: chmod go-w '{os.fspath(name)}'"
    return None


def why_folder_untrusted(folder: Path) -> str | None:
    """Return the same for a folder and all folders above it; missing ones are skipped.

    Raises:
        OSError: a folder cannot be read.
    """
    place = folder.resolve()
    for one in (place, *place.parents):
        try:
            found = why_untrusted(one.stat(), one)
        except FileNotFoundError:
            continue
        if found is not None:
            return found
    return None


def _is_private(group: int) -> bool:
    """Return whether this user is the only member of a group, as on systems with user private groups."""
    import grp
    import pwd

    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return found.gr_name == user.pw_name and user.pw_gid == group and set(found.gr_mem) <= {user.pw_name}
