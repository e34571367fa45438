"""States of lexical constraints: how much of the required phrases a text contains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

Phrase = tuple[int, ...]


class PhraseState(ABC):
    """Immutable state of one text."""

    __slots__ = ()

    @property
    @abstractmethod
    def is_met(self) -> bool:
        """Whether the text contains all phrases."""

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Number of phrase tokens that the text contains, those of a phrase in progress included."""

    @abstractmethod
    def next_tokens(self) -> list[int]:
        """Return the tokens that would continue or begin a phrase, ascending."""

    @abstractmethod
    def advance(self, token: int) -> PhraseState:
        """Return the state after a token."""


@final
@dataclass(frozen=True, slots=True)
class OrderedPhrases(PhraseState):
    """Phrases one after another, with any tokens between them.

    A token that breaks a phrase restarts this phrase; phrases before it stay met.

    Attributes:
        phrases: what is required.
        done: number of phrases that are met.
        place: tokens of the next phrase that the text ends with.
    """

    phrases: tuple[Phrase, ...]
    done: int = 0
    place: int = 0

    @staticmethod
    def root(phrases: Sequence[Phrase]) -> OrderedPhrases:
        """Return the state of an empty text."""
        return OrderedPhrases(tuple(phrases))

    @property
    def is_met(self) -> bool:
        """Whether the last phrase is met."""
        return self.done == len(self.phrases)

    @property
    def num_tokens(self) -> int:
        """Tokens of the phrases that are met, and of the one in progress."""
        return sum(map(len, self.phrases[: self.done])) + self.place

    def next_tokens(self) -> list[int]:
        """Return the next token of the phrase in progress."""
        return [] if self.is_met else [self.phrases[self.done][self.place]]

    def advance(self, token: int) -> OrderedPhrases:
        """Return the state after a token."""
        if self.is_met:
            return self
        phrase = self.phrases[self.done]
        place = longest_end((*phrase[: self.place], token), phrase)
        if place == len(phrase):
            return OrderedPhrases(self.phrases, self.done + 1, 0)
        return OrderedPhrases(self.phrases, self.done, place)


@final
@dataclass(frozen=True, slots=True)
class UnorderedPhrases(PhraseState):
    """Phrases in any order; one that is given k times must occur k times, without overlap with others.

    Attributes:
        missing: phrases that are not met, with their counts, sorted.
        met: tokens of the phrases that are met.
        current: tokens that the text ends with and that begin a missing phrase.
    """

    missing: tuple[tuple[Phrase, int], ...]
    met: int = 0
    current: Phrase = ()

    @staticmethod
    def root(phrases: Sequence[Phrase]) -> UnorderedPhrases:
        """Return the state of an empty text."""
        return UnorderedPhrases(tuple(sorted(Counter(phrases).items())))

    @property
    def is_met(self) -> bool:
        """Whether no phrase is missing."""
        return not self._after_current.missing

    @property
    def _after_current(self) -> UnorderedPhrases:
        """The state if the current tokens are taken for a phrase that they complete."""
        return self._completed(self.current) if any(self.current == phrase for phrase, _ in self.missing) else self

    @property
    def num_tokens(self) -> int:
        """Tokens of the phrases that are met, and of the one in progress."""
        return self.met + len(self.current)

    def next_tokens(self) -> list[int]:
        """Return the tokens that continue the phrases in progress, and the first ones of all missing phrases."""
        size = len(self.current)
        going = {phrase[size] for phrase, _ in self.missing if len(phrase) > size and phrase[:size] == self.current}
        return sorted(going | {phrase[0] for phrase, _ in self._after_current.missing})

    def advance(self, token: int) -> UnorderedPhrases:
        """Return the state after a token. A phrase that begins a longer missing one is met when that is left."""
        longer = (*self.current, token)
        if any(phrase[: len(longer)] == longer for phrase, _ in self.missing):
            state = UnorderedPhrases(self.missing, self.met, longer)
        else:
            missing = {phrase for phrase, _ in self.missing}
            size = max((n for n in range(1, len(longer)) if longer[:n] in missing), default=0)
            if size:
                state = self._completed(longer[:size])
                for later in longer[size:]:
                    state = state.advance(later)
                return state
            place = max((longest_end(longer, phrase) for phrase in missing), default=0)
            state = UnorderedPhrases(self.missing, self.met, longer[len(longer) - place :])
        is_phrase = any(state.current == phrase for phrase, _ in state.missing)
        begins = any(
            len(phrase) > len(state.current) and phrase[: len(state.current)] == state.current
            for phrase, _ in state.missing
        )
        return state._completed(state.current) if is_phrase and not begins else state

    def _completed(self, phrase: Phrase) -> UnorderedPhrases:
        counts = dict(self.missing)
        counts[phrase] -= 1
        left = tuple((found, count) for found, count in self.missing if found != phrase or count > 1)
        left = tuple((found, counts[found]) for found, _ in left)
        return UnorderedPhrases(left, self.met + len(phrase))


def longest_end(tokens: Phrase, phrase: Phrase) -> int:
    """Return the length of the longest beginning of `phrase` that `tokens` end with."""
    for size in range(min(len(tokens), len(phrase)), 0, -1):
        if tokens[len(tokens) - size :] == phrase[:size]:
            return size
    return 0
