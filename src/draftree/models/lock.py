"""Exclusive use of a model by one thread at a time.

Several engines and threads may share a model: whatever runs its passes or edits its slots does so under `model.lock`.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import TypeVar, final

from draftree.core.errors import ModelError

__all__ = ["ModelLock"]

T = TypeVar("T")


@final
class ModelLock:
    """Lets one thread at a time use a model, and others between the passes of a thread that runs many.

    Python's locks are not fair: a thread that runs pass after pass would keep the others out. So short uses wait at a
    gate that every pass has to go through. `with` acquires both locks in C, so that an exception of a signal handler
    leaves neither of them held.
    """

    def __init__(self) -> None:
        self._gate, self._use = threading.RLock(), threading.RLock()
        self._user: int | None = None
        self._process = os.getpid()
        self._postponed: deque[Callable[[], object]] = deque()

    def run(self, use: Callable[[], T]) -> T:
        """Run a pass, or several that belong together; immediately within another use by this thread.

        Raises:
            ModelError: the process was forked after the model was loaded.
        """
        if self._user == threading.get_ident():
            return use()
        self._require_process()
        with self._gate:
            pass
        with self._use:
            result = self._used(use)
        self._run_postponed()
        return result

    def between(self, use: Callable[[], T]) -> T:
        """Run a short use of the model or of its engines before the next pass of any thread; otherwise as `run`."""
        if self._user == threading.get_ident():
            return use()
        self._require_process()
        with self._gate, self._use:
            result = self._used(use)
        self._run_postponed()
        return result

    def later(self, use: Callable[[], object]) -> None:
        """Run a use now, or after the current one. Never waits: the garbage collector may call it in any place."""
        self._postponed.append(use)
        self._run_postponed()

    def _used(self, use: Callable[[], T]) -> T:
        self._user = threading.get_ident()
        try:
            return use()
        finally:
            self._user = None

    def _run_postponed(self) -> None:
        # whoever holds the lock runs what was postponed meanwhile, after the release: nothing is forgotten
        while self._postponed and self._user != threading.get_ident() and self._use.acquire(blocking=False):
            try:
                while self._postponed:
                    self._used(self._postponed.popleft())
            finally:
                self._use.release()

    def _require_process(self) -> None:
        # threads of torch do not survive a fork, and passes would wait for them forever
        if os.getpid() != self._process:
            raise ModelError(
                "the process was forked after the model was loaded, and its threads are missing here: load the model "
                "in the child process, or start it with multiprocessing's 'spawn'"
            )
