"""Stepper for a head that attends to the target's own keys and values.

It keeps nothing of a text but the target's hidden state of the last token that the target has read. Rows of a tree see
the text before them and no other row, so each level is one pass over its nodes only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from draftree.core.errors import ConfigurationError
from draftree.core.tensors import rows_of, to_device
from draftree.drafters.base import SequenceView
from draftree.drafters.tree_builder.builder import IntRows, Stepper
from draftree.heads.gemma4 import AssistantHead, AssistantLayer
from draftree.models.base import LanguageModel
from draftree.models.memory import LOGIT_BYTES, Footprint
from draftree.models.torch.attention import LayerCall, attend
from draftree.sampling.logits import Logits, TensorLogits

_UNSCALED = LayerCall(0, 1.0, window=None, softcap=None, sinks=None)


@dataclass(slots=True, kw_only=True)
class AssistedSequence:
    """State of a sequence. Mutated by `AssistantStepper` and `TreeBuilder` only."""

    view: SequenceView
    fed: dict[int, int] = field(default_factory=dict)
    hidden: Tensor | None = None
    """The target's hidden state of its last token, shape (1, 1, target hidden); None if it is unknown."""
    length: int = 0
    """Number of tokens that the target had read then."""
    before: Tensor | None = None
    """States before the children of the text's last token and of each node that was fed; None without a tree."""


@final
class AssistantStepper(Stepper[AssistedSequence]):
    """Stepper for an assistant of Gemma 4.

    Raises:
        UnsupportedModelError: the target does not show its keys and values.
        ConfigurationError: they are of other sizes than those that the head was made for.
    """

    def __init__(self, head: AssistantHead, target: LanguageModel) -> None:
        self._head = head
        self._target = target
        self.max_length = self.max_depth = target.max_length
        slot = target.open_probe()
        try:
            for layer in head.layers:
                assert isinstance(layer, AssistantLayer)
                keys, _ = target.last_keys(slot, has_window=layer.window > 0)
                heads, width = head.config.num_heads, layer.self_attn.q_norm.weight.numel()
                if keys.shape[-1] != width or heads % keys.shape[0]:
                    raise ConfigurationError(
                        f"the assistant has {heads} heads of width {width}, and the target {keys.shape[0]} key "
                        f"heads of width {keys.shape[-1]}: choose the target that it was made for, or another head"
                    )
        finally:
            target.close(slot)

    @property
    def footprint(self) -> Footprint:
        tensors = self._head.state_dict().values()
        config = self._head.config
        return Footprint(
            weights=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
            token=0,
            logits=config.vocab_size * LOGIT_BYTES,
            row=(8 * config.hidden + 3 * config.intermediate) * self._head.dtype.itemsize,
        )

    def reserve(self, num_sequences: int, length: int) -> None:
        """Do nothing: keys and values are the target's."""

    def open(self, view: SequenceView) -> AssistedSequence:
        return AssistedSequence(view=view)

    def close(self, state: AssistedSequence) -> None:
        state.hidden = state.before = None

    def learn(self, states: Sequence[AssistedSequence], hidden: Sequence[Tensor | None]) -> None:
        """Note the target's hidden states, as `FeatureStepper.learn`."""
        for state, rows in zip(states, hidden, strict=True):
            if rows is not None and len(rows):
                assert state.view.slot is not None, "hidden states come from a slot of the target"
                state.hidden, state.length = rows[-1:].clone(), state.view.slot.length

    def is_ready(self, state: AssistedSequence) -> bool:
        """Return whether the target has read all tokens but the last, and its hidden state is known."""
        slot = state.view.slot
        length = len(state.view.history) - 1
        return slot is not None and state.hidden is not None and slot.length == state.length == length

    def catch_up(self, states: Sequence[AssistedSequence], ahead: Sequence[int]) -> Logits:
        hidden = torch.cat([state.hidden for state in states if state.hidden is not None])
        before = self._head.project(hidden.to(self._target.device))
        tokens = [int(state.view.history.tokens[-1]) for state in states]
        for state in states:
            state.before = before[:0]
        return self._run(states, [[token] for token in tokens], before)

    def feed(self, states: Sequence[AssistedSequence], tokens: IntRows, parents: IntRows) -> Logits:
        before = []
        for state, above in zip(states, parents, strict=True):
            assert state.before is not None, "a tree begins with the text's last token"
            before.append(rows_of(state.before, [parent + 1 for parent in above]))
        return self._run(states, tokens, torch.cat(before))

    def _run(self, states: Sequence[AssistedSequence], tokens: IntRows, before: Tensor) -> Logits:
        counts = [len(row) for row in tokens]
        places = [
            len(state.view.history) - 1 for state, count in zip(states, counts, strict=True) for _ in range(count)
        ]

        def attend_target(window: int, query: Tensor) -> Tensor:
            mixed = []
            for state, rows in zip(states, query.split(counts), strict=True):
                assert state.view.slot is not None, "tested by is_ready"
                keys, values = self._target.last_keys(state.view.slot, has_window=window > 0)
                keys, values = keys[None, :, -window:], values[None, :, -window:]  # all without a window
                mixed.append(attend(rows.transpose(0, 1)[None], keys, values, call=_UNSCALED, mask=None))
            return torch.cat([part[0].transpose(0, 1) for part in mixed])

        device = self._target.device
        joined = to_device([token for row in tokens for token in row], device)
        answered = self._head.run(joined, before, to_device(places, device), attend_target)
        recycled = self._head.recycle(answered)
        for state, rows in zip(states, recycled.split(counts), strict=True):
            assert state.before is not None, "set by the first pass of a tree"
            state.before = torch.cat((state.before, rows))
        return TensorLogits(self._head.logits(answered))

    def keep(self, states: Sequence[AssistedSequence], paths: IntRows) -> None:
        for state in states:
            state.fed.clear()
            state.before = None
