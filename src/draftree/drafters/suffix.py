"""Suffix decoding: drafts the most frequent continuations of the last tokens in this text and in earlier answers.

Every earlier occurrence of the last tokens votes for its continuation, with a weight that grows with the length of the
match. The tree of the most likely continuations is grown best first and stops at unlikely ones. Finished answers stay
in memory, so repeated texts are copied from their first token. Any verifier that needs no draft distributions can be
used; memory affects speed, never the text.

Source: SuffixDecoding, arXiv 2411.04975 (a tree of the request and one of earlier outputs, greedy growth by counts),
with hash chains in place of suffix trees: 20 bytes per token instead of hundreds, and no rebuilds. Only the latest
occurrences of each match length are counted. Costs 0.1 to 0.2 ms per draft. Gains if texts repeat themselves or each
other; loses little otherwise, because it drafts little.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import final

import numpy as np

from draftree.core.errors import ConfigurationError
from draftree.drafters.base import DraftContext, DraftTraits, SequenceView
from draftree.drafters.learning.store import DamagedStateError, LearnedState, LearnedStats, LearningStore, OwnedLearner
from draftree.drafters.lookup.counting import LONGEST, CountedText, CountingDrafter, require_tree
from draftree.drafters.lookup.occurrences import KEPT_SHARE, SEPARATOR, Match, Occurrences

MAX_OWNERS = 256
"""Maximum number of owners; the table of the one that was not used for the longest time is dropped first."""
FIRST_ROOM = 4096
"""Initial allocation of an owner's table in tokens."""
TOKENS = "tokens"


@final
class TextTables(OwnedLearner[Occurrences]):
    """Tables of texts, by owner.

    All tables together hold at most `memory` tokens. If they grow beyond, the largest one drops its oldest texts.
    """

    name = "suffix"

    def __init__(
        self, orders: tuple[int, ...], *, memory: int, vocab_size: int, store: LearningStore | None = None
    ) -> None:
        super().__init__(f"{store.fingerprint if store else ''} {vocab_size} {orders}", store)
        self._memory = memory
        self._vocab_size = vocab_size
        room = min(FIRST_ROOM, memory) if self._by_owner else memory
        self._build = partial(Occurrences, orders, capacity=memory, room=room)
        self._texts = self._tokens = 0
        self._size = self._num_bytes = 0

    def add(self, owner: str | None, tokens: np.ndarray, *, num_new: int) -> None:
        """Add a text, with the end of its prompt before it, unless it has no owner."""
        if (name := self.named(owner)) is None:
            return
        with self._lock:
            self._used(name).add_text(tokens)
            self._texts += 1
            self._tokens += num_new
            self._changed()

    def _restored(self, arrays: Mapping[str, np.ndarray]) -> Occurrences:
        """Return a table with as many of the latest tokens as fit."""
        tokens = arrays.get(TOKENS)
        if tokens is None or tokens.ndim != 1 or tokens.dtype != np.int32 or not len(tokens):
            raise DamagedStateError("a table has no tokens")
        if tokens.min() < -1 or tokens.max() >= self._vocab_size or tokens[-1] != -1:
            raise DamagedStateError("a table has tokens outside of the vocabulary")
        table = self._build()
        table.restore(tokens)
        return table

    def _changed(self) -> None:
        """Hold the tables to the limits, and count their size."""
        while len(self._owned) > MAX_OWNERS:
            del self._owned[next(iter(self._owned))]
        while len(self._owned) > 1 and sum(map(len, self._owned.values())) > self._memory:
            owner, largest = max(self._owned.items(), key=lambda pair: len(pair[1]))
            largest.shrink(int(KEPT_SHARE * len(largest)))
            if not len(largest):
                del self._owned[owner]
        self._size = sum(map(len, self._owned.values()))
        self._num_bytes = sum(table.num_bytes for table in self._owned.values())
        super()._changed()

    def state(self) -> LearnedState:
        return {owner: {TOKENS: table.tokens.copy()} for owner, table in self._owned.items() if len(table)}

    @property
    def stats(self) -> LearnedStats:
        return LearnedStats(
            self.name,
            texts=self._texts,
            tokens=self._tokens,
            size=self._size,
            num_bytes=self._num_bytes,
            scopes=len(self._owned),
            active=len(self._owned),
        )


LONG_RUN = 8
"""Length of the indexed runs that find long matches among many short ones."""
PLACES = 32
"""Maximum number of occurrences per indexed length, the latest ones."""
EARLIER_WEIGHT = 0.25
"""Weight of an occurrence in another text relative to one in this text."""


@dataclass(slots=True)
class SuffixState(CountedText):
    """Sequence, and the index of its source, if it has one, and of its text with so many tokens before it."""

    own: Occurrences
    num_before: int = 0


@final
class SuffixDrafter(CountingDrafter[SuffixState]):
    """Drafter of continuations from this text and earlier answers."""

    @dataclass(frozen=True, slots=True)
    class Config:
        """`min` and `max`: limits of the length of a match; `k`, `nodes`: maximum number of levels, and of nodes.

        `width`: maximum number of children, 1 for a chain; `floor`: minimum estimated survival of a node; `memory`:
        maximum number of tokens of earlier answers, of which the oldest are dropped first; 0 keeps none.
        """

        min: int = 1
        max: int = 24
        k: int = 16
        nodes: int = 16
        width: int = 3
        floor: float = 0.2
        memory: int = 1_000_000

        def __post_init__(self) -> None:
            if not 1 <= self.min <= self.max <= LONGEST:
                raise ConfigurationError(
                    f"drafter 'suffix' has min={self.min} and max={self.max}: they must be from 1 to {LONGEST}, "
                    "max not below min"
                )
            require_tree("suffix", self)
            if self.memory < 0:
                raise ConfigurationError(
                    f"option memory of drafter 'suffix' is {self.memory}: it must be a number of tokens, or 0 for none"
                )

    def __init__(self, config: Config, context: DraftContext) -> None:
        super().__init__(config, context)
        self._orders = (config.min, max(config.min, LONG_RUN))
        self._earlier: TextTables | None = None
        if config.memory:
            store = context.learning
            vocab_size = context.target.vocab_size
            build = partial(TextTables, self._orders, memory=config.memory, vocab_size=vocab_size, store=store)
            key = ("suffix", self._orders, config.memory)
            self._earlier = build() if store is None else store.learner(key, build)

    @classmethod
    def describe(cls, config: Config) -> DraftTraits:
        return replace(super().describe(config), learns=bool(config.memory))

    def forget(self) -> None:
        if self._earlier is not None:
            self._earlier.forget()

    def open(self, sequence: SequenceView) -> SuffixState:
        # the last token before the source too: the first token of the text is drafted from the start of the source
        before = [int(sequence.history.tokens[-1]), *sequence.source, SEPARATOR] if sequence.source else []
        occurrences = Occurrences(self._orders, room=len(before) + len(sequence.history) + 512)
        occurrences.extend(np.array(before, dtype=np.int64))
        occurrences.extend(sequence.history.tokens)
        return SuffixState(sequence, occurrences, len(before))

    def _matches(self, state: SuffixState, depth: int) -> list[Match]:
        tokens = state.view.history.tokens
        state.own.extend(tokens[len(state.own) - state.num_before :])
        tail = tokens[-self._config.max :]
        earlier = None if self._earlier is None else self._earlier.find(state.view.owner)
        matches = state.own.find(tail, depth=depth, limit=PLACES, is_own=True)
        if earlier is not None:
            matches += earlier.find(tail, depth=depth, limit=PLACES, weight=EARLIER_WEIGHT)
        return matches

    def close(self, state: SuffixState) -> None:
        """Add the answer to the memory, with the end of its prompt as context."""
        history = state.view.history
        if self._earlier is not None and history.num_output_tokens:
            start = max(0, history.prompt_length - self._config.max)
            self._earlier.add(state.view.owner, history.tokens[start:], num_new=history.num_output_tokens)
