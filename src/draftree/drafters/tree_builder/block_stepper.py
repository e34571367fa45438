"""Stepper for a head that drafts all levels in one pass.

The first pass of a tree reads the new rows of the text and one block; it gives the logits of every level. Later levels
of a tree run no pass: their logits are those of their level, plus the head's bias by the token before. Rows of the text
are read from the target's hidden states, as for `HeadStepper`. A row whose hidden states are unknown, such as the first
one after a cached prefix, is left out.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np
import torch
from torch import Tensor

from draftree.core.host import single_threaded
from draftree.core.tensors import rows_of, to_device, to_host
from draftree.drafters.base import SequenceView
from draftree.drafters.tree_builder.head_stepper import FeatureSequence, FeatureStepper, Unread, common_length
from draftree.drafters.tree_builder.model_stepper import PREFILL_ROWS
from draftree.heads.base import BlockNodes, BlockRows
from draftree.heads.block_passes import BlockPasses
from draftree.models.kv.slots import KVSlot
from draftree.models.memory import Footprint
from draftree.sampling.logits import Logits


@dataclass(frozen=True, slots=True)
class Levels:
    """Result of a pass for one text.

    Attributes:
        states: states of the levels, shape (levels, hidden).
        logits: logits without bias, shape (levels, draft vocabulary).
        memory: memory of the head's bias before level 0, shape (1, width); None without one.
    """

    length: int
    states: Tensor
    logits: Tensor
    memory: Tensor | None


@dataclass(slots=True, kw_only=True)
class BlockSequence(FeatureSequence):
    """State of a sequence in a head that drafts all levels in one pass; `positions` are those of its prefix."""

    slot: KVSlot
    levels: Levels | None = None
    """Result of the last pass; of use as long as the text is the same."""
    depths: list[int] = field(default_factory=list)
    """Levels of the children of each node of the tree that was fed."""
    memories: list[Tensor | None] = field(default_factory=list)
    """Memory of the bias after the text's last token and after each node."""

    def has_levels(self) -> bool:
        """Return whether the last pass was for the present text."""
        return self.levels is not None and self.levels.length == len(self.view.history)


@final
class BlockStepper(FeatureStepper[BlockSequence]):
    """Stepper for a head that drafts all levels in one pass."""

    def __init__(self, passes: BlockPasses) -> None:
        self._passes, self._head, self._device = passes, passes.head, passes.device
        self.max_length = self._head.config.max_length
        self.max_depth = self._head.num_levels
        self._last: tuple[Tensor, Tensor] | None = None
        """Tokens and states of the rows of the last logits."""

    @property
    def footprint(self) -> Footprint:
        return self._passes.footprint

    def reserve(self, num_sequences: int, length: int) -> None:
        self._passes.pool.reserve(num_sequences, length + self._passes.num_stored)

    def open(self, view: SequenceView) -> BlockSequence:
        return BlockSequence(view=view, slot=self._passes.pool.open())

    def close(self, state: BlockSequence) -> None:
        self._passes.pool.close(state.slot)

    def fork(self, state: BlockSequence, view: SequenceView) -> BlockSequence:
        count, unread = self._common(state, view)
        slot = self._passes.pool.fork(state.slot, count)
        return BlockSequence(view=view, slot=slot, positions=state.positions[:count], unread=unread)

    @staticmethod
    def _common(state: BlockSequence, view: SequenceView) -> tuple[int, list[Unread]]:
        """Return the number of rows of the common prefix, and the unread rows that follow them."""
        shared = common_length(state.view.history, view.history)
        count = bisect.bisect_left(state.positions, shared)
        end = shared + 1 if count == len(state.positions) else 0
        pieces = (piece.between(0, end) for piece in state.unread)
        return count, [piece for piece in pieces if piece is not None]

    def _drop_tree(self, state: BlockSequence) -> None:
        self._forget_tree(state)
        state.levels = None

    def attach(self, state: BlockSequence, view: SequenceView) -> BlockSequence:
        count, state.unread = self._common(state, view)
        self._passes.pool.truncate(state.slot, count)
        del state.positions[count:]
        state.view, state.levels = view, None
        return state

    def check_integrity(self, states: Sequence[BlockSequence]) -> None:
        pool = self._passes.pool
        pool.check_integrity()
        assert len({id(state.slot) for state in states}) == len(states) <= pool.num_open, "a slot has one owner"
        for state in states:
            assert state.slot.length == len(state.positions), "every row of the prefix has a position"
            state.check_order()

    def is_ready(self, state: BlockSequence) -> bool:
        """Return whether the hidden states before the text's last token are known, and its length is in range."""
        length = len(state.view.history)
        return length < self.max_length and (state.has_levels() or (bool(state.unread) and state.end == length))

    def catch_up(self, states: Sequence[BlockSequence], ahead: Sequence[int]) -> Logits:
        self._idle_rounds = 0
        self._read(states, [len(state.view.history) for state in states])
        for state in states:
            assert state.levels is not None, "a state that is ready has levels after its rows are read"
            self._forget_tree(state)
            state.depths, state.memories = [], [state.levels.memory]
        tokens = [int(state.view.history.tokens[len(state.view.history) - 1]) for state in states]
        return self._logits(states, [[-1]] * len(states), [[token] for token in tokens])

    def feed(
        self, states: Sequence[BlockSequence], tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]
    ) -> Logits:
        """Return the logits of new nodes of trees, without a pass."""
        for state, above in zip(states, parents, strict=True):
            depths = [0 if parent < 0 else state.depths[parent] for parent in above]
            state.depths.extend(depth + 1 for depth in depths)
        return self._logits(states, parents, tokens)

    @torch.inference_mode()
    def confidence(self) -> list[float] | None:
        assert self._last is not None, "estimates follow logits"
        confidence = self._head.confidence(*self._last)
        return None if confidence is None else to_host(confidence)

    def keep(self, states: Sequence[BlockSequence], paths: Sequence[Sequence[int]]) -> None:
        self._idle_rounds += 1
        for state in states:
            self._forget_tree(state)

    @staticmethod
    def _forget_tree(state: BlockSequence) -> None:
        state.fed.clear()
        state.depths, state.memories = [], []

    def _logits(
        self, states: Sequence[BlockSequence], parents: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
    ) -> Logits:
        """Return the logits of the last nodes of each tree, with the bias by their tokens.

        Args:
            parents: for each the nodes' parents as they were fed, or -1 for the text's last token.
        """
        logits, hidden = [], []
        levels: list[int] = []
        memories: list[Tensor | None] = []
        for state, above in zip(states, parents, strict=True):
            assert state.levels is not None, "a tree begins with a pass"
            # before a node is fed, its level is 0: that of the text's last token
            places = state.depths[len(state.depths) - len(above) :] if state.depths else [0]
            logits.append(rows_of(state.levels.logits, places))
            hidden.append(rows_of(state.levels.states, places))
            levels += places
            if self._head.has_bias:
                memories.extend(state.memories[parent + 1] for parent in above)
        with single_threaded():
            together = torch.cat(logits)
        joined = to_device([token for row in tokens for token in row], self._device)
        self._last = joined, torch.cat(hidden)
        if self._head.has_bias:
            memory = None if memories[0] is None else torch.cat([part for part in memories if part is not None])
            joined_levels = to_device(levels, self._device)
            together, after = self._head.follow(BlockNodes(joined, joined_levels, self._last[1], together, memory))
            rows = iter([None] * len(joined) if after is None else after.split(1))
            for state, above in zip(states, parents, strict=True):
                # the memory after the text's last token replaces that before it
                new = list(itertools.islice(rows, len(above)))
                state.memories = [*state.memories, *new] if state.depths else new
        return self._passes.logits(together)

    @torch.inference_mode()
    def _read(self, states: Sequence[BlockSequence], ends: Sequence[int]) -> None:
        """Read unread rows below these positions, and note the levels after the last ones."""
        while True:
            going = []
            for state, end in zip(states, ends, strict=True):
                first = state.unread[0].first if state.unread else end
                piece = state.unread[0].between(first, min(end, first + PREFILL_ROWS)) if state.unread else None
                if piece is not None:
                    rest = state.unread[0].between(piece.end, state.unread[0].end)
                    state.unread[:1] = [] if rest is None else [rest]
                    going.append((state, piece))
            if not going:
                return
            self._run(going)

    def _run(self, going: Sequence[tuple[BlockSequence, Unread]]) -> None:
        rows = BlockRows(
            torch.cat([piece.hidden for _, piece in going]).to(self._device),
            to_device(np.concatenate([s.view.history.tokens[p.first : p.end] for s, p in going]), self._device),
            to_device(np.concatenate([np.arange(piece.first, piece.end) for _, piece in going]), self._device),
            [len(piece.hidden) for _, piece in going],
        )
        needed = [index for index, (state, piece) in enumerate(going) if piece.end == len(state.view.history)]
        result = self._passes.read([state.slot for state, _ in going], rows, needed)
        for state, piece in going:
            state.positions.extend(range(piece.first, piece.end))
        if not needed:
            return
        first = self._head.first_slot
        last = [going[index][0].view.history.tokens[-2:] for index in needed]
        previous, anchors = to_device(np.stack(last), self._device).long().unbind(1)
        memory = self._head.start(result.states, anchors, previous)
        for place, index in enumerate(needed):
            state = going[index][0]
            row_memory = None if memory is None else memory[place : place + 1]
            states = result.states[place, first:]
            state.levels = Levels(len(state.view.history), states, result.logits[place], row_memory)
