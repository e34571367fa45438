"""Check that only this user or root can have written a file, required for files that are loaded as code.

All folders above it are checked too: write access to a folder suffices to replace its files.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

OTHERS, GROUP = stat.S_IWOTH, stat.S_IWGRP


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
