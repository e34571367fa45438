"""What a thread is asked to do by others. The only lock between them is in here."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import final

from draftree.core.errors import EngineClosedError

Refuse = Callable[[EngineClosedError], None]


@final
class Mailbox:
    """Actions for one thread, in the order in which they came.

    Of what is put in, exactly one thing is called, once: the action, by the thread that reads; or, if the mailbox was
    shut before, what was named for that case, with an error of its own.
    """

    def __init__(self) -> None:
        self._letters: queue.SimpleQueue[tuple[Callable[[], None], Refuse]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._reason: str | None = None

    def __len__(self) -> int:
        return self._letters.qsize()

    def put(self, action: Callable[[], None], *, otherwise: Refuse) -> None:
        """Ask for an action; does not wait. `otherwise` is called with the reason if the action will never run."""
        with self._lock:
            # under the lock: or it could be put in behind the back of `shut`
            if self._reason is None:
                self._letters.put((action, otherwise))
                return
        otherwise(EngineClosedError(self._reason))

    def get(self, *, wait: bool) -> Callable[[], None] | None:
        """The next action; None if there is none, and `wait` is False."""
        try:
            return self._letters.get(block=wait)[0]
        except queue.Empty:
            return None

    def shut(self, reason: str) -> None:
        """Nothing that is in here, or comes later, is done."""
        with self._lock:
            self._reason = reason
        while not self._letters.empty():
            self._letters.get()[1](EngineClosedError(reason))
