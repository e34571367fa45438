"""Store of everything that one engine learns: shared learners, their files, and saves at intervals.

The engine's thread changes learners with the lock held. A thread of the store copies changed states with the lock held,
and writes files without it, so that the engine waits for a copy at most.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import TypeVar, cast, final

from draftree.core.errors import ConfigurationError
from draftree.drafters.learning.base import DamagedStateError, LearnedStats, Learner
from draftree.drafters.learning.files import LearnedFile, prepare_folder
from draftree.drafters.learning.settings import Learning, Scope

__all__ = ["LearningStore"]

logger = logging.getLogger(__name__)
Kind = TypeVar("Kind", bound=Learner)


@final
class LearningStore:
    """Learners of one engine.

    Args:
        learning: the settings.
        fingerprint: fingerprint of the target; empty if it has none.

    Raises:
        ConfigurationError: the folder cannot be used, or the target has no fingerprint to bind files to.
    """

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

    @property
    def is_by_key(self) -> bool:
        """Whether every owner has a state of its own."""
        return self.learning.scope is Scope.KEY

    def learner(self, key: Hashable, make: Callable[[], Kind]) -> Kind:
        """Return the learner of a key; the first call makes it, and restores its file.

        Raises:
            ConfigurationError: another engine uses its file.
        """
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
            aside = file.set_aside()
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
        found = store()
        if found is None:
            return
        found.save()
        del found
