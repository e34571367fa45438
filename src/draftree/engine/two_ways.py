"""Choice between two ways to run rounds, by measured tokens per second."""

from __future__ import annotations

from typing import final

TRIAL_ROUNDS = 8
"""Rounds of each sequence that are measured in each way."""
LEAST_HELD, MOST_HELD = 128, 4096
"""Rounds until both ways are measured again: twice as many every time that the result is the same."""


@final
class TwoWays:
    """Measures two ways in turn and keeps the faster one. Rounds of the second way run half of the batch each.

    The first round of a trial is not counted: it may prepare for the next. A batch of more than twice or less than half
    of the measured size is measured again.

    Args:
        first: name of the first way in messages.
        second: name of the second way.
    """

    def __init__(self, first: str, second: str) -> None:
        self._names = (first, second)
        self._size = 0
        self._held, self._left = LEAST_HELD, 0
        self._way, self._is_trial = 1, True
        self._rates = [0.0, 0.0]
        self._begin_trial(1)

    def _begin_trial(self, way: int) -> None:
        self._way, self._is_trial = way, True
        self._left = 1 + TRIAL_ROUNDS * (1 + way)
        self._is_first = True
        self._seconds, self._tokens = 0.0, 0

    def is_second(self, count: int) -> bool:
        """Return whether the next round of a batch of `count` sequences is run in the second way."""
        if not self._size <= 2 * count <= 4 * self._size:
            self._size, self._held = count, LEAST_HELD
            self._begin_trial(1)
        return self._way == 1

    def note_round(self, count: int, seconds: float, tokens: int) -> None:
        """Note a round of `count` sequences in the chosen way: its seconds and the tokens written.

        Rounds of single sequences are not counted: they have no second way.
        """
        if count < 2:
            return
        self._left -= 1
        if self._is_trial and not self._is_first:
            self._seconds, self._tokens = self._seconds + seconds, self._tokens + tokens
        self._is_first = False
        if self._left <= 0:
            self._next()

    def _next(self) -> None:
        if not self._is_trial:
            self._begin_trial(1)
            return
        self._rates[self._way] = self._tokens / self._seconds if self._seconds > 0 else 0.0
        if self._way == 1:
            self._begin_trial(0)
            return
        self._is_trial, self._left = False, self._held
        self._held = min(2 * self._held, MOST_HELD)
        self._way = int(self._rates[1] > self._rates[0])

    @property
    def note(self) -> str:
        """The last measurement; empty until both ways were measured."""
        if not all(self._rates):
            return ""
        rates = " and ".join(f"{rate:.1f} tokens/s {name}" for name, rate in zip(self._names, self._rates, strict=True))
        return f"{self._names[int(self._rates[1] > self._rates[0])]}: measured {rates}"
