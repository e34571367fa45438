"""Tables of verified texts for the suffix drafter: one for all requests, or one for each owner, with bounded memory."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import final

import numpy as np

from draftree.drafters.learning.base import DamagedStateError, LearnedState, LearnedStats, Learner
from draftree.drafters.lookup.occurrences import KEPT_SHARE, Occurrences

__all__ = ["MAX_OWNERS", "TextTables"]

MAX_OWNERS = 256
"""Maximum number of owners; the table of the one that was not used for the longest time is dropped first."""
FIRST_ROOM = 4096
"""Initial allocation of an owner's table in tokens."""
TOKENS = "tokens"


@final
class TextTables(Learner):
    """Tables of texts, by owner.

    All tables together hold at most `memory` tokens. If they grow beyond, the largest one drops its oldest texts.

    Args:
        orders: lengths of indexed runs.
        memory: maximum number of tokens.
        vocab_size: number of tokens of the vocabulary.
        identity: identity of the vocabulary and its target.
        by_owner: whether each owner has a table.
        lock: held while a table changes; None without a store.
    """

    name = "suffix"

    def __init__(
        self,
        orders: tuple[int, ...],
        *,
        memory: int,
        vocab_size: int,
        identity: str = "",
        by_owner: bool = False,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        parts = f"{identity} {vocab_size} {orders}"
        self.identity = hashlib.sha256(parts.encode()).hexdigest()[:16]
        self._orders, self._memory, self._vocab_size = orders, memory, vocab_size
        self._by_owner = by_owner
        self._lock: AbstractContextManager[object] = nullcontext() if lock is None else lock
        # ordered by use, the latest last
        self._tables: dict[str, Occurrences] = {}
        self._texts = self._tokens = 0
        self._size = self._num_bytes = 0

    def find(self, owner: str | None) -> Occurrences | None:
        """Return the table that an owner's drafts read; None if there is none yet, or for no owner."""
        return None if owner is None else self._tables.get(owner if self._by_owner else "")

    def add(self, owner: str | None, tokens: np.ndarray, *, num_new: int) -> None:
        """Add a text.

        Args:
            owner: owner of the text; None to leave it out.
            tokens: the text, with the end of its prompt before it.
            num_new: number of verified tokens among them.
        """
        if owner is None:
            return
        owner = owner if self._by_owner else ""
        with self._lock:
            table = self._tables.pop(owner, None)
            table = self._tables[owner] = self._empty() if table is None else table
            table.add_text(tokens)
            self._texts += 1
            self._tokens += num_new
            self._bound()
            self._count()

    def _empty(self) -> Occurrences:
        room = FIRST_ROOM if self._by_owner else self._memory
        return Occurrences(self._orders, capacity=self._memory, room=min(room, self._memory))

    def _bound(self) -> None:
        while len(self._tables) > MAX_OWNERS:
            del self._tables[next(iter(self._tables))]
        while len(self._tables) > 1 and sum(map(len, self._tables.values())) > self._memory:
            owner, largest = max(self._tables.items(), key=lambda pair: len(pair[1]))
            largest.shrink(int(KEPT_SHARE * len(largest)))
            if not len(largest):
                del self._tables[owner]

    def _count(self) -> None:
        self.version += 1
        self._size = sum(map(len, self._tables.values()))
        self._num_bytes = sum(table.num_bytes for table in self._tables.values())

    def state(self) -> LearnedState:
        """Return the tokens of every table, with separators after the texts."""
        return {owner: {TOKENS: table.tokens.copy()} for owner, table in self._tables.items() if len(table)}

    def restore(self, state: LearnedState) -> None:
        """Replace all tables; as many of the latest tokens as fit are kept."""
        if not self._by_owner and set(state) - {""}:
            raise DamagedStateError("it has owners")
        tables = {}
        for owner, arrays in state.items():
            table = self._empty()
            table.restore(self._checked(arrays))
            tables[owner] = table
        self._tables = tables
        self._bound()
        self._count()

    def _checked(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        tokens = arrays.get(TOKENS)
        if tokens is None or tokens.ndim != 1 or tokens.dtype != np.int32 or not len(tokens):
            raise DamagedStateError("a table has no tokens")
        if tokens.min() < -1 or tokens.max() >= self._vocab_size or tokens[-1] != -1:
            raise DamagedStateError("a table has tokens outside of the vocabulary")
        return tokens

    def forget(self) -> None:
        """Drop all tables."""
        self._tables.clear()
        self._count()

    @property
    def stats(self) -> LearnedStats:
        """Return counts of texts and tokens, and sizes."""
        return LearnedStats(
            self.name,
            texts=self._texts,
            tokens=self._tokens,
            size=self._size,
            num_bytes=self._num_bytes,
            scopes=len(self._tables),
            active=len(self._tables),
        )
