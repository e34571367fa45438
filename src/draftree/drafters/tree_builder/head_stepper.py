"""Stepper for a head that reads the target's hidden states: rows of the text, and tentative rows of a tree.

The target's hidden states of a token are known after its pass, so the row of position t, which needs those of token
t - 1 and the token t, can be read as soon as both are there. Rows of the text are read before the next tree, or with
the prompt's chunks. Rows of drafted nodes use the head's own states; they are dropped after the round, and rows of
accepted tokens are read from the target's hidden states.

A slot holds rows of the text up to a window of the positions that the head was trained for. Rows whose hidden states
are unknown, such as those of a cached prefix whose state was closed, are left out.
"""

from __future__ import annotations

import bisect
import itertools
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar, final

import torch
from torch import Tensor

from draftree.core.tensors import joined, rows_of
from draftree.drafters.base import SequenceView
from draftree.drafters.tree_builder.builder import Stepper
from draftree.drafters.tree_builder.model_stepper import IDLE_ROUNDS, PREFILL_ROWS
from draftree.heads.passes import HeadPasses, RowJob
from draftree.models.kv.slots import KVSlot
from draftree.models.memory import Footprint
from draftree.sampling.history import History
from draftree.sampling.logits import Logits
from draftree.sampling.tree_search import FoundTree, TreeSearch, TreeWidths

MAX_UNREAD = 512
"""Maximum number of unread rows of a sequence that are kept while no trees are requested."""


@dataclass(frozen=True, slots=True)
class Unread:
    """Consecutive rows that were not read yet.

    Attributes:
        first: position of the first one.
        hidden: the target's hidden states before each, shape (rows, layers, hidden), or the states made from them,
            shape (rows, hidden).
    """

    first: int
    hidden: Tensor

    @property
    def end(self) -> int:
        """Position after the last row."""
        return self.first + len(self.hidden)

    def between(self, first: int, end: int) -> Unread | None:
        """Return the rows of these positions; None for no row."""
        if first <= self.first and end >= self.end and len(self.hidden):
            return self
        first, end = max(first, self.first), min(end, self.end)
        if first >= end:
            return None
        return Unread(first, self.hidden[first - self.first : end - self.first])


@dataclass(frozen=True, slots=True)
class Rows:
    """Unread rows that one pass can read.

    Attributes:
        positions: ascending.
        hidden: what is before them, as in `Unread`.
    """

    positions: list[int]
    hidden: Tensor

    @property
    def is_projected(self) -> bool:
        """Whether the states before the rows are made from hidden states of the target."""
        return self.hidden.dim() == 3


def first_rows(pieces: Sequence[Unread], end: int) -> Rows | None:
    """Return the first rows of one kind below a position, from as many pieces as possible; None for no row."""
    positions: list[int] = []
    parts: list[Tensor] = []
    for piece in pieces:
        part = piece.between(piece.first, end)
        if part is None or (parts and part.hidden.dim() != parts[0].dim()):
            break
        positions += range(part.first, part.end)
        parts.append(part.hidden)
    if not parts:
        return None
    return Rows(positions, joined(parts))


def drop_before(pieces: list[Unread], position: int) -> None:
    """Drop the rows before a position from ascending pieces, in place."""
    while pieces and pieces[0].first < position:
        rest = pieces[0].between(position, pieces[0].end)
        if rest is not None:
            pieces[0] = rest
            return
        del pieces[0]


def common_length(history: History, other: History) -> int:
    """Return the length of the common prefix of two texts."""
    length = min(len(history), len(other))
    differs = history.tokens[:length] != other.tokens[:length]
    return int(differs.argmax()) if differs.any() else length


@dataclass(slots=True, kw_only=True)
class FeatureSequence:
    """State of a sequence in a head. Mutated by its stepper and `TreeBuilder` only."""

    view: SequenceView
    positions: list[int] = field(default_factory=list)
    """Positions of the rows that the head keeps, ascending."""
    unread: list[Unread] = field(default_factory=list)
    """Rows after them, ascending."""
    fed: dict[int, int] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """Position after the last row that is read or can be read."""
        return self.unread[-1].end if self.unread else self.positions[-1] + 1 if self.positions else 0

    def check_order(self) -> None:
        """Raise AssertionError unless the rows are in order."""
        ends = [*self.positions, *(place for piece in self.unread for place in range(piece.first, piece.end))]
        assert all(a < b for a, b in itertools.pairwise(ends)), "positions ascend, unread ones come last"
        assert not ends or ends[0] > 0, "the first token has no row: nothing is before it"


FeatureState = TypeVar("FeatureState", bound=FeatureSequence)


class FeatureStepper(Stepper[FeatureState]):
    """Stepper for a head that reads hidden states of the target."""

    _idle_rounds = 0
    """Number of rounds since the last tree."""

    @abstractmethod
    def _read(self, states: Sequence[FeatureState], ends: Sequence[int]) -> None:
        """Read unread rows below these positions."""

    @abstractmethod
    def _drop_tree(self, state: FeatureState) -> None:
        """Drop the tree, and what depends on the text of the next one."""

    def detach(self, state: FeatureState) -> FeatureState | None:
        if not state.positions and not state.unread:
            self.close(state)
            return None
        self._drop_tree(state)
        return state

    def learn(self, states: Sequence[FeatureState], hidden: Sequence[Tensor | None]) -> None:
        """Note the target's hidden states of the tokens that its slots have just gained.

        Args:
            hidden: shape (tokens, layers, hidden) for each; None for no tokens.
        """
        for state, rows in zip(states, hidden, strict=True):
            if rows is None:
                continue
            slot = state.view.slot
            assert slot is not None, "hidden states come from a slot of the target"
            new = Unread(slot.length + 1 - len(rows), rows).between(max(1, state.end), slot.length + 1)
            if new is not None:
                state.unread.append(new)
                if self._idle_rounds > IDLE_ROUNDS:
                    drop_before(state.unread, new.end - MAX_UNREAD)

    def read(self, states: Sequence[FeatureState], counts: Sequence[int]) -> None:
        """Read rows of prompts along with the target; nothing while no trees are requested."""
        if self._idle_rounds <= IDLE_ROUNDS:
            # the row of the last token is read with the first tree, which needs its state
            self._read(states, [len(state.view.history) - 1 for state in states])


@dataclass(slots=True, kw_only=True)
class HeadedSequence(FeatureSequence):
    """State of a sequence in a head with a slot; `positions` are those of its prefix."""

    slot: KVSlot
    num_fed: int = 0
    """Tentative rows of the slot."""
    before: Tensor | None = None
    """States before the children of the text's last token and of each tentative row; None without a tree."""


@final
class HeadStepper(FeatureStepper[HeadedSequence]):
    """Stepper for a head that drafts level by level."""

    def __init__(self, passes: HeadPasses) -> None:
        self._passes = passes
        self.max_length = self.max_depth = passes.head.config.max_length
        self._block = max(1, self.max_length // 2)

    @property
    def footprint(self) -> Footprint:
        return self._passes.footprint

    def reserve(self, num_sequences: int, length: int) -> None:
        self._passes.pool.reserve(num_sequences, length)

    def open(self, view: SequenceView) -> HeadedSequence:
        return HeadedSequence(view=view, slot=self._passes.pool.open())

    def close(self, state: HeadedSequence) -> None:
        self._passes.pool.close(state.slot)

    def fork(self, state: HeadedSequence, view: SequenceView) -> HeadedSequence:
        """Copy the rows of the common prefix; rows depend on it only."""
        shared = common_length(state.view.history, view.history)
        count = bisect.bisect_left(state.positions, shared)
        unread = self._unread_of(state, shared)
        slot = self._passes.pool.fork(state.slot, count)
        return HeadedSequence(view=view, slot=slot, positions=state.positions[:count], unread=unread)

    def _drop_tree(self, state: HeadedSequence) -> None:
        self._cut(state, len(state.positions))

    def attach(self, state: HeadedSequence, view: SequenceView) -> HeadedSequence:
        shared = common_length(state.view.history, view.history)
        state.unread = self._unread_of(state, shared)
        self._cut(state, bisect.bisect_left(state.positions, shared))
        state.view = view
        return state

    def _unread_of(self, state: HeadedSequence, shared: int) -> list[Unread]:
        """Return unread rows up to that of the first token after a common prefix: its hidden states are before it."""
        row = bisect.bisect_left(state.positions, shared)
        if row < len(state.positions):
            if state.positions[row] > shared:
                return []
            return [Unread(shared, self._passes.before(state.slot, row))]
        pieces = (piece.between(0, shared + 1) for piece in state.unread)
        return [piece for piece in pieces if piece is not None]

    def _cut(self, state: HeadedSequence, count: int) -> None:
        """Drop the tree, and all rows after the first `count`."""
        if state.num_fed or count < len(state.positions):
            self._passes.pool.truncate(state.slot, count)
            del state.positions[count:]
        state.fed.clear()
        state.num_fed, state.before = 0, None

    def check_integrity(self, states: Sequence[HeadedSequence]) -> None:
        pool = self._passes.pool
        pool.check_integrity()
        assert len({id(state.slot) for state in states}) == len(states) <= pool.num_open, "a slot has one owner"
        for state in states:
            assert state.slot.length == len(state.positions), "every row of the prefix has a position"
            assert state.slot.num_tentative == state.num_fed, "every tentative row is counted"
            state.check_order()
            assert len(state.positions) <= 2 * self._block, "a slot holds a window"

    def is_ready(self, state: HeadedSequence) -> bool:
        return state.end == len(state.view.history)

    def catch_up(self, states: Sequence[HeadedSequence], ahead: Sequence[int]) -> Logits:
        jobs = self._last_jobs(states)
        result = self._passes.read(jobs)
        self.answered = rows_of(result.states, result.requested)
        before = self._passes.recycle(self.answered)
        for index, state in enumerate(states):
            state.before = before[index : index + 1]
        return result.logits

    def trees(
        self,
        states: Sequence[HeadedSequence],
        ahead: Sequence[int],
        shape: TreeWidths,
        searches: Sequence[TreeSearch],
    ) -> list[FoundTree] | None:
        """Read the unread rows of every sequence, and grow trees in the same call; no tentative rows are left."""
        counts = [max(1, sum(piece.end - piece.first for piece in state.unread)) for state in states]
        if not self._passes.grows(counts, shape, searches):
            return None
        return self._passes.read_and_grow(self._last_jobs(states), shape, searches)

    def _last_jobs(self, states: Sequence[HeadedSequence]) -> list[RowJob]:
        """Read unread rows but those of each sequence's last pass; return the jobs of that pass."""
        self._idle_rounds = 0
        for state in states:
            if not state.unread:
                # nothing was written since the last tree: the last row is read again for its state
                last = len(state.positions) - 1
                state.unread = [Unread(state.positions[last], self._passes.before(state.slot, last))]
                self._cut(state, last)
        while True:
            left = [(state, rows) for state in states if (rows := self._next_rows(state, state.end)) is not None]
            jobs = [(state, rows) for state, rows in left if rows.positions[-1] + 1 < state.end]
            if not jobs:
                return self._jobs(left, wants_logits=True)
            self._passes.read(self._jobs(jobs))

    def feed(
        self, states: Sequence[HeadedSequence], tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]
    ) -> Logits:
        jobs = []
        for state, row, above in zip(states, tokens, parents, strict=True):
            assert state.before is not None, "a tree begins with the text's last token"
            start = len(state.view.history)
            state.num_fed += len(row)
            depths = state.slot.depths
            positions = [start if parent < 0 else start + depths[parent] for parent in above]
            chosen = [parent + 1 for parent in above]
            before = rows_of(state.before, chosen)
            jobs.append(RowJob(state.slot, row, positions, above, before, range(len(row))))
        result = self._passes.extend(jobs)
        self.answered = result.states
        recycled = self._passes.recycle(result.states)
        place = 0
        for state, row in zip(states, tokens, strict=True):
            assert state.before is not None, "checked above"
            state.before = torch.cat((state.before, recycled[place : place + len(row)]))
            place += len(row)
        return result.logits

    def keep(self, states: Sequence[HeadedSequence], paths: Sequence[Sequence[int]]) -> None:
        self._idle_rounds += 1
        for state in states:
            self._drop_tree(state)

    def _read(self, states: Sequence[HeadedSequence], ends: Sequence[int]) -> None:
        """Read unread rows below these positions."""
        while True:
            going = [(state, self._next_rows(state, end)) for state, end in zip(states, ends, strict=True)]
            jobs = [(state, rows) for state, rows in going if rows is not None]
            if not jobs:
                return
            self._passes.read(self._jobs(jobs))

    def _next_rows(self, state: HeadedSequence, end: int) -> Rows | None:
        """Return the next rows below a position that one pass can read, of one window."""
        if not state.unread:
            return None
        first = state.unread[0].first
        return first_rows(state.unread, min(end, first + PREFILL_ROWS, (first // self._block + 1) * self._block))

    def _jobs(self, next_rows: Sequence[tuple[HeadedSequence, Rows]], *, wants_logits: bool = False) -> list[RowJob]:
        """Return a pass over rows, which count as read, with logits after the last of each sequence if wanted."""
        jobs = []
        is_mixed = len({rows.is_projected for _, rows in next_rows}) > 1
        for state, rows in next_rows:
            positions = rows.positions
            # windows begin at multiples of a block, so that they depend on the text only
            self._drop_before(state, (positions[0] // self._block - 1) * self._block)
            drop_before(state.unread, positions[-1] + 1)
            following = state.view.history.since(positions[0])
            tokens = [following[position - positions[0]] for position in positions]
            before = self._passes.project(rows.hidden) if is_mixed and rows.is_projected else rows.hidden
            last = [len(positions) - 1] if wants_logits else ()
            jobs.append(RowJob(state.slot, tokens, positions, range(-1, len(tokens) - 1), before, last))
            state.positions.extend(positions)
        return jobs

    def _drop_before(self, state: HeadedSequence, position: int) -> None:
        count = bisect.bisect_left(state.positions, position)
        if count:
            self._passes.pool.drop_first(state.slot, count)
            del state.positions[:count]
