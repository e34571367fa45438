"""The user's home folder and folder of settings, if there is one, and expansion of `~`."""

from __future__ import annotations

import os
from pathlib import Path

from draftree.core.errors import ConfigurationError

__all__ = ["config_folder", "expanded", "home_folder", "shown_name"]


def home_folder() -> Path | None:
    """Return the home folder; None if `HOME` is missing or empty and the system has no entry for this user id."""
    if os.environ.get("HOME") or os.name == "nt":
        try:
            return Path.home()
        except RuntimeError:
            return None
    import pwd  # of Unix alone

    try:
        found = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return None
    return Path(found) if found else None


def config_folder() -> Path | None:
    """Return the folder of what the user keeps; None without a home folder.

    It is `DRAFTREE_CONFIG`, else `XDG_CONFIG_HOME/draftree`, else `~/.config/draftree`.
    """
    if own := os.environ.get("DRAFTREE_CONFIG"):
        return expanded(own).absolute()
    if shared := os.environ.get("XDG_CONFIG_HOME"):
        return expanded(shared).absolute() / "draftree"
    home = home_folder()
    return None if home is None else home / ".config" / "draftree"


def expanded(spelled: str | os.PathLike[str]) -> Path:
    """Return a path with `~` replaced by a home folder.

    Raises:
        ConfigurationError: there is no such home folder.
    """
    path = Path(spelled)
    first = path.parts[0] if path.parts else ""
    if first == "~" and (home := home_folder()) is not None:
        return home.joinpath(*path.parts[1:])
    try:
        return path.expanduser() if first != "~" else _homeless(path)
    except RuntimeError:
        return _homeless(path)


def _homeless(path: Path) -> Path:
    raise ConfigurationError(f"'{path}' begins with a home folder that this system does not know: give a full path")


def shown_name(name: str) -> str:
    """A model's name for rows, headers and reports: of a path that exists its last part, else the name itself."""
    path = expanded(name)
    return path.resolve().name if path.exists() else name
