"""Signals as exceptions."""

from __future__ import annotations

import signal
import time

import pytest

from draftree.core.host import leaving_on_signals


class Interrupted:
    """An object whose finalizer is interrupted."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_during_a_finalizer_is_not_lost() -> None:
    with pytest.raises(KeyboardInterrupt), leaving_on_signals():
        Interrupted()
        time.sleep(600)
