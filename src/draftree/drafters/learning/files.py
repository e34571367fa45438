"""Files of learned states: safetensors, written atomically, readable by their owner only.

A name is `LEARNER-SCOPE-IDENTITY.safetensors`. The header repeats all three, so that a renamed file is not used.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from draftree.core.errors import ConfigurationError
from draftree.core.json_files import MALFORMED, parse_json
from draftree.core.locks import PathLock
from draftree.drafters.learning.base import DamagedStateError, LearnedState

__all__ = ["LearnedFile", "prepare_folder"]

FORMAT = "1"


def prepare_folder(folder: str) -> Path:
    """Return the folder, created if it does not exist, for its owner only.

    Raises:
        ConfigurationError: it cannot be created or written.
    """
    path = Path(folder).expanduser()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"the folder '{path}' for learned state cannot be created ({error.strerror}): choose another one"
        ) from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigurationError(f"the folder '{path}' for learned state cannot be written: choose another one")
    return path


class LearnedFile:
    """File of one learner, locked against other processes while this object lives.

    Args:
        folder: an existing folder.
        name: name of the learner.
        scope: scope of the state.
        identity: identity of the learner.

    Raises:
        ConfigurationError: another engine uses the file.
    """

    def __init__(self, folder: Path, name: str, *, scope: str, identity: str) -> None:
        self.path = folder / f"{name}-{scope}-{identity}.safetensors"
        self._header = {"format": FORMAT, "learner": name, "scope": scope, "identity": identity}
        self._lock = _locked(self.path.with_suffix(".lock"))

    def read(self) -> LearnedState | None:
        """Return the stored state; None if there is no file.

        Raises:
            DamagedStateError: the file is damaged, or of another format or learner.
        """
        if not self.path.exists():
            return None
        try:
            with safe_open(self.path, framework="numpy") as stored:
                header: dict[str, str] = stored.metadata() or {}
                different = [key for key, value in self._header.items() if header.get(key) != value]
                if different:
                    raise DamagedStateError(f"its {different[0]} is {header.get(different[0])!r}")
                owners: list[str] = parse_json(header["owners"])
                found: dict[str, dict[str, np.ndarray]] = {owner: {} for owner in owners}
                for key in stored.keys():  # noqa: SIM118, not a mapping
                    place, _, array = key.partition("/")
                    found[owners[int(place)]][array] = stored.get_tensor(key)
        except (OSError, SafetensorError, *MALFORMED) as error:
            raise error if isinstance(error, DamagedStateError) else DamagedStateError(str(error)) from error
        return found

    def write(self, state: LearnedState) -> None:
        """Replace the file; remove it if nothing is learned.

        Raises:
            OSError: it cannot be written; the old file is unchanged.
        """
        if not state:
            self.path.unlink(missing_ok=True)
            return
        arrays = {
            f"{place}/{name}": np.ascontiguousarray(array)
            for place, own in enumerate(state.values())
            for name, array in own.items()
        }
        data = save(arrays, metadata={**self._header, "owners": json.dumps(list(state))})
        fresh = self.path.with_suffix(".part")
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(fresh, self.path)

    def set_aside(self) -> Path:
        """Rename a damaged file, so that the next save does not replace it; return its new path."""
        aside = self.path.with_suffix(".damaged")
        os.replace(self.path, aside)
        return aside

    def close(self) -> None:
        """Release the lock."""
        self._lock.release()


def _locked(path: Path) -> PathLock:
    try:
        return PathLock(path)
    except BlockingIOError as error:
        raise ConfigurationError(
            f"'{path.with_suffix('.safetensors')}' is in use by another engine: give each engine a folder of its own"
        ) from error
    except OSError as error:
        raise ConfigurationError(
            f"'{path}' cannot be written ({error.strerror}): choose another folder for learned state"
        ) from error
