"""Whether only this user (and root) can have written a file: what is loaded as code must pass.

A file is as safe as every folder on the way to it: write access to a folder suffices to exchange its files.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

OTHERS, GROUP = stat.S_IWOTH, stat.S_IWGRP


def why_untrusted(status: os.stat_result, name: str | os.PathLike[str]) -> str | None:
    """Why another user could have written this file or folder; None if none could.

    Args:
        status: of it.
        name: for the message.
    """
    if not hasattr(os, "geteuid"):
        return None  # systems without owners and modes
    if status.st_uid not in (0, os.geteuid()):
        return f"'{os.fspath(name)}' belongs to user {status.st_uid}, not to user {os.geteuid()} or root"
    is_sticky_folder = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if is_sticky_folder:
        return None  # others can add names there, and neither remove nor rename ours
    if status.st_mode & OTHERS or (status.st_mode & GROUP and not _is_private(status.st_gid)):
        return f"'{os.fspath(name)}' can be written by others: chmod go-w '{os.fspath(name)}'"
    return None


def why_folder_untrusted(folder: Path) -> str | None:
    """The same for a folder and all folders above it; what does not exist yet is judged by what does.

    Raises:
        OSError: a folder cannot be looked at.
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
    """Whether a group has no other member than this user: many systems give everyone such a group."""
    import grp
    import pwd

    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return found.gr_name == user.pw_name and user.pw_gid == group and set(found.gr_mem) <= {user.pw_name}
