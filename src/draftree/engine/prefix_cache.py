"""Slots of finished sequences, kept for prompts with the same beginning, and the drafter's states beside them.

A system prompt, a continued conversation, the n sequences of one request: tokens that the target has read are copied or
taken over instead of read again. Only the start of a sequence depends on what is cached, never its text.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from draftree.core.errors import is_out_of_memory
from draftree.drafters.base import SequenceView
from draftree.engine.parts import EngineParts
from draftree.engine.sequence import DraftState
from draftree.models.base import LanguageModel, Slot
from draftree.models.source import Source

logger = logging.getLogger(__name__)


@final
class DraftStates:
    """Opens, copies, hands over and closes drafter states; the state of plain decoding is None."""

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts

    def reserve(self, count: int, length: int) -> None:
        """Make room for so many states of texts of so many tokens, in every drafter."""
        for choice in self._parts.drafters:
            choice.drafter.reserve(count, length)

    def open(self, view: SequenceView) -> DraftState | None:
        choice = self._parts.choice(view.draft)
        return None if choice is None else DraftState(choice, choice.drafter.open(view))

    def fork(self, state: DraftState | None, view: SequenceView, length: int) -> DraftState | None:
        """State for a new sequence whose first `length` tokens are those of another; opened anew from None."""
        if state is None or state.choice is not self._parts.choice(view.draft):
            return self.open(view)
        return DraftState(state.choice, state.choice.drafter.fork(state.own, view, length))

    def attach(self, state: DraftState | None, view: SequenceView, length: int) -> DraftState | None:
        """As `fork`, from the state of a cached prefix that is not kept any longer."""
        if state is None or state.choice is not self._parts.choice(view.draft):
            self.close(state)
            return self.open(view)
        return DraftState(state.choice, state.choice.drafter.attach(state.own, view, length))

    def detach(self, state: DraftState | None, length: int) -> DraftState | None:
        """The state of a finished sequence, for a cached prefix of so many tokens; None if nothing of it is kept."""
        kept = None
        if state is not None:
            with _failures_logged("the drafter could not keep a state with its cached prefix"):
                kept = state.choice.drafter.detach(state.own, length)
        return None if kept is None or state is None else DraftState(state.choice, kept)

    def close(self, state: DraftState | None) -> None:
        if state is not None:
            with _failures_logged("the drafter could not close a state"):
                state.choice.drafter.close(state.own)

    def check_integrity(self, states: Sequence[DraftState | None]) -> None:
        """Raise AssertionError if a state has two owners, or a drafter's bookkeeping contradicts itself."""
        for choice in self._parts.drafters:
            choice.drafter.check_integrity([s.own for s in states if s is not None and s.choice is choice])


@contextlib.contextmanager
def _failures_logged(text: str) -> Iterator[None]:
    """Log an error: a drafter cannot change the text, and must not stop other sequences.

    A lack of memory is reported by the request that it ends, and has no traceback.
    """
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            logger.info("%s: there is not enough memory", text)
        else:
            logger.error(text, exc_info=error)


MIN_SHARED = 16  # tokens that a beginning must have in common: fewer are read sooner than waited for


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
    """A slot, the tokens that it holds, and the drafter's state for them."""

    slot: Slot  # of the target
    tokens: np.ndarray  # token ids, shape (tokens,)
    draft_state: DraftState | None = None  # what a drafter has read of them; None if it keeps nothing
    # the source on which the slot was opened, or the digest of its images; None if it depends on token ids alone
    key: Source | str | None = None


class PrefixCache:
    """Kept slots, the least recently used first. Mutated by the engine only."""

    def __init__(self, target: LanguageModel, limit: int, drafts: DraftStates) -> None:
        self._target = target
        self._drafts = drafts
        self.limit = limit
        self.kept: list[CachedPrefix] = []
        self.evicted = 0

    def keep(
        self, slot: Slot, tokens: np.ndarray, draft_state: DraftState | None, key: Source | str | None = None
    ) -> None:
        """Keep slot and drafter state of a finished sequence, or close them if there is nothing in them to share."""
        length = self._target.cut_length(slot, slot.length)  # less only after a pass that failed
        if not self.limit or length < MIN_SHARED:
            self._target.close(slot)
            self._drafts.close(draft_state)
            return
        self._target.truncate(slot, length)
        kept_state = self._drafts.detach(draft_state, slot.length)
        new = CachedPrefix(slot, tokens[: slot.length].copy(), kept_state, key)
        for old in list(self.kept):
            if old.key == key and self._shared(new, old.tokens) == len(old.tokens):
                self._close(old)  # all that it holds the new one holds as well
        self.kept.append(new)
        self.evict(len(self.kept) - self.limit)

    def find(self, prompt: np.ndarray, key: Source | str | None = None) -> tuple[CachedPrefix | None, int]:
        """The kept slot with this key and the longest common beginning, the latest of equals, and how long it is."""
        lengths = {index: self._shared(kept, prompt) for index, kept in enumerate(self.kept) if kept.key == key}
        index = max(reversed(lengths), key=lengths.__getitem__, default=0)
        length = lengths.get(index, 0)
        return (self.kept[index] if length else None), length

    def _shared(self, kept: CachedPrefix, tokens: np.ndarray) -> int:
        return self._target.cut_length(kept.slot, common_length(kept.tokens, tokens))

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
    length = min(len(first), len(second))
    differ = np.flatnonzero(first[:length] != second[:length])
    return int(differ[0]) if len(differ) else length
