"""Partial nodes: tokens computed by a subset of a model's layers, and how a whole pass continues from them.

A partial node's keys and values are stored in its slot like those of a tentative node. If the subset is the first
layers, a pass over the same token after the same ancestors starts from the stored hidden state and runs the other
layers only.
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
    """Range of layers that the rows of one pass run through.

    Attributes:
        first: first layer.
        end: layer after the last.
        part: attentions and perceptrons that are skipped; None for none.
        hidden: input of the first layer, shape (rows, hidden); None for the tokens' embeddings.
        keeps_hidden: whether the output of the last layer is returned, to continue from it.
        capture: layers whose input, the residual stream, is returned for every row; `end` selects the output of the
            last layer that is run, before the final norm.

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
        """Layers whose input a pass must copy: `capture`, then `end` if `keeps_hidden` is set."""
        return (*self.capture, self.end) if self.keeps_hidden else self.capture

    @property
    def is_plain(self) -> bool:
        """Whether rows start at embeddings, no sublayer is skipped and only logits are returned."""
        return self.part is None and self.hidden is None and not self.keeps_hidden and not self.capture

    def output(self, logits: Logits, captured: Tensor | None) -> RangeOutput:
        """Return the output of a pass that copied the inputs of `captured_layers`, shape (rows, layers, hidden)."""
        if captured is None:
            return RangeOutput(logits)
        hidden = captured[:, -1] if self.keeps_hidden else None
        return RangeOutput(logits, hidden, captured[:, : len(self.capture)] if self.capture else None)

    @property
    def num_sublayers(self) -> int:
        """Number of attentions and perceptrons that every row runs through."""
        if self.part is not None:
            return self.part.num_sublayers(self.end)
        return 2 * (self.end - self.first)

    def is_whole(self, num_layers: int) -> bool:
        """Return whether the rows run through all `num_layers` layers and only logits are returned."""
        return (self.first, self.end) == (0, num_layers) and self.is_plain

    def skipped(self, num_layers: int) -> np.ndarray | None:
        """Return two flags per layer: whether its attention, and its perceptron, are skipped."""
        if self.part is None or not (self.part.attention or self.part.mlp):
            return None
        flags = np.zeros((num_layers, 2), dtype=np.uint8)
        flags[sorted(self.part.attention), 0] = 1
        flags[sorted(self.part.mlp), 1] = 1
        return flags


@dataclass(frozen=True, slots=True)
class RangeOutput:
    """Output of the layers of a range, the norm and the head.

    Attributes:
        logits: logits of the requested rows.
        hidden: output of the last layer, shape (rows, hidden); None if it was not requested.
        captured: input of the captured layers, for every row in the order of the jobs, shape
            (rows, captured layers, hidden), float32, or float64 for a float64 model; None if none was requested.
    """

    logits: Logits
    hidden: Tensor | None = None
    captured: Tensor | None = None


def require_capture(capture: Sequence[int], *, first: int, end: int) -> None:
    """Check that a pass over a range of layers can capture these.

    Args:
        capture: indices of layers.
        first: first layer that is run.
        end: layer after the last; as an index, the output of the last.

    Raises:
        ConfigurationError: an index is out of range.
    """
    strange = [layer for layer in capture if not first <= layer <= end]
    if strange:
        raise ConfigurationError(
            f"layer {strange[0]} cannot be captured: this pass runs layers {first} to {end - 1}, so choose indices "
            f"from {first} to {end}, where {end} stands for the output of the last layer"
        )


@dataclass(frozen=True, slots=True)
class Found:
    """Match between the nodes of a tree and partial nodes.

    Attributes:
        places: nodes of the tree that are partial nodes already.
        sources: for each of them the partial node.
        missing: nodes of the tree that are not.
    """

    places: list[int]
    sources: list[int]
    missing: list[int]


class PartialTree:
    """Partial nodes of one slot. Mutated by the slot's model only.

    Args:
        slot: the slot.
        part: the layers that the nodes ran through.
    """

    def __init__(self, slot: KVSlot, part: LayerSubset) -> None:
        self.part = part
        self.nodes = KVSlot(slot.index)
        """Bookkeeping of the nodes in the form that passes use: same prefix, same positions."""
        self.nodes.copy_prefix(slot.length)
        self.nodes.offset = slot.offset
        self._places: dict[tuple[int, int], int] = {}
        self._hidden: list[Tensor] = []

    @property
    def end(self) -> int:
        """First layer that the nodes did not run through."""
        assert self.part.end is not None, "only the first layers have an end"
        return self.part.end

    @property
    def keeps_hidden(self) -> bool:
        """Whether a whole pass can continue from the nodes."""
        return bool(self._hidden)

    def note(self, tokens: Sequence[int], parents: Sequence[int], hidden: Tensor | None) -> None:
        """Add nodes with their hidden states, shape (nodes, hidden), or None if no pass can continue from them."""
        first = self.nodes.num_tentative - len(tokens)
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True), first):
            self._places.setdefault((parent, int(token)), node)
        if hidden is not None:
            self._hidden.append(hidden)

    def hidden(self) -> Tensor:
        """Return hidden states of all nodes, shape (nodes, hidden)."""
        return torch.cat(self._hidden)

    def find(self, tokens: Sequence[int], parents: Sequence[int]) -> Found:
        """Match the nodes of a tree with partial nodes that have the same tokens since the prefix."""
        nodes = NodeMap.by_tokens(tokens, parents, self._places, num_targets=self.nodes.num_tentative)
        missing = [node for node, sketched in enumerate(nodes.targets) if sketched is None]
        return Found(nodes.kept, [sketched for sketched in nodes.targets if sketched is not None], missing)
