"""Learning from verified texts: its settings, the learner interface, and the store with its files.

The engine's thread changes learners with the lock held. A thread of the store copies changed states with the lock held,
and writes files without it, so that the engine waits for a copy at most. Files are in the safetensors format, written
atomically, readable by their owner only. A name is `LEARNER-SCOPE-IDENTITY.safetensors`; the header repeats all three,
so that a renamed file is not used.
"""

from __future__ import annotations

import enum
import hashlib
import json
import logging
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar, cast, final

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from draftree.core.errors import ConfigurationError, suggestion
from draftree.core.files import MALFORMED, PathLock, parse_json
from draftree.core.registry import Spec, build_config

MAX_RANK = 8
"""Maximum rank of a correction of a head's logits."""


class Scope(enum.StrEnum):
    """Whose texts influence whose drafts."""

    SERVER = "server"
    """Texts of all requests, drafts of all requests."""
    KEY = "key"
    """Texts and drafts of one owner, such as an API key."""


@dataclass(frozen=True, slots=True)
class LearnOptions:
    """Options after the scope.

    Attributes:
        folder: folder of the files; None to keep what is learned in memory only.
        every: seconds between two saves.
        rate: learning rate of heads; 0 to leave heads as they are.
        rank: rank of the correction of a head's logits, besides a bias per token; 0 for the bias only.
        share: maximum share of the time of generation that heads learn for.
    """

    folder: str | None = None
    every: float = 300.0
    rate: float = 0.07
    rank: int = MAX_RANK
    share: float = 0.02

    def __post_init__(self) -> None:
        if self.folder is not None and not self.folder.strip():
            raise ConfigurationError("option folder of learning is empty: name a folder, or leave it out")
        for name, is_valid, allowed in (
            ("every", self.every > 0, "seconds above 0"),
            ("rate", 0 <= self.rate <= 1, "from 0 to 1"),
            ("rank", 0 <= self.rank <= MAX_RANK, f"from 0 to {MAX_RANK}"),
            ("share", 0 < self.share <= 1, "above 0 and at most 1"),
        ):
            if not is_valid:
                raise ConfigurationError(f"option {name} of learning is {getattr(self, name):g}: it must be {allowed}")


@dataclass(frozen=True, slots=True)
class Learning:
    """A scope and its options."""

    scope: Scope
    options: LearnOptions


def parse_learning(text: str) -> Learning:
    """Read a spec: `server` or `key`, and options after commas."""
    if not isinstance(text, str):
        raise ConfigurationError(f"learn is {text!r}: {suggestion('', list(Scope))}")
    name, *items = (part.strip() for part in text.split(","))
    if name not in list(Scope):
        raise ConfigurationError(f"learn is '{text}': {suggestion(name, list(Scope))}, and options after commas")
    options = []
    for item in items:
        key, equals, value = map(str.strip, item.partition("="))
        if not equals or not key:
            raise ConfigurationError(f"option '{item}' of learning '{name}' is not of the form key=value")
        options.append((key, value))
    return Learning(Scope(name), build_config(LearnOptions, Spec(name, None, tuple(options)), "learning"))


class DamagedStateError(ValueError):
    """A stored state cannot be used."""


@dataclass(frozen=True, slots=True)
class LearnedStats:
    """Statistics of one learner.

    Attributes:
        texts: number of learned texts since the start; 0 for a head.
        tokens: number of learned tokens since the start; for a head, verified tokens that it was updated with.
        size: number of tokens in tables, or of learned numbers of a head.
        scopes: number of owners with a state of their own; 1 in scope `server`.
        base_acceptance: running share of first draft tokens that the target picks, without what was learned; None for
            tables and before the first comparison.
        learned_acceptance: the same with what was learned, on the same rows.
        active: number of owners whose drafts use what was learned.
    """

    name: str
    texts: int = 0
    tokens: int = 0
    size: int = 0
    num_bytes: int = 0
    scopes: int = 0
    base_acceptance: float | None = None
    learned_acceptance: float | None = None
    active: int = 0
    seconds: float = 0.0


LearnedState = Mapping[str, Mapping[str, np.ndarray]]
"""Named arrays of every owner; the owner of scope `server` is the empty name."""


class Learner(ABC):
    """Learned state of a drafter.

    `state`, `restore` and `forget` are called with the lock of the store held; implementations change their state with
    the lock held too.
    """

    name: str
    identity: str
    """Checksum of the object that the state belongs to, such as a vocabulary or a head; hexadecimal digits."""
    version: int = 0
    """Number of changes so far."""

    @abstractmethod
    def state(self) -> LearnedState:
        """Return copies of what is learned; empty if nothing is."""

    @abstractmethod
    def restore(self, state: LearnedState) -> None:
        """Replace what is learned; raises DamagedStateError, with nothing changed, for a state that cannot be used."""

    @abstractmethod
    def forget(self) -> None:
        """Drop what is learned."""

    @property
    @abstractmethod
    def stats(self) -> LearnedStats:
        """Return statistics; from any thread."""


Owned = TypeVar("Owned")


class OwnedLearner(Learner, Generic[Owned]):
    """Learner with an object for every owner, or one for all texts; the last used is the last.

    A subclass sets `_build`, which makes the object of a new owner.

    Args:
        identity: what the objects belong to, besides the target.
        store: store of the learner; None to learn from all texts in memory.
    """

    _build: Callable[[], Owned]

    def __init__(self, identity: str, store: LearningStore | None) -> None:
        self.identity = hashlib.sha256(identity.encode()).hexdigest()[:16]
        self._by_owner = store is not None and store.learning.scope is Scope.KEY
        self._lock: AbstractContextManager[object] = nullcontext() if store is None else store.lock
        self._owned: dict[str, Owned] = {}

    @abstractmethod
    def _restored(self, arrays: Mapping[str, np.ndarray]) -> Owned:
        """Return an object from its part of the state; raises DamagedStateError."""

    def _changed(self) -> None:
        """Count a change."""
        self.version += 1

    def named(self, owner: str | None) -> str | None:
        """Return the name of an owner's object; None for no owner."""
        return None if owner is None else owner if self._by_owner else ""

    def find(self, owner: str | None) -> Owned | None:
        """Return the object that an owner's drafts read; None if there is none yet, or for no owner."""
        name = self.named(owner)
        return None if name is None else self._owned.get(name)

    def _used(self, name: str) -> Owned:
        """Return an object, a new one if there is none yet, as the last used."""
        owned = self._owned.pop(name, None)
        owned = self._owned[name] = self._build() if owned is None else owned
        return owned

    def restore(self, state: LearnedState) -> None:
        if not self._by_owner and set(state) - {""}:
            raise DamagedStateError("it has owners")
        self._owned = {name: self._restored(arrays) for name, arrays in state.items()}
        self._changed()

    def forget(self) -> None:
        self._owned.clear()
        self._changed()


FORMAT = "1"


def prepare_folder(folder: str) -> Path:
    """Return the folder, created if it does not exist, for its owner only."""
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
    """File of one learner, locked against other processes while this object lives."""

    def __init__(self, folder: Path, name: str, *, scope: str, identity: str) -> None:
        self.path = folder / f"{name}-{scope}-{identity}.safetensors"
        self._header = {"format": FORMAT, "learner": name, "scope": scope, "identity": identity}
        lock = self.path.with_suffix(".lock")
        try:
            self._lock = PathLock(lock)
        except BlockingIOError as error:
            raise ConfigurationError(
                f"'{self.path}' is in use by another engine: give each engine a folder of its own"
            ) from error
        except OSError as error:
            raise ConfigurationError(
                f"'{lock}' cannot be written ({error.strerror}): choose another folder for learned state"
            ) from error

    def read(self) -> LearnedState | None:
        """Return the stored state; None if there is no file."""
        if not self.path.exists():
            return None
        try:
            with safe_open(self.path, framework="numpy") as stored:
                header: dict[str, str] = stored.metadata() or {}
                different = [key for key, value in self._header.items() if header.get(key) != value]
                if different:
                    raise DamagedStateError(f"its {different[0]} is {header.get(different[0])!r}")
                owners: list[str] = parse_json(header["owners"])
                state: dict[str, dict[str, np.ndarray]] = {owner: {} for owner in owners}
                for key in stored.keys():  # noqa: SIM118, not a mapping
                    place, _, array = key.partition("/")
                    state[owners[int(place)]][array] = stored.get_tensor(key)
        except (OSError, SafetensorError, *MALFORMED) as error:
            raise error if isinstance(error, DamagedStateError) else DamagedStateError(str(error)) from error
        return state

    def write(self, state: LearnedState) -> None:
        """Replace the file; remove it if nothing is learned."""
        if not state:
            self.path.unlink(missing_ok=True)
            return
        arrays = {
            f"{place}/{name}": np.ascontiguousarray(array)
            for place, learned in enumerate(state.values())
            for name, array in learned.items()
        }
        data = save(arrays, metadata={**self._header, "owners": json.dumps(list(state))})
        fresh = self.path.with_suffix(".part")
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(fresh, self.path)

    def close(self) -> None:
        """Release the lock."""
        self._lock.release()


logger = logging.getLogger(__name__)
Kind = TypeVar("Kind", bound=Learner)


@final
class LearningStore:
    """Learners of one engine; the fingerprint is that of the target, empty if it has none."""

    def __init__(self, learning: Learning, fingerprint: str) -> None:
        self.learning = learning
        self.fingerprint = fingerprint
        self.lock = threading.RLock()
        options = learning.options
        if options.folder is not None and not fingerprint:
            raise ConfigurationError(
                "this model has no fingerprint, which files of learned state are bound to: leave out option folder"
            )
        self._folder = None if options.folder is None else prepare_folder(options.folder)
        self._learners: dict[Hashable, Learner] = {}
        self._files: dict[Learner, LearnedFile] = {}
        self._saved: dict[Learner, int] = {}
        self._saving = threading.Lock()
        self._ends = threading.Event()
        if self._folder is not None:
            threading.Thread(
                target=_save_at_intervals,
                args=(weakref.ref(self), self._ends, options.every),
                name="draftree-learning",
                daemon=True,
            ).start()

    def learner(self, key: Hashable, make: Callable[[], Kind]) -> Kind:
        """Return the learner of a key; the first call makes it, and restores its file."""
        known = self._learners.get(key)
        if known is None:
            known = self._learners[key] = make()
            if self._folder is not None:
                self._open(known, self._folder)
        return cast(Kind, known)

    def _open(self, learner: Learner, folder: Path) -> None:
        file = LearnedFile(folder, learner.name, scope=self.learning.scope, identity=learner.identity)
        self._files[learner] = file
        try:
            state = file.read()
            if state is not None:
                with self.lock:
                    learner.restore(state)
                logger.info("learned state of drafter '%s' restored from '%s'", learner.name, file.path)
        except DamagedStateError as error:
            # the next save must not replace it
            aside = file.path.replace(file.path.with_suffix(".damaged"))
            logger.warning(
                "'%s' is damaged (%s): it was renamed to '%s', and drafter '%s' starts without it",
                file.path,
                error,
                aside.name,
                learner.name,
            )
        self._saved[learner] = learner.version

    @property
    def stats(self) -> tuple[LearnedStats, ...]:
        """Statistics of every learner; from any thread."""
        return tuple(learner.stats for learner in tuple(self._learners.values()))

    def save(self) -> None:
        """Write the files of all changed learners; a failure is logged, and the next save tries again."""
        with self._saving:
            for learner, file in tuple(self._files.items()):
                with self.lock:
                    version = learner.version
                    if version == self._saved[learner]:
                        continue
                    state = learner.state()
                try:
                    file.write(state)
                    self._saved[learner] = version
                except Exception as error:  # the library has its own for a full disk; the thread must go on
                    logger.warning("learned state of drafter '%s' was not saved: %s", learner.name, error)

    def forget(self) -> None:
        """Drop everything that was learned, and its files."""
        with self.lock:
            for learner in self._learners.values():
                learner.forget()
        self.save()

    def close(self) -> None:
        """Save, stop the thread and release the files; a second call does nothing."""
        if self._ends.is_set():
            return
        self._ends.set()
        self.save()
        for file in self._files.values():
            file.close()
        self._files.clear()


def _save_at_intervals(store: weakref.ref[LearningStore], ends: threading.Event, every: float) -> None:
    while not ends.wait(every):
        learning_store = store()
        if learning_store is None:
            return
        learning_store.save()
        del learning_store
