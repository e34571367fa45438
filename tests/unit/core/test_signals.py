"""Signals as exceptions."""

from __future__ import annotations

import signal
import time

import pytest

from draftree.core.host import leaving_on_signals


class Signalled:
    """An object whose finalizer gets a signal."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        signal.raise_signal(self.number)


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_during_a_finalizer_is_not_lost(number: int, raised: type[BaseException]) -> None:
    with pytest.raises(raised), leaving_on_signals():
        Signalled(number)
        time.sleep(600)
