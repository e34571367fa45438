"""Keeping a stepped model in step with the texts: what its slots have read, and what they read next.

The model's slot of a sequence holds a committed prefix of the history. It lags behind: it has not seen the
bonus, nor the last level that was drafted, whose logits were not needed. A model with a shorter context than the
history sees the first token and a window of the last ones; when the window has run full it starts again from its
younger half, so that a token is read twice on average.

Prompts are read in the target's chunks, beside the target. A sequence whose text begins as another one's starts with
a copy of its slot. What a slot holds depends on the text alone, never on what was copied.

Of a reading in tokens of the model's own the last ones may change when the text goes on; the slot's prefix is then cut
back to what still stands.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from draftree.core.tree import TokenTree, follow
from draftree.drafters.base import SequenceView
from draftree.drafters.growing.readers import Reader, Reading
from draftree.drafters.growing.stepper import Stepper
from draftree.models.base import Commit, Extend, LanguageModel, Pass, Slot
from draftree.sampling.logits import Logits

PREFILL_ROWS = 512
"""Tokens of one sequence that one pass reads at most."""
IDLE_ROUNDS = 32
"""Rounds without a tree after which prompts are not read ahead: a planner that does not draft must not pay for it."""


@dataclass(slots=True)
class SteppedSequence:
    """What a stepped model knows of a sequence. Mutated by `ModelStepper` and `Growth` only."""

    view: SequenceView
    slot: Slot
    reading: Reading
    start: int = 0
    """The first token of the window that the slot holds behind the first token; 0 if it holds the whole beginning."""
    covered: int = 0
    """Tokens of the reading up to which the slot's prefix reaches."""
    fed: dict[int, int] = field(default_factory=dict)
    """Nodes of the last tree that were fed to the model: tree index to tentative index."""
    fed_tokens: list[int] = field(default_factory=list)
    """What the model read for them, by tentative index."""


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
        self._num_open = 0
        self._idle_rounds = 0
        """Rounds since a tree was last grown."""

    def reserve(self, num_sequences: int, length: int) -> None:
        """Make room for so many sequences of so many tokens, tentative ones included."""
        others = max(0, self.model.num_open - self._num_open)
        self.model.reserve(others + num_sequences, length)

    def open(self, view: SequenceView) -> SteppedSequence:
        """State for a new sequence."""
        state = SteppedSequence(view, self.model.open(), self._reader.open(view))
        self._num_open += 1
        return state

    def close(self, state: SteppedSequence) -> None:
        """Free the slot."""
        self.model.close(state.slot)
        self._num_open -= 1

    def fork(self, state: SteppedSequence, view: SequenceView) -> SteppedSequence:
        """Copy the slot as far as the texts read alike; open anew if that is nothing, or another window."""
        reading = self._reader.open(view)
        stands = self._common(state, reading)
        if not stands:
            return self.open(view)
        slot = self.model.fork(state.slot, state.slot.length - (state.covered - stands))
        self._num_open += 1
        return SteppedSequence(view, slot, reading, start=state.start, covered=stands)

    def detach(self, state: SteppedSequence) -> SteppedSequence | None:
        """Drop the tree, and keep what was read."""
        if not state.covered:
            self.close(state)
            return None
        self._cut(state, state.covered)
        return state

    def attach(self, state: SteppedSequence, view: SequenceView) -> SteppedSequence:
        """Cut the slot to where the texts read alike; open anew if that is nothing, or another window."""
        reading = self._reader.open(view)
        stands = self._common(state, reading)
        if not stands:
            self.close(state)
            return self.open(view)
        self._cut(state, stands)
        state.view, state.reading = view, reading
        return state

    def _common(self, state: SteppedSequence, reading: Reading) -> int:
        """How many tokens of a new reading the slot can stand for; 0 if its window is not the one of the new text."""
        reading.advance()
        if state.start and state.start != len(reading) - self._window:
            return 0
        pairs = zip(state.reading.tokens(0, state.covered), reading.tokens(0), strict=False)
        stands = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        return stands if stands > state.start else 0

    def check_integrity(self, states: Sequence[SteppedSequence]) -> None:
        """Every state has a slot of its own, which holds no more than it says."""
        self.model.check_integrity()
        assert len({id(state.slot) for state in states}) == len(states), "a slot has one owner"
        assert len(states) <= self._num_open, "every state is open"
        for state in states:
            held = state.covered - state.start + bool(state.start)
            assert state.slot.length == held, "a slot holds the first token and the window, or the beginning"
            assert state.slot.num_tentative == len(state.fed_tokens), "every tentative node is noted"

    def read(self, states: Sequence[SteppedSequence], counts: Sequence[int]) -> None:
        """Read as large a share of each prompt as the target has; nothing while no tree is asked for."""
        if self._idle_rounds > IDLE_ROUNDS:
            return
        unread = [self._next_of_prompt(state, count) for state, count in zip(states, counts, strict=True)]
        going = [(state, tokens) for state, tokens in zip(states, unread, strict=True) if tokens]
        if going:
            self._read([state for state, _ in going], [tokens for _, tokens in going], wants_logits=False)

    def _next_of_prompt(self, state: SteppedSequence, count: int) -> list[int]:
        """Tokens to read beside so many of the target's; the last one is read when a tree is asked for."""
        self._advance(state)
        whole, written = len(state.reading), len(state.view.history)
        share = -(-count * whole // written)
        if whole >= self.model.max_length and state.start != whole - self._window:
            return self._begin_window(state, whole, share=share)
        first, state.covered = state.covered, max(state.covered, min(state.covered + share, whole - 1))
        return state.reading.tokens(first, state.covered)

    def _begin_window(self, state: SteppedSequence, whole: int, *, share: int) -> list[int]:
        """The first tokens of a prompt's last window; none until the target has reached it."""
        slot, start = state.view.slot, whole - self._window
        reached = 0 if slot is None else slot.length * whole // len(state.view.history)
        if reached <= start:
            return []
        self._cut(state, 0)
        state.start, state.covered = start, min(reached, start + share, whole - 1)
        return state.reading.tokens(0, 1) + state.reading.tokens(start, state.covered)

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
        self._idle_rounds = 0
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
        state.start = max(0, len(reading) - self._window)
        # the first token is kept in sight: models lean on it, and many have never been without
        return reading.tokens(0, 1) + reading.tokens(-self._window)

    def _advance(self, state: SteppedSequence) -> None:
        stands = state.reading.advance()
        if stands < state.covered:
            self._cut(state, stands)

    def _cut(self, state: SteppedSequence, stands: int) -> None:
        """Drop what the slot has read after the first `stands` tokens, and the tree."""
        if stands <= state.start:
            # nothing is left of the window
            stands = state.start = left = 0
        else:
            left = state.slot.length - (state.covered - stands)
        self.model.truncate(state.slot, left)
        state.covered = stands
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
        self._idle_rounds += 1
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
