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

from draftree.core.tree import ROOT
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
        keeps_hidden: whether what comes out of the last layer is wanted.
        capture: layers whose input is wanted; `end` stands for what comes out of the last layer.
    """

    first: int
    end: int
    part: LayerSubset | None = None
    hidden: Tensor | None = None
    keeps_hidden: bool = False
    capture: tuple[int, ...] = ()

    @property
    def num_sublayers(self) -> int:
        """Attentions and perceptrons that every row runs through."""
        if self.part is not None:
            return self.part.num_sublayers(self.end)
        return 2 * (self.end - self.first)

    def is_whole(self, num_layers: int) -> bool:
        """Whether the rows run through all of so many layers, from tokens to logits, and nothing else is wanted."""
        wants_more = self.keeps_hidden or bool(self.capture)
        return (self.first, self.end) == (0, num_layers) and self.part is None and not wants_more

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
        captured: what went into the captured layers, shape (rows, captured layers, hidden); None if nothing was
            captured.
    """

    logits: Logits
    hidden: Tensor | None = None
    captured: Tensor | None = None


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
        """Which nodes of a tree have the same tokens from the prefix on as a partial node."""
        nodes: list[int | None] = []
        for token, parent in zip(tokens, parents, strict=True):
            above = ROOT if parent == ROOT else nodes[parent]
            nodes.append(None if above is None else self._places.get((above, int(token))))
        pairs = [(place, node) for place, node in enumerate(nodes) if node is not None]
        missing = [place for place, node in enumerate(nodes) if node is None]
        return Found([place for place, _ in pairs], [node for _, node in pairs], missing)
