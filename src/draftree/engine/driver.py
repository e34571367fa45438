"""One thread that steps an engine for coroutines on other threads. Only this thread uses the engine and its parts.

A request has one state at a time:

    submitted  in the mailbox                 by `ask`, from any thread
    in line    in `_line`                     until the engine's queue has room for all of it; skipped without `wait`
    served     in the engine and in `_served`
    over       its sequences are finished and its coroutine is notified

A request always ends in the same way: its sequences are finished, then its coroutine is notified. The engine finishes
sequences that are served; `RequestHandle.refuse` finishes the others. Each cause has one path:

    completed, or failed alone         `Engine.step`
    the client left                    `leave`; `_tell` if its event loop is closed
    refused                            `_join` and `_enter`
    closed, or the thread failed       `_end`, and the mailbox from then on
    the thread does not return         `lose`, and the mailbox from then on

Updates are sent to the client's event loop and never block: a request buffers unread updates, at most one text of each
sequence, so slow readers need no extra path. Other work on the model (`Background`) takes turns with the engine's
steps, by time.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import logging
import os
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, final

from draftree.core.errors import EngineClosedError, QueueFullError, RankError
from draftree.core.host import SYSTEM_CLOCK, Clock
from draftree.engine.engine import Engine
from draftree.engine.sequence import Update, WritingSequence


class Background(ABC):
    """Work that shares the model and the thread of an engine. All methods are called on that thread.

    A step is short: it delays the next round of all sequences.
    """

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""

    @abstractmethod
    def step(self, *, is_alone: bool) -> None:
        """Do one part of the work. Its errors go to those who wait for it, and none is raised.

        Args:
            is_alone: whether the engine has no sequences, so that a long step delays none.
        """

    @abstractmethod
    def end(self, error: EngineClosedError) -> None:
        """Drop all work, and report the error to those who wait for it."""


@final
@dataclass
class TimeShare:
    """Division of a thread's time: background work gets at most as much time as rounds.

    The longest delay of a round is one step of the work. Time that the work does not use is not kept for later.
    """

    clock: Clock = SYSTEM_CLOCK
    ahead: float = 0.0  # seconds that the work has had more than the rounds since
    _start: float = 0.0

    @property
    def may_work(self) -> bool:
        return self.ahead <= 0.0

    def begin(self) -> None:
        """Note the beginning of a round or of a step of the work."""
        self._start = self.clock()

    def end_round(self) -> None:
        self.ahead = max(0.0, self.ahead - (self.clock() - self._start))

    def end_work(self, *, is_alone: bool) -> None:
        """Note the end of a step of the work; it costs nothing if there were no rounds to delay."""
        self.ahead = 0.0 if is_alone else self.ahead + self.clock() - self._start


FORKED = (
    "the process was forked after the engine was created, and its thread is missing here: create the engine in the "
    "child process, or start it with multiprocessing's 'spawn'"
)
Refuse = Callable[[EngineClosedError], None]


@final
class Mailbox:
    """Actions for one thread, in order of submission.

    For every entry exactly one callable is called, once: the action, by the reading thread; or, if the mailbox was shut
    before, the entry's alternative, with an error.
    """

    def __init__(self) -> None:
        self._letters: queue.SimpleQueue[tuple[Callable[[], None], Refuse]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._process = os.getpid()

    def __len__(self) -> int:
        return self._letters.qsize()

    def put(self, action: Callable[[], None], *, otherwise: Refuse) -> None:
        """Submit an action; does not wait. `otherwise` is called with the reason if the action will never run."""
        if os.getpid() != self._process:
            otherwise(EngineClosedError(FORKED))
            return
        with self._lock:
            # under the lock: otherwise it could be added after `shut` emptied the queue
            if self._reason is None:
                self._letters.put((action, otherwise))
                return
        otherwise(EngineClosedError(self._reason))

    def get(self, *, wait: bool, seconds: float = 0.0) -> Callable[[], None] | None:
        """Return the next action; None if there is none, `wait` is False and none comes within some seconds."""
        try:
            return self._letters.get(block=wait or seconds > 0, timeout=None if wait else seconds)[0]
        except queue.Empty:
            return None

    def shut(self, reason: str) -> None:
        """Refuse all queued and later actions; from any thread."""
        with self._lock:
            self._reason = reason
        with contextlib.suppress(queue.Empty):
            while True:
                self._letters.get(block=False)[1](EngineClosedError(reason))


@final
class RequestHandle:
    """The request of one coroutine. `deliver`, `accept` and `refuse` send; all else is for the loop's thread.

    Args:
        sequences: its sequences, all of one priority; owned by this request.
    """

    def __init__(self, sequences: Sequence[WritingSequence], loop: asyncio.AbstractEventLoop) -> None:
        self.sequences = tuple(sequences)
        self.untold = list(sequences)  # sequences whose last update has not been sent; for the thread that sends
        self._loop = loop
        self._unread: dict[int, list[Update]] = {}
        self._num_open = len(self.sequences)
        self._has_answer, self._has_update = asyncio.Event(), asyncio.Event()
        self._failure: Exception | None = None

    @property
    def priority(self) -> int:
        """Lower numbers are served first."""
        return self.sequences[0].priority

    @property
    def is_over(self) -> bool:
        """Whether the request was refused or ended, or the last updates of all sequences have arrived."""
        return self._failure is not None or not self._num_open

    def accept(self) -> None:
        """Notify the coroutine that the sequences are in the engine."""
        self._post(self._has_answer.set)

    def refuse(self, error: Exception) -> None:
        """Fail the sequences of a request that is not in the engine, and notify the coroutine."""
        for sequence in self.sequences:
            sequence.fail(error)
        self.untold = []
        self.end(error)

    def end(self, error: Exception) -> None:
        """Notify the coroutine that no updates follow; the sequences stay with a thread that may be lost."""
        self._post(lambda: self._fail(error))

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self._has_answer.set()
        self._has_update.set()

    def _post(self, action: Callable[[], None]) -> None:
        # of a closed loop no coroutine waits for the answer
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(action)

    async def accepted(self) -> None:
        """Wait until the sequences are in the engine."""
        await self._has_answer.wait()
        if self._failure is not None:
            raise self._failure

    @staticmethod
    def deliver(requests: Iterable[RequestHandle]) -> list[RequestHandle]:
        """Send new output and the ends of sequences, each end once, with one wake-up of each event loop.

        Returns:
            Requests whose event loop is closed; nothing is sent to them.
        """
        news: dict[asyncio.AbstractEventLoop, list[tuple[RequestHandle, list[Update]]]] = {}
        for request in requests:
            if updates := request._take_updates():
                news.setdefault(request._loop, []).append((request, updates))
        closed: list[RequestHandle] = []
        for loop, arriving in news.items():
            try:
                loop.call_soon_threadsafe(_arrive, arriving)
            except RuntimeError:
                closed += [request for request, _ in arriving]
        return closed

    def _take_updates(self) -> list[Update]:
        updates = [update for sequence in self.untold if (update := sequence.take_update()) is not None]
        if updates:
            self.untold = [sequence for sequence in self.untold if not sequence.is_finished]
        return updates

    def read_later(self, updates: Sequence[Update]) -> None:
        """Buffer updates for `next`."""
        for update in updates:
            self._unread.setdefault(update.sequence.index, []).append(update)
            self._num_open -= update.is_last
        self._has_update.set()

    async def next(self) -> Update | None:
        """Return all output of one sequence since its last update, the earliest unread first; None after the end."""
        while not self._unread:
            if not self._num_open:
                return None
            if self._failure is not None:
                raise self._failure
            self._has_update.clear()
            await self._has_update.wait()
        return Update.joined(self._unread.pop(next(iter(self._unread))))


def _arrive(news: Sequence[tuple[RequestHandle, Sequence[Update]]]) -> None:
    for request, updates in news:
        request.read_later(updates)


logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 1.0  # time for the thread to end by itself after a process of the model has ended
CLOSED = "the engine is closed or draining and accepts no requests: create a new one"


@final
class Driver:
    """Steps an engine on its own thread.

    Args:
        background: other work on the same thread; None for none.
    """

    def __init__(self, engine: Engine, background: Background | None = None, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._engine, self._background, self._share = engine, background, TimeShare(clock)
        self._mailbox = Mailbox()
        self._line: list[RequestHandle] = []
        self._served: list[RequestHandle] = []
        self._drains: list[Future[None]] = []
        self._is_draining = self._is_closing = False
        self.failure: BaseException | None = None
        """Why the thread failed, or cannot go on; None as long as it works, and after `close`."""
        self._thread = threading.Thread(target=self._run, name="draftree-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs: it has not failed, and is not closed."""
        return self.failure is None and self._thread.is_alive()

    def ask(self, request: RequestHandle, *, wait: bool) -> None:
        """Submit a request; its coroutine is notified of every result, refusals included. Does not wait.

        Args:
            wait: whether it waits in line while the engine's queue is full, or is refused with QueueFullError.
        """
        self._mailbox.put(lambda: self._join(request, wait=wait), otherwise=request.refuse)

    def leave(self, request: RequestHandle) -> None:
        """Abort the unfinished sequences of a request without a reader. Does not wait."""
        if not request.is_over:
            self._mailbox.put(lambda: self._drop(request), otherwise=lambda reason: None)

    def call(self, action: Callable[[], Any], *, is_new_work: bool = False) -> Future[Any]:
        """Run an action on the engine's thread between two steps. The future holds its result or error.

        Args:
            is_new_work: whether it adds background work, which is refused while the engine drains.
        """
        future = _promise()

        def act() -> None:
            if is_new_work and self._is_draining:
                future.set_exception(EngineClosedError(CLOSED))
                return
            try:
                future.set_result(action())
            except BaseException as error:
                future.set_exception(error)

        self._mailbox.put(act, otherwise=future.set_exception)
        return future

    def drain(self) -> Future[None]:
        """Accept no more requests; the future is done when all are finished."""
        drained = _promise()

        def begin() -> None:
            self._is_draining = True
            self._drains.append(drained)

        self._mailbox.put(begin, otherwise=drained.set_exception)
        return drained

    def lose(self, error: RankError) -> bool:
        """End all requests because the model lost a process; from any thread but the engine's.

        The thread fails at its next turn. A pass that waits for the lost process may never return: then the requests
        end without the thread, and their sequences stay as they are.

        Returns:
            Whether the thread has ended, so that nothing uses the model any more.
        """
        self.failure = self.failure or error
        self._mailbox.put(lambda: None, otherwise=lambda reason: None)  # wakes an idle thread
        self._thread.join(PATIENCE_SECONDS)
        if not self._thread.is_alive():
            return True
        self._mailbox.shut(str(error))
        for request in (*self._line, *self._served):
            request.end(error)
        return False

    def close(self) -> None:
        """End all requests and wait for the thread, unless the model lost a process."""

        def end() -> None:
            self._is_closing = True

        self._mailbox.put(end, otherwise=lambda reason: None)
        self._thread.join(None if self.failure is None else PATIENCE_SECONDS)

    def check_integrity(self) -> None:
        """Raise AssertionError if requests are lost, duplicated, or out of order. For `call`: between two turns."""
        in_line = [id(sequence) for request in self._line for sequence in request.sequences]
        untold = [id(sequence) for request in self._served for sequence in request.untold]
        served = [id(sequence) for sequence in (*self._engine.running, *self._engine.waiting)]
        assert sorted(untold) == sorted(served), "exactly the sequences in the engine have a coroutine"
        assert len({*in_line, *served}) == len(in_line) + len(served), "a sequence is in line or served, once"
        assert not any(s.is_finished for request in self._line for s in request.sequences), (
            "finished requests leave the line"
        )
        assert [r.priority for r in self._line] == sorted(r.priority for r in self._line), "priorities hold in line"
        assert not (self._line and self._engine.is_idle), "an idle engine leaves no request in line"

    def _run(self) -> None:
        reason = CLOSED
        try:
            while not self._is_closing and self.failure is None:
                self._turn()
        except RankError as error:
            self.failure = error
        except BaseException as error:
            logger.exception("the engine's thread failed")
            self.failure, reason = error, f"the engine failed with {error!r}: create a new one"
        self._end(str(self.failure) if isinstance(self.failure, RankError) else reason)

    def _turn(self) -> None:
        """Run one submitted action, or else a step; then update line, coroutines and drains."""
        # with background work, trees of clients are not waited for
        has_paused = self._engine.has_work and not self._has_background
        seconds = self._engine.paused.patience if has_paused else 0.0
        action = self._mailbox.get(wait=not self._has_work, seconds=seconds)
        if action is not None:
            action()
        else:
            self._step()
            self._work()
        while self._line and self._engine.takes(len(self._line[0].sequences)):
            self._enter(self._line.pop(0))
        self._tell()
        while self._drains and self._engine.is_idle and not self._has_work:
            self._drains.pop().set_result(None)

    @property
    def _has_background(self) -> bool:
        return self._background is not None and not self._background.is_idle

    @property
    def _has_work(self) -> bool:
        return self._engine.has_work or self._has_background

    def _step(self) -> None:
        if not self._engine.has_work:
            return
        self._share.begin()
        try:
            self._engine.step()
        except RankError:
            raise
        except Exception:
            # all running sequences have failed with it and are notified; the engine is consistent
            logger.exception("a step of the engine raised")
        self._share.end_round()

    def _work(self) -> None:
        """Run a step of the background work if it has its turn."""
        work, is_alone = self._background, not self._engine.has_work
        if work is None or work.is_idle or not (is_alone or self._share.may_work):
            return
        self._share.begin()
        work.step(is_alone=is_alone)
        self._share.end_work(is_alone=is_alone)

    def _join(self, request: RequestHandle, *, wait: bool) -> None:
        if self._is_draining:
            request.refuse(EngineClosedError(CLOSED))
        elif wait:
            # as in the engine's queue: lower numbers first, then first come, first served
            bisect.insort(self._line, request, key=lambda other: other.priority)
        elif self._line:
            request.refuse(
                QueueFullError(f"{len(self._line)} requests are waiting for room in the queue: try again later")
            )
        else:
            self._enter(request)

    def _enter(self, request: RequestHandle) -> None:
        try:
            self._engine.add(*request.sequences)
        except Exception as error:
            request.refuse(error)
        else:
            self._served.append(request)
            request.accept()

    def _drop(self, request: RequestHandle) -> None:
        if request in self._line:
            self._line.remove(request)
        self._engine.abort(request.sequences)

    def _tell(self) -> None:
        """Send updates. Abort requests whose event loop is closed; drop requests after their last update."""
        for request in RequestHandle.deliver(self._served):
            self._engine.abort(request.sequences)
            request.untold = []
        self._served = [request for request in self._served if request.untold]

    def _end(self, reason: str) -> None:
        """Notify all coroutines of the end with its reason; requests outside of the engine first."""
        self._mailbox.shut(reason)
        for request in self._line:
            request.refuse(EngineClosedError(reason))
        for drained in self._drains:
            drained.set_exception(EngineClosedError(reason))
        if self._background is not None:
            self._background.end(EngineClosedError(reason))
        for request in self._served:
            error = self.failure if isinstance(self.failure, RankError) else EngineClosedError(reason)
            for sequence in request.sequences:
                if not sequence.is_finished:
                    sequence.fail(error)
        RequestHandle.deliver(self._served)
        self._engine.abort([sequence for request in self._served for sequence in request.sequences])


def _promise() -> Future[Any]:
    """Return a future that its reader cannot cancel: the action runs even without a reader."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future
