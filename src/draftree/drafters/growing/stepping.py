"""Keeping a stepped model in step with the texts: what its slots have read, and what they read next.

The model's slot of a sequence holds a committed prefix of the history. It lags behind: it has not seen the
bonus, nor the last level that was drafted, whose logits were not needed. A model with a shorter context than the
history sees the first token and a window of the last ones; when the window has run full it starts again from its
younger half, so that a token is read twice on average.

Of a reading in tokens of the model's own the last ones may change when the text goes on; the slot's prefix is then cut
back to what still stands.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar, final

from draftree.core.tree import TokenTree, follow
from draftree.drafters.base import SequenceView
from draftree.drafters.growing.readers import Reader, Reading
from draftree.models.base import Commit, Extend, LanguageModel, Pass, Slot
from draftree.sampling.logits import Logits

PREFILL_ROWS = 512
"""Tokens of one sequence that one pass reads at most."""


@dataclass(slots=True)
class SteppedSequence:
    """What a stepped model knows of a sequence. Mutated by `ModelStepper` and `Growth` only."""

    view: SequenceView
    slot: Slot
    reading: Reading
    covered: int = 0
    """Tokens of the reading up to which the slot's prefix reaches."""
    fed: dict[int, int] = field(default_factory=dict)
    """Nodes of the last tree that were fed to the model: tree index to tentative index."""
    fed_tokens: list[int] = field(default_factory=list)
    """What the model read for them, by tentative index."""


class Stepped(Protocol):
    """What a stepper knows of a sequence."""

    view: SequenceView
    fed: dict[int, int]
    """Nodes of the last tree that the model has read: tree index to the index that `feed` takes for a parent."""


StateT = TypeVar("StateT", bound=Stepped)


class Stepper(ABC, Generic[StateT]):
    """Lets a model read texts, and trees behind them."""

    model: LanguageModel
    max_depth: int
    """Levels that always fit."""

    @abstractmethod
    def reserve(self, num_sequences: int, length: int) -> None:
        """Make room for so many sequences of so many tokens, tentative ones included."""

    @abstractmethod
    def open(self, view: SequenceView) -> StateT:
        """State for a new sequence."""

    @abstractmethod
    def close(self, state: StateT) -> None:
        """Give back what the sequence held."""

    def is_ready(self, state: StateT) -> bool:
        """Whether the text is read soon enough that a tree behind it can pay."""
        return True

    @abstractmethod
    def catch_up(self, states: Sequence[StateT], ahead: Sequence[int]) -> Logits:
        """Feed every sequence what has not been read of its text; logits behind it, one row a sequence.

        Args:
            states: the sequences.
            ahead: for each how many positions a tree may need behind its last token.
        """

    @abstractmethod
    def feed(
        self, states: Sequence[StateT], tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]
    ) -> Logits:
        """One pass over new nodes of trees; their logits, one row a node.

        Args:
            states: the sequences.
            tokens: for each the new nodes' tokens, in the tree's vocabulary.
            parents: for each their parents, counted as they were fed; or -1 for the text's last token.
        """

    @abstractmethod
    def keep(self, states: Sequence[StateT], paths: Sequence[Sequence[int]]) -> None:
        """Keep what was accepted of what was fed; the histories already hold the written tokens.

        Args:
            states: the sequences.
            paths: for each the accepted nodes, in order from the root down.
        """

    @abstractmethod
    def follow(self, states: Sequence[StateT], trees: Sequence[TokenTree]) -> None:
        """As `keep`, for trees in the model's own tokens, whose verdict the text alone tells."""


@final
class ModelStepper(Stepper[SteppedSequence]):
    """Feeds histories to a model of its own, which has a slot for every sequence.

    Args:
        model: the model that is stepped.
        reader: in which tokens it reads and answers.
    """

    def __init__(self, model: LanguageModel, reader: Reader) -> None:
        self.model = model
        self._reader = reader
        self._window = model.max_length // 2
        # behind a fresh window
        self.max_depth = max(1, model.max_length - self._window - 2)

    def reserve(self, num_sequences: int, length: int) -> None:
        """Make room for so many sequences of so many tokens, tentative ones included."""
        self.model.reserve(num_sequences, length)

    def open(self, view: SequenceView) -> SteppedSequence:
        """State for a new sequence."""
        return SteppedSequence(view, self.model.open(), self._reader.open(view))

    def close(self, state: SteppedSequence) -> None:
        """Free the slot."""
        self.model.close(state.slot)

    def feed(
        self, states: Sequence[SteppedSequence], tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]
    ) -> Logits:
        """One pass over new nodes of trees."""
        read = [self._reader.read(row) for row in tokens]
        for state, row in zip(states, read, strict=True):
            state.fed_tokens.extend(row)
        return self._extend([Extend(s.slot, *nodes) for s, *nodes in zip(states, read, parents, strict=True)])

    def _extend(self, jobs: Sequence[Extend]) -> Logits:
        return self._reader.answer(self.model.run(Pass(jobs)).logits)

    def catch_up(self, states: Sequence[SteppedSequence], ahead: Sequence[int]) -> Logits:
        """Feed every sequence what its slot has not seen."""
        pending = [self._pending(state, count) for state, count in zip(states, ahead, strict=True)]
        while any(len(tokens) > PREFILL_ROWS for tokens in pending):
            long = [i for i, tokens in enumerate(pending) if len(tokens) > PREFILL_ROWS]
            self._read([states[i] for i in long], [pending[i][:PREFILL_ROWS] for i in long], wants_logits=False)
            for i in long:
                pending[i] = pending[i][PREFILL_ROWS:]
        logits = self._read(states, pending, wants_logits=True)
        for state in states:
            state.covered = len(state.reading)
        return logits

    def _pending(self, state: SteppedSequence, ahead: int) -> list[int]:
        self._advance(state)
        reading = state.reading
        if state.covered == len(reading):
            # what was written says nothing to this model: the last token is read again, for the logits behind it
            self._cut(state, state.covered - 1)
        unseen = len(reading) - state.covered
        if state.slot.length + unseen + min(ahead, self.max_depth) <= self.model.max_length:
            return reading.tokens(state.covered)
        self.model.close(state.slot)
        state.slot = self.model.open()
        # the first token is kept in sight: models lean on it, and many have never been without
        return reading.tokens(0, 1) + reading.tokens(-self._window)

    def _advance(self, state: SteppedSequence) -> None:
        stands = state.reading.advance()
        if stands < state.covered:
            self._cut(state, stands)

    def _cut(self, state: SteppedSequence, stands: int) -> None:
        """Give up what the slot has read behind the first `stands` tokens, and the tree."""
        # a slot whose window has moved on may hold less than is to go
        left = max(0, state.slot.length - (state.covered - stands))
        self.model.truncate(state.slot, left)
        state.covered = stands if left else 0
        state.fed.clear()
        state.fed_tokens.clear()

    def _read(self, states: Sequence[SteppedSequence], tokens: Sequence[list[int]], *, wants_logits: bool) -> Logits:
        jobs = [
            Extend(state.slot, row, range(-1, len(row) - 1), logits_at=[len(row) - 1] if wants_logits else ())
            for state, row in zip(states, tokens, strict=True)
        ]
        logits = self._extend(jobs)
        self.model.apply([Commit(state.slot, range(len(row))) for state, row in zip(states, tokens, strict=True)])
        return logits

    def keep(self, states: Sequence[SteppedSequence], paths: Sequence[Sequence[int]]) -> None:
        """Keep what was accepted of what was fed; who drafted nothing reads the text when it is to draft again."""
        for state in states:
            if state.fed:
                self._advance(state)
        touched = [(state, path) for state, path in zip(states, paths, strict=True) if state.fed]
        if not touched:
            return
        kept = [self._read_alike(state, [state.fed[n] for n in path if n in state.fed]) for state, path in touched]
        self.model.apply([Commit(state.slot, nodes) for (state, _), nodes in zip(touched, kept, strict=True)])
        for (state, _), nodes in zip(touched, kept, strict=True):
            state.covered += len(nodes)
            state.fed.clear()
            state.fed_tokens.clear()

    def _read_alike(self, state: SteppedSequence, nodes: Sequence[int]) -> list[int]:
        """The first nodes that were read as the text is read now."""
        tokens = state.reading.tokens(state.covered, state.covered + len(nodes))
        pairs = zip(nodes, tokens, strict=False)
        return [node for node, _ in itertools.takewhile(lambda pair: state.fed_tokens[pair[0]] == pair[1], pairs)]

    def follow(self, states: Sequence[SteppedSequence], trees: Sequence[TokenTree]) -> None:
        """As `keep`, for trees in the model's own tokens, whose verdict the text alone tells."""
        touched = [(state, tree) for state, tree in zip(states, trees, strict=True) if state.fed]
        for state, _ in touched:
            self._advance(state)
        paths = [follow(tree, state.reading.tokens(state.covered)) for state, tree in touched]
        self.keep([state for state, _ in touched], paths)
