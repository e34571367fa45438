"""Every action in a mailbox is run once or refused once."""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial
from itertools import count

import pytest

from draftree.core.errors import EngineClosedError
from draftree.engine.driver import Mailbox


def test_actions_come_in_order() -> None:
    mailbox, done = Mailbox(), []
    for number in range(3):
        mailbox.put(lambda number=number: done.append(number), otherwise=pytest.fail)  # type: ignore[misc]
    while (action := mailbox.get(wait=False)) is not None:
        action()
    assert done == [0, 1, 2]
    assert not len(mailbox)


def test_a_reader_may_wait_for_a_while() -> None:
    mailbox, done = Mailbox(), []
    assert mailbox.get(wait=False, seconds=0.001) is None
    mailbox.put(lambda: done.append(1), otherwise=pytest.fail)
    action = mailbox.get(wait=False, seconds=60.0)
    assert action is not None
    action()
    assert done == [1]


def test_queued_and_later_actions_of_a_shut_mailbox_are_refused() -> None:
    mailbox, refusals = Mailbox(), []
    mailbox.put(pytest.fail, otherwise=refusals.append)
    mailbox.shut("no more")
    mailbox.put(pytest.fail, otherwise=refusals.append)
    assert [str(error) for error in refusals] == ["no more", "no more"]
    assert all(isinstance(error, EngineClosedError) for error in refusals)
    assert refusals[0] is not refusals[1]
    assert mailbox.get(wait=False) is None


def test_concurrent_puts_during_a_shut_are_neither_lost_nor_repeated() -> None:
    mailbox, ends, stop = Mailbox(), Counter[tuple[int, int]](), threading.Event()
    lock, sent = threading.Lock(), [0] * 4

    def end(name: int, number: int, reason: object = None) -> None:
        with lock:
            ends[name, number] += 1

    def put(name: int) -> None:
        for number in count():
            mailbox.put(partial(end, name, number), otherwise=partial(end, name, number))
            sent[name] = number + 1
            if stop.is_set():
                return

    threads = [threading.Thread(target=put, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(500):
        action = mailbox.get(wait=True)
        assert action is not None
        action()
    mailbox.shut("no more")
    stop.set()
    for thread in threads:
        thread.join()
    assert sum(sent) == len(ends) > 500
    assert set(ends.values()) == {1}
