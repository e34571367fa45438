"""Slots of finished texts that are kept for a while, for prompts that begin as they do.

A system prompt, a conversation that goes on, the n texts of one request: what the target has read already is copied, or
taken over, and not read again. What a text is does not depend on it, only when it begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from draftree.engine.draft_states import DraftStates
from draftree.models.base import LanguageModel, Slot
from draftree.models.source import Source

MIN_SHARED = 16
"""Tokens that a beginning must have in common: fewer are read sooner than waited for."""


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """What was reused so far; raw counts.

    Attributes:
        sequences: sequences that began.
        hits: those of them that found a beginning of theirs.
        prompt_tokens: tokens of their prompts.
        cached_tokens: those of them that were not read but copied.
        kept: finished texts that are kept now.
        evicted: finished texts that were let go to make room.
    """

    sequences: int = 0
    hits: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    kept: int = 0
    evicted: int = 0


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """A slot, the tokens that it holds, and the drafter's state for them.

    Attributes:
        slot: of the target.
        tokens: token ids, shape (tokens,).
        draft_state: what the drafter has read of them; None if it keeps nothing.
        source: the source on which the slot was opened; None for causal models.
    """

    slot: Slot
    tokens: np.ndarray
    draft_state: Any = None
    source: Source | None = None


class Prefixes:
    """Kept slots, the least recently used first. Mutated by the engine only.

    Args:
        target: whose slots they are.
        limit: slots that are kept at most.
        drafts: states of the drafter.
    """

    def __init__(self, target: LanguageModel, limit: int, drafts: DraftStates) -> None:
        self._target = target
        self._drafts = drafts
        self.limit = limit
        self.kept: list[CachedPrefix] = []
        self.evicted = 0

    def keep(self, slot: Slot, tokens: np.ndarray, draft_state: Any, source: Source | None = None) -> None:
        """Keep slot and drafter state of a finished sequence, or close them if there is nothing in them to share."""
        if not self.limit or slot.length < MIN_SHARED:
            self._target.close(slot)
            self._drafts.close(draft_state)
            return
        self._target.truncate(slot, slot.length)
        kept_state = self._drafts.detach(draft_state, slot.length)
        new = CachedPrefix(slot, tokens[: slot.length].copy(), kept_state, source)
        alike = [old for old in self.kept if old.source == source]
        for old in [old for old in alike if common(old.tokens, new.tokens) == len(old.tokens)]:
            self._close(old)  # all that it holds the new one holds as well
        self.kept.append(new)
        self.evict(len(self.kept) - self.limit)

    def find(self, prompt: np.ndarray, source: Source | None = None) -> tuple[CachedPrefix | None, int]:
        """The kept slot with this source and the longest common beginning, the latest of equals, and how long it is."""
        best, length = None, 0
        for kept in self.kept:
            if kept.source != source:
                continue
            shared = common(kept.tokens, prompt)
            if shared >= max(1, length):
                best, length = kept, shared
        return best, length

    def use(self, kept: CachedPrefix) -> None:
        """Note that a slot was of use just now."""
        self.kept.remove(kept)
        self.kept.append(kept)

    def take(self, kept: CachedPrefix) -> Slot:
        """Hand a slot over; it is not kept any more."""
        self.kept.remove(kept)
        return kept.slot

    def evict(self, count: int) -> None:
        """Let so many go, the least recently used first."""
        for kept in self.kept[: max(0, count)]:
            self._close(kept)
            self.evicted += 1

    def clear(self) -> None:
        """Let all go."""
        for kept in list(self.kept):
            self._close(kept)

    def _close(self, kept: CachedPrefix) -> None:
        self.kept.remove(kept)
        self._target.close(kept.slot)
        self._drafts.close(kept.draft_state)

    def check_integrity(self, running: Sequence[Slot]) -> None:
        """Raise AssertionError if a slot is kept twice, is also written to, or holds other tokens than it says."""
        slots = [*running, *(kept.slot for kept in self.kept)]
        assert len({id(slot) for slot in slots}) == len(slots), "a slot has one owner"
        assert len(self.kept) <= self.limit, "kept slots are bounded"
        for kept in self.kept:
            assert kept.slot.length == len(kept.tokens), "a kept slot holds its tokens"
            assert kept.slot.num_tentative == 0, "and no tree"


def common(first: np.ndarray, second: np.ndarray) -> int:
    """Length of the common beginning."""
    length = min(len(first), len(second))
    differ = np.flatnonzero(first[:length] != second[:length])
    return int(differ[0]) if len(differ) else length
