"""Slots of a draft model: which tokens they have read, and which they read next.

A slot has a committed prefix of its sequence's history, without the bonus and the last drafted level, whose logits were
not needed. A model with a context shorter than the history reads the first token and a window of the last ones; a full
window is restarted from its second half, so each token is read twice on average.

Prompts are prefilled in the target's chunks. A sequence that shares a prefix with another one starts with a copy of its
slot. The content of a slot depends on the text only, not on copies.

In the model's own tokens the last tokens of a text may change when it continues; the slot is then cut to the unchanged
prefix.

An encoder-decoder draft model encodes the source of an encoder-decoder target itself, once for all slots on it. A
causal one reads the tokens of the source before the text.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import final

import numpy as np
import torch

from draftree.core.errors import ConfigurationError
from draftree.core.tree import EMPTY, TokenTree, follow
from draftree.drafters.base import LoadedDraftModel, SequenceView
from draftree.drafters.tree_builder.builder import IntRows, Stepper
from draftree.models.base import Commit, Extend, LanguageModel, Pass, Slot
from draftree.models.source import EncoderDecoder, TokenSource
from draftree.sampling.controls import Controls
from draftree.sampling.logits import Logits
from draftree.sampling.tree_search import FoundTree, TreeSearch, TreeWidths


class Reading(ABC):
    """Text in the tokens of a model."""

    @abstractmethod
    def advance(self) -> int:
        """Process newly written tokens; return how many earlier tokens are unchanged."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of tokens since the last `advance`."""

    @abstractmethod
    def tokens(self, start: int, stop: int | None = None) -> list[int]:
        """Return a slice of the tokens."""


class Reader(ABC):
    """Conversion of texts and trees to a model's tokens, and of its logits to the trees' vocabulary."""

    @abstractmethod
    def open(self, view: SequenceView) -> Reading:
        """Return the `Reading` of a new sequence."""

    def read(self, tokens: Sequence[int]) -> list[int]:
        """Convert tokens of a tree to the model's tokens, one to one."""
        return list(tokens)

    @abstractmethod
    def answer(self, logits: Logits) -> Logits:
        """Convert the model's logits to the vocabulary of trees; the argument is consumed."""

    @property
    def is_same(self) -> bool:
        """Whether every token of the model is that token of trees."""
        return False


@final
class SameReader(Reader):
    """Reader for a model with the target's vocabulary; logits may be wider or narrower.

    Models with the same vocabulary may pad logits to different widths. A token without an embedding is read as token 0,
    so a draft may be wrong.

    Args:
        reads_source: whether the source of an encoder-decoder target is read before the text, by a causal model.
    """

    def __init__(self, known: int, wanted: int, *, reads_source: bool = False) -> None:
        self._known = known
        self._wanted = wanted
        self._reads_source = reads_source

    def open(self, view: SequenceView) -> Reading:
        return _History(view, self._known, view.source if self._reads_source else ())

    @property
    def is_same(self) -> bool:
        return self._known <= self._wanted

    def answer(self, logits: Logits) -> Logits:
        missing = self._wanted - logits.width
        if missing <= 0:
            return logits.narrowed(self._wanted)
        with logits.computing():
            return logits.replaced(torch.nn.functional.pad(logits.tensor(), (0, missing), value=float("-inf")))


class _History(Reading):
    def __init__(self, view: SequenceView, known: int, source: Sequence[int]) -> None:
        self._history = view.history
        self._known = known
        self._source = np.array(source, dtype=np.int64)
        self._length = 0

    def advance(self) -> int:
        before, self._length = self._length, len(self._source) + len(self._history)
        return before

    def __len__(self) -> int:
        return self._length

    def tokens(self, start: int, stop: int | None = None) -> list[int]:
        tokens = self._history.tokens
        if len(self._source):
            tokens = np.concatenate([self._source, tokens])
        tokens = tokens[: self._length][start:stop]
        known: list[int] = np.where(tokens < self._known, tokens, 0).tolist()
        return known


def open_slot(model: LanguageModel, view: SequenceView) -> Slot:
    """Return an empty slot of a draft model for a sequence, on the sequence's source if the model has an encoder."""
    if not isinstance(model, EncoderDecoder):
        return model.open()
    assert view.encoded is not None, "the target has an encoder"
    source = view.encoded
    if isinstance(source, TokenSource) and len(source.tokens) > model.max_source_length:
        # a draft from the end of the source may be wrong, but is never written unless the target agrees
        source = TokenSource(source.tokens[-model.max_source_length :])
    return model.open_on(source)


def require_same_source(loaded: LoadedDraftModel, target: LanguageModel) -> None:
    """Check that a draft model reads what the target reads."""
    model = loaded.model
    if not isinstance(model, EncoderDecoder):
        return
    if not isinstance(target, EncoderDecoder):
        raise ConfigurationError(
            f"drafter '{loaded.name}' is an encoder-decoder model, and the target is causal: choose a causal model"
        )
    shapes = (model.feature_shape, target.feature_shape)
    if shapes[0] != shapes[1]:
        draft_input, target_input = ("tokens" if shape is None else f"features of shape {shape}" for shape in shapes)
        raise ConfigurationError(
            f"drafter '{loaded.name}' reads {draft_input}, and the target reads {target_input}: "
            "choose a drafter of the same family"
        )


PREFILL_ROWS = 512
"""Maximum number of tokens of one sequence per pass."""
IDLE_ROUNDS = 32
"""Rounds without a tree after which prompts are not prefilled: a planner that does not draft must not pay for it."""


@dataclass(slots=True)
class SteppedSequence:
    """State of a sequence in a draft model. Mutated by `ModelStepper` and `TreeBuilder` only."""

    view: SequenceView
    slot: Slot
    reading: Reading
    start: int = 0
    """First token of the slot's window, stored after the first token; 0 if there is no gap."""
    covered: int = 0
    """Number of tokens of the reading up to the end of the slot's prefix."""
    fed: dict[int, int] = field(default_factory=dict)
    """Nodes of the last tree that the model has read: tree index to tentative index."""
    fed_tokens: list[int] = field(default_factory=list)
    """The model's tokens of these nodes by tentative index."""
    tree: TokenTree = EMPTY
    """Last tree, if it is in other tokens than the target's."""


@final
class ModelStepper(Stepper[SteppedSequence]):
    """Stepper for a draft model with a slot for every sequence.

    Args:
        reader: conversion of tokens and logits; None if the model has the trees' vocabulary.
    """

    def __init__(self, model: LanguageModel, reader: Reader | None = None, *, controls: Controls | None = None) -> None:
        self._controls = controls
        self.model = model
        self.max_length = model.max_length
        self._reader = SameReader(model.vocab_size, model.vocab_size) if reader is None else reader
        self._window = model.max_length // 2
        # after a fresh window
        self.max_depth = max(1, model.max_length - self._window - 2)
        self._num_open = 0
        self._idle_rounds = 0
        """Number of rounds since the last tree."""

    def reserve(self, num_sequences: int, length: int) -> None:
        others = max(0, self.model.num_open - self._num_open)
        self.model.reserve(others + num_sequences, length)

    def open(self, view: SequenceView) -> SteppedSequence:
        view = self._drafted(view)
        self._num_open += 1
        return SteppedSequence(view, open_slot(self.model, view), self._reader.open(view))

    def _drafted(self, view: SequenceView) -> SequenceView:
        return view if self._controls is None else replace(view, controls=self._controls)

    def close(self, state: SteppedSequence) -> None:
        self.model.close(state.slot)
        self._num_open -= 1

    def fork(self, state: SteppedSequence, view: SequenceView) -> SteppedSequence:
        """Copy the common prefix of the slot; open a new slot if there is none or the window differs."""
        reading = self._reader.open(view)
        stands = self._common(state, view, reading)
        if not stands:
            return self.open(view)
        stands, length = self._cut_at(state, stands)
        if not length:
            return self.open(view)
        slot = self.model.fork(state.slot, length)
        self._num_open += 1
        return SteppedSequence(self._drafted(view), slot, reading, start=state.start, covered=stands)

    def detach(self, state: SteppedSequence) -> SteppedSequence | None:
        if not state.covered:
            self.close(state)
            return None
        self._cut(state, state.covered)
        return state

    def attach(self, state: SteppedSequence, view: SequenceView) -> SteppedSequence:
        """Cut the slot to the common prefix; open a new slot if there is none or the window differs."""
        reading = self._reader.open(view)
        stands = self._common(state, view, reading)
        if not stands:
            self.close(state)
            return self.open(view)
        self._cut(state, stands)
        state.view = self._drafted(view)
        state.reading = reading
        return state

    def _common(self, state: SteppedSequence, view: SequenceView, reading: Reading) -> int:
        """Return the length of the common prefix of a new reading and the slot; 0 if sources or windows differ."""
        reading.advance()
        if state.view.encoded != view.encoded:
            return 0
        if state.start and state.start != len(reading) - self._window:
            return 0
        pairs = zip(state.reading.tokens(0, state.covered), reading.tokens(0), strict=False)
        stands = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        return stands if stands > state.start else 0

    def check_integrity(self, states: Sequence[SteppedSequence]) -> None:
        self.model.check_integrity()
        assert len({id(state.slot) for state in states}) == len(states), "a slot has one owner"
        assert len(states) <= self._num_open, "every state is open"
        for state in states:
            held = state.covered - state.start + bool(state.start)
            assert state.slot.length == held, "a slot holds the first token and the window, or the beginning"
            assert state.slot.num_tentative == len(state.fed_tokens), "every tentative node is noted"

    def read(self, states: Sequence[SteppedSequence], counts: Sequence[int]) -> None:
        """Prefill the same share of each prompt as the target; nothing while no trees are requested."""
        if self._idle_rounds > IDLE_ROUNDS:
            return
        unread = [self._next_of_prompt(state, count) for state, count in zip(states, counts, strict=True)]
        going = [(state, tokens) for state, tokens in zip(states, unread, strict=True) if tokens]
        if going:
            self._read(*zip(*going, strict=True), wants_logits=False)

    def _next_of_prompt(self, state: SteppedSequence, count: int) -> list[int]:
        """Return the tokens to prefill with `count` of the target's; the last one is read with the first tree."""
        self._advance(state)
        whole, written = len(state.reading), len(state.view.history)
        share = -(-count * whole // written)
        if whole >= self.model.max_length and state.start != whole - self._window:
            return self._begin_window(state, whole, share=share)
        first, state.covered = state.covered, max(state.covered, min(state.covered + share, whole - 1))
        return state.reading.tokens(first, state.covered)

    def _begin_window(self, state: SteppedSequence, whole: int, *, share: int) -> list[int]:
        """Return the first tokens of a prompt's last window; none before the target has reached it."""
        slot, start = state.view.slot, whole - self._window
        reached = 0 if slot is None else slot.length * whole // len(state.view.history)
        if reached <= start:
            return []
        self._cut(state, 0)
        state.start, state.covered = start, min(reached, start + share, whole - 1)
        return state.reading.tokens(0, 1) + state.reading.tokens(start, state.covered)

    def feed(self, states: Sequence[SteppedSequence], tokens: IntRows, parents: IntRows) -> Logits:
        read = [self._reader.read(row) for row in tokens]
        for state, row in zip(states, read, strict=True):
            state.fed_tokens.extend(row)
        jobs = [Extend(s.slot, row, above) for s, row, above in zip(states, read, parents, strict=True)]
        return self._reader.answer(self.model.run(Pass(jobs)).logits)

    def catch_up(self, states: Sequence[SteppedSequence], ahead: Sequence[int]) -> Logits:
        self._idle_rounds = 0
        pending = [self._pending(state, count) for state, count in zip(states, ahead, strict=True)]
        while long := [i for i, tokens in enumerate(pending) if len(tokens) > PREFILL_ROWS]:
            self._read([states[i] for i in long], [pending[i][:PREFILL_ROWS] for i in long], wants_logits=False)
            for i in long:
                pending[i] = pending[i][PREFILL_ROWS:]
        logits = self._read(states, pending, wants_logits=True)
        for state in states:
            state.covered = len(state.reading)
        return logits

    def trees(
        self,
        states: Sequence[SteppedSequence],
        ahead: Sequence[int],
        shape: TreeWidths,
        searches: Sequence[TreeSearch],
    ) -> list[FoundTree] | None:
        """Read the unread tokens of every sequence, and grow trees in the same pass; nodes that are read stay."""
        # where a grammar forbids a tree, the last token is read again, which for a recurrent model is the whole text
        if not self._reader.is_same or any(state.view.controls.guide is not None for state in states):
            return None
        pending = [self._pending(state, count) for state, count in zip(states, ahead, strict=True)]
        jobs = [self._job(state, row, wants_logits=True) for state, row in zip(states, pending, strict=True)]
        trees = self.model.grow(jobs, shape, searches)
        if trees is None:
            return None
        self._idle_rounds = 0
        for state, tree in zip(states, trees, strict=True):
            state.covered = len(state.reading)
            state.fed_tokens = tree.tokens_of_read()
        return trees

    def _pending(self, state: SteppedSequence, ahead: int) -> list[int]:
        self._advance(state)
        reading = state.reading
        if state.covered == len(reading):
            # the written tokens have no text for this model: the last token is read again for its logits
            self._cut(state, state.covered - 1)
        unseen = len(reading) - state.covered
        if state.slot.length + unseen + min(ahead, self.max_depth) <= self.model.max_length:
            return reading.tokens(state.covered)
        self.model.close(state.slot)
        state.slot = open_slot(self.model, state.view)
        state.start, state.covered = max(0, len(reading) - self._window), 0
        # the first token stays in the window: models attend to it, and many were never trained without it
        return reading.tokens(0, 1) + reading.tokens(-self._window)

    def _advance(self, state: SteppedSequence) -> None:
        stands = state.reading.advance()
        if stands < state.covered:
            self._cut(state, stands)

    def _cut(self, state: SteppedSequence, stands: int) -> None:
        """Drop all tokens after the first `stands`, or more where the model keeps no state, and the tree."""
        state.covered, length = self._cut_at(state, stands)
        if not length:
            state.start = 0
        self.model.truncate(state.slot, length)
        state.fed.clear()
        state.fed_tokens.clear()

    def _cut_at(self, state: SteppedSequence, stands: int) -> tuple[int, int]:
        """Return how many tokens of the reading stay if all after the first `stands` go, and the slot's length then."""
        after = state.covered - state.slot.length
        length = self.model.cut_length(state.slot, max(0, stands - after))
        # without a token of its window a slot is empty
        return (after + length, length) if after + length > state.start else (0, 0)

    def _read(self, states: Sequence[SteppedSequence], tokens: Sequence[list[int]], *, wants_logits: bool) -> Logits:
        jobs = [self._job(state, row, wants_logits=wants_logits) for state, row in zip(states, tokens, strict=True)]
        logits = self._reader.answer(self.model.run(Pass(jobs)).logits)
        self.model.apply([Commit(state.slot, range(len(row))) for state, row in zip(states, tokens, strict=True)])
        return logits

    @staticmethod
    def _job(state: SteppedSequence, tokens: Sequence[int], *, wants_logits: bool) -> Extend:
        count = len(tokens)
        rows = [count - 1] if wants_logits else ()
        return Extend(state.slot, tokens, range(-1, count - 1), logits_at=rows, settled=count)

    def keep(self, states: Sequence[SteppedSequence], paths: IntRows) -> None:
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
        """Return the first nodes whose tokens equal the current reading of the text."""
        tokens = state.reading.tokens(state.covered, state.covered + len(nodes))
        pairs = zip(nodes, tokens, strict=False)
        return [node for node, _ in itertools.takewhile(lambda pair: state.fed_tokens[pair[0]] == pair[1], pairs)]

    def follow(self, states: Sequence[SteppedSequence], trees: Sequence[TokenTree]) -> None:
        """Do as `keep` for trees in the model's own tokens: the nodes that agree with the text are kept."""
        touched = [(state, tree) for state, tree in zip(states, trees, strict=True) if state.fed]
        for state, _ in touched:
            self._advance(state)
        paths = [follow(tree, state.reading.tokens(state.covered)) for state, tree in touched]
        self.keep([state for state, _ in touched], paths)
