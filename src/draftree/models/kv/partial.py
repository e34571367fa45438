"""Partial nodes: tokens that a part of a model's layers has computed, and how a whole pass continues from them.

A partial node's keys and values lie in its slot where a tentative node's would. If the part is the first layers, a
pass over the same token after the same ancestors starts from the hidden state that was kept, and runs the other layers
only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftree.core.errors import ConfigurationError
from draftree.core.node_map import NodeMap
from draftree.models.base import LayerSubset
from draftree.models.kv.slots import KVSlot
from draftree.sampling.logits import Logits


@dataclass(frozen=True, slots=True)
class LayerRange:
    """The layers that the rows of one pass run through.

    Attributes:
        first: the first of them.
        end: the one behind the last.
        part: names attentions and perceptrons that are left out; None for none.
        hidden: what goes into the first layer, shape (rows, hidden); None for the tokens' embeddings.
        keeps_hidden: whether the output of the last layer is wanted, to continue from it.
        capture: layers whose input, the residual stream that enters them, is wanted for every row; `end` stands for
            the output of the last layer that is run, before the final norm.

    Raises:
        ConfigurationError: `capture` names a layer whose input does not occur in this pass.
    """

    first: int
    end: int
    part: LayerSubset | None = None
    hidden: Tensor | None = None
    keeps_hidden: bool = False
    capture: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.capture:
            require_capture(self.capture, first=self.first, end=self.end)

    @property
    def captured_layers(self) -> tuple[int, ...]:
        """Layers whose input a pass must copy: those to capture, then the one that `keeps_hidden` stands for."""
        return (*self.capture, self.end) if self.keeps_hidden else self.capture

    @property
    def is_plain(self) -> bool:
        """Whether rows start at their tokens' embeddings, no sublayer is left out and only logits are wanted."""
        return self.part is None and self.hidden is None and not self.keeps_hidden and not self.capture

    def output(self, logits: Logits, captured: Tensor | None) -> RangeOutput:
        """The output of a pass that copied the inputs of `captured_layers`, shape (rows, layers, hidden)."""
        if captured is None:
            return RangeOutput(logits)
        hidden = captured[:, -1] if self.keeps_hidden else None
        return RangeOutput(logits, hidden, captured[:, : len(self.capture)] if self.capture else None)

    @property
    def num_sublayers(self) -> int:
        """Attentions and perceptrons that every row runs through."""
        if self.part is not None:
            return self.part.num_sublayers(self.end)
        return 2 * (self.end - self.first)

    def is_whole(self, num_layers: int) -> bool:
        """Whether the rows run through all of so many layers, from tokens to logits, and nothing else is wanted."""
        return (self.first, self.end) == (0, num_layers) and self.is_plain

    def skipped(self, num_layers: int) -> np.ndarray | None:
        """Two flags a layer: whether its attention, and its perceptron, are left out."""
        if self.part is None or not (self.part.attention or self.part.mlp):
            return None
        flags = np.zeros((num_layers, 2), dtype=np.uint8)
        flags[sorted(self.part.attention), 0] = 1
        flags[sorted(self.part.mlp), 1] = 1
        return flags


@dataclass(frozen=True, slots=True)
class RangeOutput:
    """What the layers of a range, the norm and the head computed.

    Attributes:
        logits: of the requested rows.
        hidden: what came out of the last layer, shape (rows, hidden); None if it was not requested.
        captured: the residual stream that enters the captured layers, for every row in the order of the jobs, shape
            (rows, captured layers, hidden), float32, or float64 for a float64 model; None if none was requested.
    """

    logits: Logits
    hidden: Tensor | None = None
    captured: Tensor | None = None


def require_capture(capture: Sequence[int], *, first: int, end: int) -> None:
    """Refuse layers whose input does not occur between these two.

    Args:
        capture: indices of layers.
        first: the first layer that is run.
        end: the one after the last, which stands for the output of the last.

    Raises:
        ConfigurationError: one of them is outside.
    """
    strange = [layer for layer in capture if not first <= layer <= end]
    if strange:
        raise ConfigurationError(
            f"layer {strange[0]} cannot be captured: this pass runs layers {first} to {end - 1}, so choose indices "
            f"from {first} to {end}, where {end} stands for the output of the last layer"
        )


@dataclass(frozen=True, slots=True)
class Found:
    """Which nodes of a tree are partial nodes already.

    Attributes:
        places: the nodes of the tree that are.
        sources: for each of them the partial node.
        missing: the nodes of the tree that are not.
    """

    places: list[int]
    sources: list[int]
    missing: list[int]


class PartialTree:
    """The partial nodes of one slot. Mutated by the slot's model only.

    Args:
        slot: whose nodes they are.
        part: the layers that it goes through.
    """

    def __init__(self, slot: KVSlot, part: LayerSubset) -> None:
        self.part = part
        self.nodes = KVSlot(slot.index)
        """The tree as passes read one: behind the same prefix, at the same places."""
        self.nodes.copy_prefix(slot.length)
        self.nodes.offset = slot.offset
        self._places: dict[tuple[int, int], int] = {}
        self._hidden: list[Tensor] = []

    @property
    def end(self) -> int:
        """The first layer that the nodes did not go through."""
        assert self.part.end is not None, "asked of the first layers only"
        return self.part.end

    @property
    def keeps_hidden(self) -> bool:
        """Whether a pass can go on from here."""
        return bool(self._hidden)

    def note(self, tokens: Sequence[int], parents: Sequence[int], hidden: Tensor | None) -> None:
        """Note what a pass made of the last nodes: their hidden states, shape (nodes, hidden), if they are of use."""
        first = self.nodes.num_tentative - len(tokens)
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True), first):
            self._places.setdefault((parent, int(token)), node)
        if hidden is not None:
            self._hidden.append(hidden)

    def hidden(self) -> Tensor:
        """Hidden states of all nodes, shape (nodes, hidden)."""
        return torch.cat(self._hidden)

    def find(self, tokens: Sequence[int], parents: Sequence[int]) -> Found:
        """Which nodes of a tree have the same tokens from the prefix on as a sketched node."""
        nodes = NodeMap.by_tokens(tokens, parents, self._places, num_targets=self.nodes.num_tentative)
        missing = [node for node, sketched in enumerate(nodes.targets) if sketched is None]
        return Found(nodes.kept, [sketched for sketched in nodes.targets if sketched is not None], missing)
