"""Keeping a stepped model in step with the texts: what its slots have read, and what they read next.

The model's slot of a sequence holds a committed prefix of the history. It lags behind: it has not seen the
bonus, nor the last level that was drafted, whose logits nobody needed. A model with a shorter context than the
history sees the first token and a window of the last ones; when the window has run full it starts again from its
younger half, so that a token is read twice on average.

Models of one vocabulary may differ in the width of their logits: many round it up. Rows are cut or filled to the
target's width here, and a token that the model has no row for is read as token 0: a guess may be wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from draftree.drafters.base import SequenceView
from draftree.models.base import Extend, LanguageModel, Slot

PREFILL_ROWS = 512
"""Tokens of one sequence that one pass reads at most."""


@dataclass(slots=True)
class SteppedSequence:
    """What a stepped model knows of a sequence. Mutated by `Stepper` and `Growth` only."""

    view: SequenceView
    slot: Slot
    covered: int = 0
    """Tokens of the history up to which the slot's prefix reaches."""
    fed: dict[int, int] = field(default_factory=dict)
    """Nodes of the last tree that were fed to the model: tree index to tentative index."""


class Stepper:
    """Feeds histories to a model.

    Args:
        model: the model that is stepped.
        vocab_size: width of the logits that are wanted.
    """

    def __init__(self, model: LanguageModel, vocab_size: int) -> None:
        self.model = model
        self._vocab_size = vocab_size
        self._window = model.max_length // 2
        self.max_depth = max(1, model.max_length - self._window - 2)
        """Levels that always fit behind a fresh window."""

    def reserve(self, num_sequences: int, length: int) -> None:
        """Make room for so many sequences of so many tokens, tentative ones included."""
        self.model.reserve(num_sequences, length)

    def open(self, view: SequenceView) -> SteppedSequence:
        """State for a new sequence."""
        return SteppedSequence(view, self.model.open())

    def close(self, state: SteppedSequence) -> None:
        """Free the slot."""
        self.model.close(state.slot)

    def extend(self, jobs: Sequence[Extend]) -> Tensor:
        """One pass over new tentative nodes; the asked logits, shape (rows, vocab)."""
        logits = self.model.extend(jobs).logits
        missing = self._vocab_size - logits.shape[-1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        return logits[:, : self._vocab_size]

    def catch_up(self, states: Sequence[SteppedSequence], ahead: Sequence[int]) -> Tensor:
        """Feed every sequence what its slot has not seen.

        Args:
            states: the sequences.
            ahead: for each how many positions a tree may need behind its last token.

        Returns:
            Logits behind the last tokens, shape (sequences, vocab).
        """
        pending = [self._pending(state, count) for state, count in zip(states, ahead, strict=True)]
        while any(len(tokens) > PREFILL_ROWS for tokens in pending):
            long = [i for i, tokens in enumerate(pending) if len(tokens) > PREFILL_ROWS]
            self._read([states[i] for i in long], [pending[i][:PREFILL_ROWS] for i in long], wants_logits=False)
            for i in long:
                pending[i] = pending[i][PREFILL_ROWS:]
        logits = self._read(states, pending, wants_logits=True)
        for state in states:
            state.covered = len(state.view.history)
        return logits

    def _pending(self, state: SteppedSequence, ahead: int) -> list[int]:
        history = state.view.history.tokens
        unseen = len(history) - state.covered
        if state.slot.length + unseen + min(ahead, self.max_depth) <= self.model.max_length:
            return self._known(history[state.covered :])
        self.model.close(state.slot)
        state.slot = self.model.open()
        # the first token is kept in sight: models lean on it, and many have never been without
        return self._known(history[:1]) + self._known(history[-self._window :])

    def _known(self, tokens: np.ndarray) -> list[int]:
        known: list[int] = np.where(tokens < self.model.vocab_size, tokens, 0).tolist()
        return known

    def _read(self, states: Sequence[SteppedSequence], tokens: Sequence[list[int]], *, wants_logits: bool) -> Tensor:
        jobs = [
            Extend(state.slot, row, range(-1, len(row) - 1), logits_at=[len(row) - 1] if wants_logits else ())
            for state, row in zip(states, tokens, strict=True)
        ]
        logits = self.extend(jobs)
        self.model.commit_many([state.slot for state in states], [range(len(row)) for row in tokens])
        return logits

    def keep(self, states: Sequence[SteppedSequence], paths: Sequence[Sequence[int]]) -> None:
        """Keep what was accepted of what was fed; the histories already hold the written tokens."""
        touched = [(state, path) for state, path in zip(states, paths, strict=True) if state.fed]
        if not touched:
            return
        kept = [[state.fed[n] for n in path if n in state.fed] for state, path in touched]
        self.model.commit_many([state.slot for state, _ in touched], kept)
        for (state, _), nodes in zip(touched, kept, strict=True):
            state.covered += len(nodes)
            state.fed.clear()
