"""Slots of finished sequences, kept for prompts with the same beginning, and the drafter's states beside them.

A system prompt, a continued conversation, the n sequences of one request: tokens that the target has read are copied or
taken over instead of read again. Only the start of a sequence depends on what is cached, never its text.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from draftree.core.errors import is_out_of_memory
from draftree.drafters.base import Drafter, SequenceView
from draftree.models.base import LanguageModel, Slot
from draftree.models.source import Source

logger = logging.getLogger(__name__)


@final
class DraftStates:
    """Opens, copies, hands over and closes states; does nothing, with None as every state, without a drafter.

    Args:
        drafter: whose states they are.
    """

    def __init__(self, drafter: Drafter[Any] | None) -> None:
        self._drafter = drafter

    def reserve(self, count: int, length: int) -> None:
        """Make room for so many states of texts of so many tokens."""
        if self._drafter is not None:
            self._drafter.reserve(count, length)

    def open(self, view: SequenceView) -> Any:
        """State for a new sequence."""
        return None if self._drafter is None else self._drafter.open(view)

    def fork(self, state: Any, view: SequenceView, length: int) -> Any:
        """State for a new sequence whose first `length` tokens are those of another; opened anew from None."""
        if self._drafter is None or state is None:
            return self.open(view)
        return self._drafter.fork(state, view, length)

    def attach(self, state: Any, view: SequenceView, length: int) -> Any:
        """As `fork`, from the state of a cached prefix that is not kept any longer."""
        if self._drafter is None or state is None:
            return self.open(view)
        return self._drafter.attach(state, view, length)

    def detach(self, state: Any, length: int) -> Any:
        """The state of a finished sequence, for a cached prefix of so many tokens; None if nothing of it is kept."""
        if self._drafter is None or state is None:
            return None
        try:
            return self._drafter.detach(state, length)
        except Exception as error:
            # a drafter cannot change the text, and must not stop other sequences
            _log("the drafter could not keep a state with its cached prefix", error)
            return None

    def close(self, state: Any) -> None:
        """Close a state."""
        if self._drafter is None or state is None:
            return
        try:
            self._drafter.close(state)
        except Exception as error:
            # as above
            _log("the drafter could not close a state", error)

    def check_integrity(self, states: Sequence[Any]) -> None:
        """Raise AssertionError if a state has two owners, or the drafter's bookkeeping contradicts itself."""
        held = [state for state in states if state is not None]
        assert self._drafter is not None or not held, "states belong to a drafter"
        if self._drafter is not None:
            self._drafter.check_integrity(held)


def _log(text: str, error: Exception) -> None:
    """Log what failed; a lack of memory is reported by the request that it ends, and has no traceback."""
    if is_out_of_memory(error):
        logger.info("%s: there is not enough memory", text)
    else:
        logger.error(text, exc_info=error)


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


class PrefixCache:
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
        for old in [old for old in alike if common_length(old.tokens, new.tokens) == len(old.tokens)]:
            self._close(old)  # all that it holds the new one holds as well
        self.kept.append(new)
        self.evict(len(self.kept) - self.limit)

    def find(self, prompt: np.ndarray, source: Source | None = None) -> tuple[CachedPrefix | None, int]:
        """The kept slot with this source and the longest common beginning, the latest of equals, and how long it is."""
        best, length = None, 0
        for kept in self.kept:
            if kept.source != source:
                continue
            shared = common_length(kept.tokens, prompt)
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


def common_length(first: np.ndarray, second: np.ndarray) -> int:
    """Length of the common beginning."""
    length = min(len(first), len(second))
    differ = np.flatnonzero(first[:length] != second[:length])
    return int(differ[0]) if len(differ) else length
