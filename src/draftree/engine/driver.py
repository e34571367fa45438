"""One thread that steps an engine, and coroutines elsewhere that hear of it.

Only this thread touches the engine. Others leave actions for it, which it takes between two steps; news go to the event
loops of those who listen. A listener that is slow finds all its news together later, one that is gone is forgotten.
"""

from __future__ import annotations

import asyncio
import bisect
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from draftree.core.errors import EngineClosedError, QueueFullError
from draftree.engine.engine import Engine, Update
from draftree.engine.sequence import Piece, WritingSequence

logger = logging.getLogger(__name__)


class Listener:
    """News of one sequence on their way from the engine's thread to a coroutine.

    Args:
        sequence: whose news.
        loop: where the coroutine runs.
    """

    def __init__(self, sequence: WritingSequence, loop: asyncio.AbstractEventLoop) -> None:
        self.sequence = sequence
        self._loop = loop
        self._arrived = asyncio.Event()
        self._pieces: list[Piece] = []
        self._is_last = False

    def tell(self, pieces: Sequence[Piece], *, is_last: bool) -> bool:
        """Called by the engine's thread; False if the loop is gone."""
        try:
            self._loop.call_soon_threadsafe(self._arrive, pieces, is_last)
        except RuntimeError:
            return False
        return True

    def _arrive(self, pieces: Sequence[Piece], is_last: bool) -> None:
        self._pieces.extend(pieces)
        self._is_last = self._is_last or is_last
        self._arrived.set()

    async def next(self) -> Update:
        """All that is new since the last call; waits until something is."""
        await self._arrived.wait()
        self._arrived.clear()
        pieces, self._pieces = tuple(self._pieces), []
        return Update(self.sequence, pieces, is_last=self._is_last)


class Driver:
    """Steps an engine on a thread of its own.

    Args:
        engine: nobody else may touch it from now on.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._actions: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._listeners: list[Listener] = []
        self._backlog: list[tuple[Future[None], Sequence[Listener]]] = []
        self._drains: list[Future[None]] = []
        self._is_draining = self._is_closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="draftree-engine", daemon=True)
        self._thread.start()

    def call(self, action: Callable[[], Any]) -> Future[Any]:
        """Let the engine's thread do something between two steps.

        Raises:
            EngineClosedError: the thread is gone.
        """
        future: Future[Any] = Future()
        with self._lock:
            if self._is_closed:
                raise _closed()
            self._actions.put((future, action))
        return future

    def add(self, listeners: Sequence[Listener], *, wait: bool) -> Future[None]:
        """Queue the sequences of a request; the future is done when they are.

        Args:
            listeners: one for each sequence.
            wait: whether to wait for room in the queue; otherwise the future fails with QueueFullError.

        Raises:
            EngineClosedError: the thread is gone.
        """
        added: Future[None] = Future()

        def take() -> None:
            if self._is_draining:
                raise _closed()
            if wait and (self._backlog or not self._engine.takes(len(listeners))):
                bisect.insort(self._backlog, (added, listeners), key=_priority)
                return
            if self._backlog:
                raise QueueFullError(f"{len(self._backlog)} requests wait for room in the queue: try again later")
            self._take(added, listeners)

        self.call(take).add_done_callback(lambda done: _pass_on(done, added))
        return added

    def _take(self, added: Future[None], listeners: Sequence[Listener]) -> None:
        if not added.set_running_or_notify_cancel():
            return
        try:
            self._engine.add(*(listener.sequence for listener in listeners))
        except Exception as error:
            added.set_exception(error)
            return
        self._listeners.extend(listeners)
        added.set_result(None)

    def abort(self, sequences: Sequence[WritingSequence]) -> None:
        """End these sequences; what is finished stays as it is. Does not wait."""
        if not all(sequence.is_finished for sequence in sequences):
            try:
                self.call(lambda: self._engine.abort(sequences))
            except EngineClosedError:
                return  # everything has ended

    def drain(self) -> Future[None]:
        """Take no more requests; the future is done when all are written."""
        drained: Future[None] = Future()

        def begin() -> None:
            self._is_draining = True
            self._drains.append(drained)

        self.call(begin)
        return drained

    def close(self) -> None:
        """End everything and wait for the thread."""

        def end() -> None:
            raise SystemExit

        with self._lock:
            if not self._is_closed:
                self._actions.put((Future(), end))
        self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                self._act()
                if not self._engine.is_idle:
                    self._step()
                self._admit_backlog()
                if self._engine.is_idle and not self._backlog:
                    while self._drains:
                        self._drains.pop().set_result(None)
        except SystemExit:
            self._end(_closed())
        except BaseException as error:
            logger.exception("the engine's thread broke down")
            self._end(error)

    def _act(self) -> None:
        """Do what was asked for; waits if there is nothing else to do."""
        while True:
            try:
                future, action = self._actions.get(block=self._engine.is_idle and not self._backlog)
            except queue.Empty:
                return
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(action())
            except Exception as error:
                future.set_exception(error)
            self._tell()
            if self._actions.empty():
                return

    def _step(self) -> None:
        try:
            self._engine.step()
        except Exception:
            # all that ran has failed with it, and hears of it; the engine is whole
            logger.exception("a step of the engine raised")
        self._tell()

    def _tell(self) -> None:
        going = []
        for listener in self._listeners:
            sequence = listener.sequence
            pieces, is_last = sequence.take_pieces(), sequence.is_finished
            heard = listener.tell(pieces, is_last=is_last) if pieces or is_last else True
            if not heard and not is_last:
                self._engine.abort([sequence])
            if heard and not is_last:
                going.append(listener)
        self._listeners = going

    def _admit_backlog(self) -> None:
        while self._backlog and self._engine.takes(len(self._backlog[0][1])):
            self._take(*self._backlog.pop(0))

    def _end(self, error: BaseException) -> None:
        """Everybody hears why there is nothing more to come."""
        reason = error if isinstance(error, Exception) else EngineClosedError(f"the engine broke down: {error!r}")
        with self._lock:
            self._is_closed = True
        for listener in self._listeners:
            if not listener.sequence.is_finished:
                listener.sequence.fail(reason)
        self._engine.abort([listener.sequence for listener in self._listeners])
        self._tell()
        futures: list[Future[Any]] = [*(added for added, _ in self._backlog), *self._drains]
        while not self._actions.empty():
            futures.append(self._actions.get()[0])
        for future in futures:
            if not future.done() and not future.cancelled():
                future.set_exception(reason)


def _priority(entry: tuple[Future[None], Sequence[Listener]]) -> int:
    """In the backlog as in the queue: lower numbers first, then first come, first served."""
    return entry[1][0].sequence.priority


def _pass_on(done: Future[Any], added: Future[None]) -> None:
    """What kept a request from being queued reaches the one who waits for that."""
    error = done.exception()
    if error is not None and not added.done():
        added.set_exception(error)


def _closed() -> EngineClosedError:
    return EngineClosedError("the engine was closed, or is being drained: it takes no requests; make another one")
