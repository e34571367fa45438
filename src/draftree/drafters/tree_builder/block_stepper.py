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
import torch.nn.functional as F
from torch import Tensor

from draftree.core.tensors import rows_of, to_device, to_host
from draftree.drafters.base import SequenceView
from draftree.drafters.tree_builder.head_stepper import FeatureSequence, FeatureStepper, Unread, common_length
from draftree.drafters.tree_builder.model_stepper import PREFILL_ROWS
from draftree.heads.base import BlockHead, BlockNodes, BlockRows
from draftree.models.memory import LOGIT_BYTES, Footprint
from draftree.sampling.logits import Logits, SubsetLogits, TensorLogits, TokenSubset

FIRST_ROWS = 64
"""Rows for which memory is reserved at first; it doubles when it is full."""


@final
class KeptRows:
    """Keys and values of the context rows of one text, for every layer of a head. Mutated by `BlockPass`."""

    def __init__(self) -> None:
        self.length = 0
        """Number of rows in every layer."""
        self._layers: list[tuple[Tensor, Tensor]] = []

    def add(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write rows of a layer after the kept ones. They count once `length` is increased.

        Args:
            layer: index of the layer; layers are first written in order.
            key: shape (rows, kv_heads, head_dim).
            value: shape of `key`.
        """
        end = self.length + len(key)
        if layer == len(self._layers):
            size = max(end, FIRST_ROWS)
            self._layers.append((_grown(key.transpose(0, 1), size, 0), _grown(value.transpose(0, 1), size, 0)))
        elif end > self._layers[layer][0].shape[1]:
            size = max(end, 2 * self._layers[layer][0].shape[1])
            self._layers[layer] = tuple(_grown(part, size, self.length) for part in self._layers[layer])  # type: ignore[assignment]
        for part, rows in zip(self._layers[layer], (key, value), strict=True):
            part[:, self.length : end] = rows.transpose(0, 1)

    def rows(self, layer: int, end: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the first rows, shape (kv_heads, rows, head_dim); views."""
        key, value = self._layers[layer]
        return key[:, :end], value[:, :end]

    def copy(self, length: int) -> KeptRows:
        """Return a copy of the first rows."""
        copy = KeptRows()
        copy.length = min(length, self.length)
        size = max(copy.length, FIRST_ROWS)
        copy._layers = [tuple(_grown(part, size, copy.length) for part in parts) for parts in self._layers]  # type: ignore[misc]
        return copy


@final
class BlockPass:
    """Attention of one pass, as in `BlockAttend`."""

    def __init__(self, kept: Sequence[KeptRows], counts: Sequence[int]) -> None:
        self._kept, self._counts = kept, counts

    def context(
        self, layer: int, query: Tensor | None, key: Tensor, value: Tensor, *, window: int = 0
    ) -> Tensor | None:
        """Keep rows; attend to them causally."""
        mixed, first = [], 0
        for kept, count in zip(self._kept, self._counts, strict=True):
            part = slice(first, first + count)
            first += count
            kept.add(layer, key[part], value[part])
            if query is not None:
                keys, values = kept.rows(layer, kept.length + count)
                places = torch.arange(kept.length, kept.length + count, device=key.device)
                mask = _visible(places, kept.length + count, is_causal=True, window=window)
                mixed.append(_attend(query[part], keys, values, mask))
        return torch.cat(mixed) if mixed else None

    def block(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, window: int = 0
    ) -> Tensor:
        """Attend from blocks to the rows of their text and to themselves."""
        mixed = []
        for text, (kept, count) in enumerate(zip(self._kept, self._counts, strict=True)):
            keys, values = kept.rows(layer, kept.length + count)
            total = keys.shape[1] + query.shape[1]
            places = torch.arange(keys.shape[1], total, device=key.device)
            mask = _visible(places, total, is_causal=is_causal, window=window) if is_causal or window else None
            both = torch.cat((keys, key[text].transpose(0, 1)), 1), torch.cat((values, value[text].transpose(0, 1)), 1)
            mixed.append(_attend(query[text], *both, mask))
        return torch.stack(mixed)

    def finish(self) -> None:
        """Count the new rows of all texts, which every layer has written."""
        for kept, count in zip(self._kept, self._counts, strict=True):
            kept.length += count


def _grown(part: Tensor, size: int, used: int) -> Tensor:
    rows = part.new_empty(part.shape[0], size, part.shape[2])
    rows[:, :used] = part[:, :used]
    return rows


def _visible(places: Tensor, length: int, *, is_causal: bool, window: int) -> Tensor:
    """Return which keys rows see, shape (rows, keys), bool; row and key i are at place i of the text."""
    ahead = torch.arange(length, device=places.device)[None] - places[:, None]
    seen = ahead <= 0 if is_causal else torch.ones_like(ahead, dtype=torch.bool)
    return seen if not window else seen & (ahead.abs() < window)


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Return shape (rows, heads, head_dim), from queries of that shape and keys (kv_heads, length, head_dim)."""
    mixed = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, enable_gqa=True
    )
    return mixed[0].transpose(0, 1)


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
    """State of a sequence in a head that drafts all levels in one pass; `positions` are those of `kept`."""

    kept: KeptRows = field(default_factory=KeptRows)
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

    def __init__(self, head: BlockHead, device: torch.device) -> None:
        self._head, self._device = head, device
        self.max_length = head.config.max_length
        self.max_depth = head.num_levels
        vocabulary = head.vocabulary
        self._subset = None if vocabulary.is_full else TokenSubset(vocabulary.ids.to(device), vocabulary.vocab_size)
        self._last: tuple[Tensor, Tensor] | None = None
        """Tokens and states of the rows of the last logits."""

    @property
    def footprint(self) -> Footprint:
        """Memory of the head in bytes."""
        config, tensors = self._head.config, list(self._head.state_dict().values())
        item = tensors[0].element_size()
        return Footprint(
            weights=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
            token=2 * config.num_layers * config.num_kv_heads * config.head_dim * item,
            logits=config.block_size * config.draft_vocab_size * LOGIT_BYTES,
            row=(8 * config.hidden + 3 * config.intermediate) * item,
        )

    def reserve(self, num_sequences: int, length: int) -> None:
        """Do nothing: memory grows with the rows of each text."""

    def open(self, view: SequenceView) -> BlockSequence:
        return BlockSequence(view=view)

    def close(self, state: BlockSequence) -> None:
        state.kept, state.positions, state.unread, state.levels = KeptRows(), [], [], None

    def fork(self, state: BlockSequence, view: SequenceView) -> BlockSequence:
        count, unread = self._common(state, view)
        kept = state.kept.copy(count)
        return BlockSequence(view=view, kept=kept, positions=state.positions[:count], unread=unread)

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
        state.kept.length = count
        del state.positions[count:]
        state.view, state.levels = view, None
        return state

    def check_integrity(self, states: Sequence[BlockSequence]) -> None:
        assert len({id(state.kept) for state in states}) == len(states), "rows have one owner"
        for state in states:
            assert not self._head.config.num_layers or state.kept.length == len(state.positions), "a row is recorded"
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
        return TensorLogits(together) if self._subset is None else SubsetLogits(together, self._subset)

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
        attention = BlockPass([state.kept for state, _ in going], rows.counts)
        states = self._head.run(rows, attention)
        if self._head.config.num_layers:
            attention.finish()
        needed = [index for index, (state, piece) in enumerate(going) if piece.end == len(state.view.history)]
        for state, piece in going:
            state.positions.extend(range(piece.first, piece.end))
        if not needed:
            return
        states, first = rows_of(states, needed), self._head.first_slot
        last = [going[index][0].view.history.tokens[-2:] for index in needed]
        previous, anchors = to_device(np.stack(last), self._device).long().unbind(1)
        memory = self._head.start(states, anchors, previous)
        logits = self._head.logits(states)
        for place, index in enumerate(needed):
            state = going[index][0]
            row_memory = None if memory is None else memory[place : place + 1]
            state.levels = Levels(len(state.view.history), states[place, first:], logits[place, first:], row_memory)
