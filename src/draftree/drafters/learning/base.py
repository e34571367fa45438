"""Interface of what learns from verified texts, and its statistics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

__all__ = ["DamagedStateError", "LearnedState", "LearnedStats", "Learner"]


class DamagedStateError(ValueError):
    """A stored state cannot be used."""


@dataclass(frozen=True, slots=True)
class LearnedStats:
    """Statistics of one learner.

    Attributes:
        name: `suffix` or `head`.
        texts: number of learned texts since the start; 0 for a head.
        tokens: number of learned tokens since the start; for a head, verified tokens that it was updated with.
        size: number of tokens in tables, or of learned numbers of a head.
        num_bytes: memory in bytes.
        scopes: number of owners with a state of their own; 1 in scope `server`.
        base_acceptance: running share of first draft tokens that the target picks, without what was learned; None for
            tables and before the first comparison.
        learned_acceptance: the same with what was learned, on the same rows.
        active: number of owners whose drafts use what was learned.
        seconds: time of learning since the start.
    """

    name: str
    texts: int = 0
    tokens: int = 0
    size: int = 0
    num_bytes: int = 0
    scopes: int = 0
    base_acceptance: float | None = None
    learned_acceptance: float | None = None
    active: int = 0
    seconds: float = 0.0


LearnedState = Mapping[str, Mapping[str, np.ndarray]]
"""Named arrays of every owner; the owner of scope `server` is the empty name."""


class Learner(ABC):
    """Learned state of a drafter.

    `state`, `restore` and `forget` are called with the lock of the store held; implementations change their state with
    the lock held too.
    """

    name: str
    identity: str
    """Checksum of the object that the state belongs to, such as a vocabulary or a head; hexadecimal digits."""
    version: int = 0
    """Number of changes so far."""

    @abstractmethod
    def state(self) -> LearnedState:
        """Return copies of what is learned; empty if nothing is."""

    @abstractmethod
    def restore(self, state: LearnedState) -> None:
        """Replace what is learned.

        Raises:
            DamagedStateError: the state cannot be used; nothing has changed.
        """

    @abstractmethod
    def forget(self) -> None:
        """Drop what is learned."""

    @property
    @abstractmethod
    def stats(self) -> LearnedStats:
        """Return statistics; from any thread."""
