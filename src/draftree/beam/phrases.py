"""How much of the required phrases a sequence contains: immutable states, one step per token."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import final

Phrase = tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class OrderedPhrases:
    """Phrases one after another, with any tokens between them.

    A token that breaks a phrase restarts this phrase; the `done` phrases before it stay met. The sequence ends with
    `place` tokens of the next phrase.
    """

    phrases: tuple[Phrase, ...]
    done: int = 0
    place: int = 0

    @property
    def is_met(self) -> bool:
        return self.done == len(self.phrases)

    @property
    def num_tokens(self) -> int:
        """Number of phrase tokens of the sequence, those of a phrase in progress included."""
        return sum(map(len, self.phrases[: self.done])) + self.place

    def next_tokens(self) -> list[int]:
        return [] if self.is_met else [self.phrases[self.done][self.place]]

    def advance(self, token: int) -> OrderedPhrases:
        if self.is_met:
            return self
        phrase = self.phrases[self.done]
        place = longest_end((*phrase[: self.place], token), phrase)
        if place == len(phrase):
            return OrderedPhrases(self.phrases, self.done + 1)
        return dataclasses.replace(self, place=place)


@final
@dataclass(frozen=True, slots=True)
class UnorderedPhrases:
    """Phrases in any order; one that is given k times must occur k times, without overlap with others.

    `met` is the number of tokens of phrases that are met, and `current` the tokens that the sequence ends with and that
    begin a missing phrase.
    """

    missing: tuple[Phrase, ...]
    met: int = 0
    current: Phrase = ()

    @property
    def is_met(self) -> bool:
        return not self._after_current.missing

    @property
    def _after_current(self) -> UnorderedPhrases:
        """The state if the current tokens are taken for a phrase that they complete."""
        return self._completed(self.current) if self.current in self.missing else self

    @property
    def num_tokens(self) -> int:
        """Number of phrase tokens of the sequence, those of a phrase in progress included."""
        return self.met + len(self.current)

    def _continues(self, tokens: Phrase) -> bool:
        """Whether a missing phrase begins with these tokens and is longer."""
        return any(len(phrase) > len(tokens) and phrase[: len(tokens)] == tokens for phrase in self.missing)

    def next_tokens(self) -> list[int]:
        """Return the tokens that continue the phrases in progress, and the first ones of all missing phrases."""
        size = len(self.current)
        going = {phrase[size] for phrase in self.missing if len(phrase) > size and phrase[:size] == self.current}
        return sorted(going | {phrase[0] for phrase in self._after_current.missing})

    def advance(self, token: int) -> UnorderedPhrases:
        """Return the state after a token. A phrase that begins a longer missing one is met when that is left."""
        longer = (*self.current, token)
        if not (longer in self.missing or self._continues(longer)):
            if size := max((n for n in range(1, len(longer)) if longer[:n] in self.missing), default=0):
                return functools.reduce(UnorderedPhrases.advance, longer[size:], self._completed(longer[:size]))
            place = max((longest_end(longer, phrase) for phrase in self.missing), default=0)
            longer = longer[len(longer) - place :]
        state = dataclasses.replace(self, current=longer)
        return state if state._continues(longer) else state._after_current

    def _completed(self, phrase: Phrase) -> UnorderedPhrases:
        place = self.missing.index(phrase)
        return UnorderedPhrases(self.missing[:place] + self.missing[place + 1 :], self.met + len(phrase))


def longest_end(tokens: Phrase, phrase: Phrase) -> int:
    """Return the length of the longest beginning of `phrase` that `tokens` end with."""
    sizes = range(min(len(tokens), len(phrase)), 0, -1)
    return next((size for size in sizes if tokens[len(tokens) - size :] == phrase[:size]), 0)


PhraseState = OrderedPhrases | UnorderedPhrases
