"""Corrections of one head: one for all requests, or one for each owner, with bounded memory and a share of time."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import final

import torch
from torch import Tensor

from draftree.core.clock import SYSTEM_CLOCK, Clock
from draftree.drafters.learning.base import DamagedStateError, LearnedState, LearnedStats, Learner
from draftree.drafters.learning.correction import Comparison, Correction

__all__ = ["HeadCorrections", "Pace"]

MAX_BYTES = 64 << 20
"""Memory of the corrections of all owners; the one that was not used for the longest time is dropped first."""
LONGEST_PAUSE = 1.0
"""Seconds between two drafts that count as time of generation; a longer pause is idle."""


@final
class Pace:
    """Limit of the time that is spent on learning.

    Args:
        share: maximum share of the time of generation.
        clock: returns seconds.
    """

    def __init__(self, share: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self._share, self.clock = share, clock
        self._last: float | None = None
        self._elapsed = 0.0
        self.spent = 0.0

    def allows(self) -> bool:
        """Return whether the next draft may be learned from; called once for every draft."""
        now = self.clock()
        if self._last is not None:
            self._elapsed += min(now - self._last, LONGEST_PAUSE)
        self._last = now
        return self.spent <= self._share * self._elapsed

    def spend(self, start: float) -> None:
        """Count the time since `start`."""
        self.spent += self.clock() - start


@final
class HeadCorrections(Learner):
    """Corrections by owner.

    Args:
        num_tokens: size of the draft vocabulary.
        hidden: width of the head's states.
        rank: rank of the corrections.
        rate: learning rate.
        identity: identity of the head and its target.
        device: device of the head.
        lock: held while a correction changes.
        by_owner: whether each owner has a correction.
        pace: limit of the time.
        native: whether to compute in C.
    """

    name = "head"

    def __init__(
        self,
        num_tokens: int,
        hidden: int,
        *,
        rank: int,
        rate: float,
        identity: str,
        device: torch.device,
        lock: AbstractContextManager[object],
        by_owner: bool,
        pace: Pace,
        native: bool = False,
    ) -> None:
        self.identity = hashlib.sha256(f"{identity} {num_tokens} {hidden} {rank}".encode()).hexdigest()[:16]
        self.pace = pace
        self._sizes, self._rank, self._rate, self._device = (num_tokens, hidden), rank, rate, device
        self._lock, self._by_owner, self._native = lock, by_owner, native
        # ordered by use, the latest last
        self._corrections: dict[str, Correction] = {}
        self._all = Comparison()
        self._num_rows = 0

    def named(self, owner: str | None) -> str | None:
        """Return the name of an owner's correction; None for no owner."""
        return None if owner is None else owner if self._by_owner else ""

    def find(self, name: str) -> Correction | None:
        """Return a correction; None if there is none yet."""
        return self._corrections.get(name)

    def open(self, name: str) -> Correction:
        """Return a correction, a new one if there is none yet."""
        with self._lock:
            found = self._corrections.pop(name, None)
            found = self._corrections[name] = self._empty() if found is None else found
            while len(self._corrections) > 1 and len(self._corrections) * found.num_bytes > MAX_BYTES:
                del self._corrections[next(iter(self._corrections))]
        return found

    def _empty(self) -> Correction:
        return Correction(*self._sizes, rank=self._rank, device=self._device, native=self._native)

    def learn(
        self, name: str, logits: Tensor, states: Tensor, *, columns: Sequence[int], temperatures: Sequence[float]
    ) -> None:
        """Update a correction; arguments as for `Correction.update`."""
        correction = self.open(name)
        with self._lock:
            correction.update(logits, states, columns=columns, temperatures=temperatures, rate=self._rate)
            self._num_rows += len(columns)
            self.version += 1

    def compare(self, name: str, *, base: bool, learned: bool) -> None:
        """Note whether the target picked the first draft token, without and with the correction."""
        with self._lock:
            self.open(name).comparison.add(base, learned)
            self._all.add(base, learned)

    def state(self) -> LearnedState:
        """Return copies of all corrections."""
        return {name: correction.state() for name, correction in self._corrections.items()}

    def restore(self, state: LearnedState) -> None:
        """Replace all corrections."""
        if not self._by_owner and set(state) - {""}:
            raise DamagedStateError("it has owners")
        found = {}
        for name, arrays in state.items():
            found[name] = self._empty()
            found[name].restore(arrays)
        self._corrections = found
        self.version += 1

    def forget(self) -> None:
        """Drop all corrections."""
        self._corrections = {}
        self._all = Comparison()
        self.version += 1

    @property
    def stats(self) -> LearnedStats:
        """Return counts of rows, sizes, and running acceptance."""
        corrections = tuple(self._corrections.values())
        base, learned = self._all.shares or (None, None)
        return LearnedStats(
            self.name,
            tokens=self._num_rows,
            size=sum(correction.num_bytes // 8 for correction in corrections),
            num_bytes=sum(correction.num_bytes for correction in corrections),
            scopes=len(corrections),
            base_acceptance=base,
            learned_acceptance=learned,
            active=sum(correction.comparison.is_better for correction in corrections),
            seconds=self.pace.spent,
        )
