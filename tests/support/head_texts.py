"""Texts with hidden states of a target that are a function of the text, for tests of steppers without a target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draftree.drafters.base import SequenceView
from draftree.drafters.tree_builder.head_stepper import HeadedSequence, HeadStepper
from draftree.heads.base import FeatureHead
from draftree.models.base import CountedSlot
from draftree.sampling.controls import build_controls
from draftree.sampling.history import History
from draftree.sampling.params import SamplingParams


def hidden_states(head: FeatureHead, tokens: Sequence[int]) -> Tensor:
    """Hidden states of every token, which depend on it and all before it, shape (tokens, layers, hidden)."""
    rows, state = [], 17
    shape = (len(head.config.features), head.config.target_hidden)
    for token in tokens:
        state = (state * 1_000_003 + token + 1) % (1 << 31)
        rows.append(torch.randn(shape, generator=torch.Generator().manual_seed(state), dtype=torch.float64))
    return torch.stack(rows) if rows else torch.zeros(0, *shape, dtype=torch.float64)


class HeadText:
    """A text in a stepper, and what its target has read."""

    def __init__(
        self,
        stepper: HeadStepper,
        head: FeatureHead,
        tokens: list[int],
        *,
        read: int = 0,
        state: HeadedSequence | None = None,
        consumes: bool = False,
        params: SamplingParams | None = None,
    ) -> None:
        controls = build_controls(params or SamplingParams(), vocab_size=head.config.vocab_size, seed=len(tokens))
        self.slot = CountedSlot(0, read)
        self.view = SequenceView(History(tokens), controls, self.slot)
        self.stepper, self.head = stepper, head
        if state is None:
            self.state = stepper.open(self.view)
        else:
            self.state = (stepper.attach if consumes else stepper.fork)(state, self.view)

    @property
    def tokens(self) -> list[int]:
        return self.view.history.tokens.tolist()

    def read(self, count: int | None = None) -> HeadText:
        """The target reads tokens of a prompt, all but the last by default."""
        start = self.slot.length
        self.slot.length = len(self.view.history) - 1 if count is None else start + count
        self._learn(start)
        self.stepper.read([self.state], [self.slot.length - start])
        return self

    def write(self, tokens: Sequence[int], path: Sequence[int] = ()) -> HeadText:
        """A round in which all unread tokens are read and these are written, the last one as bonus."""
        start = self.slot.length
        self.view.history.append(tokens)
        self.slot.length = len(self.view.history) - 1
        self._learn(start)
        self.stepper.keep([self.state], [path])
        return self

    def _learn(self, start: int) -> None:
        hidden = hidden_states(self.head, self.tokens[: self.slot.length])[start:]
        self.stepper.learn([self.state], [hidden if len(hidden) else None])

    def levels(self, tokens: Sequence[int], parents: Sequence[int], sizes: Sequence[int]) -> list[Tensor]:
        """Logits after the text and after each level of a tree of this text."""
        return grown([self], [tokens], [parents], sizes)[0]


def grown(
    texts: Sequence[HeadText], tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]], sizes: Sequence[int]
) -> list[list[Tensor]]:
    """Logits of trees of one shape in a batch, by text: of the root, then of each level."""
    stepper, states = texts[0].stepper, [text.state for text in texts]
    with torch.inference_mode():
        found = [[row[None]] for row in stepper.catch_up(states, [9] * len(texts)).tensor()]
        first = 0
        for size in sizes:
            level: list[list[int]] = [list(own[first : first + size]) for own in tokens]
            above: list[list[int]] = [list(own[first : first + size]) for own in parents]
            rows: Any = stepper.feed(states, level, above).tensor().split(size)
            for own, logits in zip(found, rows, strict=True):
                own.append(logits)
            first += size
    return found
