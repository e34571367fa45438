"""Counts what followed the last tokens before, here and in earlier answers, and drafts the likeliest ways on.

All earlier places that end like the text vote for what comes, the longer the match the more; the tree of the likeliest
continuations is grown best first and stops where they get unlikely. Answers that were finished stay in memory, so
that what is written again and again is copied from the first token on. Any verifier that reads no draft distributions
may follow; what is remembered changes how fast a text comes, never the text.

Source: SuffixDecoding, arXiv 2411.04975 (a tree of the request and one of earlier outputs, greedy growth by counts),
with hash chains in the place of suffix trees: 20 bytes a token instead of hundreds, and nothing to rebuild. Of each
run length only the latest places are counted. Costs a tenth or two of a millisecond a draft. Pays where texts repeat
themselves or each other; loses little elsewhere, since it drafts little there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from draftree.core.errors import ConfigurationError
from draftree.drafters.base import DraftContext, SequenceView
from draftree.drafters.lookup.counting import LONGEST, CountedText, CountingDrafter, Match, require_tree
from draftree.drafters.lookup.occurrences import Occurrences

LONG_RUN = 8
"""Length of the runs by which long matches are found behind many short ones."""
PLACES = 32
"""Places of each run length that are counted, the latest."""
EARLIER_WEIGHT = 0.25
"""What a place in another text counts beside one in this text."""


@dataclass(slots=True)
class SuffixState(CountedText):
    """A sequence and the index of its tokens, which follows it."""

    own: Occurrences


@final
class SuffixDrafter(CountingDrafter[SuffixState]):
    """Looks in this text and in earlier answers."""

    @dataclass(frozen=True, slots=True)
    class Config:
        """`min` and `max`: length of a match; `k`: levels at most; `nodes`: nodes of a tree at most.

        `width`: children of a node at most, 1 for a chain; `floor`: nodes that are less likely to survive are left
        out; `memory`: tokens of earlier answers that are kept, the oldest answers go first; 0 keeps none.
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
        self._earlier = self._empty_memory()

    def _empty_memory(self) -> Occurrences | None:
        return Occurrences(self._orders, capacity=self._config.memory) if self._config.memory else None

    def forget(self) -> None:
        """Drop the earlier answers."""
        self._earlier = self._empty_memory()

    def open(self, sequence: SequenceView) -> SuffixState:
        """An index of the prompt."""
        own = Occurrences(self._orders, room=len(sequence.history) + 512)
        own.extend(sequence.history.tokens)
        return SuffixState(sequence, own)

    def _voters(self, state: SuffixState, depth: int) -> list[Match]:
        tokens = state.view.history.tokens
        state.own.extend(tokens[len(state.own) :])
        tail = tokens[-self._config.max :]
        voters = _places(state.own, tail, depth, is_own=True)
        if self._earlier is not None:
            voters += _places(self._earlier, tail, depth, is_own=False)
        return voters

    def close(self, state: SuffixState) -> None:
        """The answer joins the memory, with the end of its prompt, behind which it may be asked for again."""
        history = state.view.history
        if self._earlier is not None and history.num_output_tokens:
            start = max(0, history.prompt_length - self._config.max)
            self._earlier.add_text(history.tokens[start:])


def _places(index: Occurrences, tail: np.ndarray, depth: int, *, is_own: bool) -> list[Match]:
    matches = index.find(tail, depth=depth, limit=PLACES, is_own=is_own)
    weight = 1.0 if is_own else EARLIER_WEIGHT
    rows = zip(matches.lengths.tolist(), matches.followers.tolist(), strict=True)
    return [Match(length, followers, weight) for length, followers in rows]
