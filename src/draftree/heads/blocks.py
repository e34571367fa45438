"""Interface of heads that draft all levels in one pass: `peagle`, `dflash`, `dspark`, `medusa`.

A context row is a pair of the target's hidden states of token t - 1 and the token at t. The last context row of a text
has its last written token, the anchor. A pass reads the new context rows of several texts, whose keys and values are
kept, and one block of rows per text, whose keys and values are dropped. It returns one state per level: level 0
predicts the token after the anchor.

A head may add a bias to the logits of a level that depends on the token before (`follow`), so that the children of
different nodes differ.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from draftree.heads.base import Head


@dataclass(frozen=True, slots=True)
class BlockRows:
    """New context rows of several texts, those of one text after those of another.

    Attributes:
        features: hidden states of the token before each row, shape (rows, features, target hidden).
        tokens: token of each row, shape (rows,), int64.
        positions: position of each token in its text, from 1, shape (rows,), int64.
        counts: number of rows of each text, at least 1.
    """

    features: Tensor
    tokens: Tensor
    positions: Tensor
    counts: Sequence[int]

    @property
    def anchors(self) -> list[int]:
        """Index of the last row of each text."""
        ends, total = [], 0
        for count in self.counts:
            total += count
            ends.append(total - 1)
        return ends


class BlockAttend(Protocol):
    """Attention of one pass. Every layer calls `context` and then `block`."""

    def context(
        self, layer: int, query: Tensor | None, key: Tensor, value: Tensor, *, window: int = 0
    ) -> Tensor | None:
        """Keep keys and values of the context rows; attend to them and to those of earlier passes, causally.

        Args:
            layer: index of the layer.
            query: shape (rows, heads, head_dim); None for heads whose context rows do not attend.
            key: shape (rows, kv_heads, head_dim).
            value: shape (rows, kv_heads, head_dim).
            window: number of last positions that a row sees; 0 for all.

        Returns:
            Shape (rows, heads, head_dim); None without queries.
        """

    def block(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, window: int = 0
    ) -> Tensor:
        """Attend from the rows of each block to all context rows of its text and to the block.

        Args:
            layer: index of the layer.
            query: shape (texts, rows of a block, heads, head_dim).
            key: shape (texts, rows of a block, kv_heads, head_dim).
            value: shape (texts, rows of a block, kv_heads, head_dim).
            is_causal: whether a row sees only itself and earlier rows of the block.
            window: number of last positions of context that a row sees; 0 for all.

        Returns:
            Shape of `query`.
        """


class BlockHead(Head):
    """Head that drafts all levels in one pass."""

    has_bias: bool = False
    """Whether `follow` returns a bias."""
    first_slot: int = 0
    """Slot of a block that predicts level 0: 0 or 1."""

    @property
    @abstractmethod
    def num_levels(self) -> int:
        """Number of levels of a pass."""

    @abstractmethod
    def run(self, rows: BlockRows, attend: BlockAttend) -> Tensor:
        """Return the states of each block, shape (texts, slots, hidden); slot `first_slot` + l predicts level l."""

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """Return logits without bias, float32, shape (texts, slots, draft vocabulary), from states of `run`."""

    def start(self, states: Tensor, anchors: Tensor) -> Tensor | None:
        """Return the memory before level 0, shape (texts, width); None for heads without a memory.

        Args:
            states: as `run` returned them.
            anchors: last token of each text, shape (texts,).
        """
        return None

    def follow(self, memory: Tensor | None, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the bias of nodes at the level of `states`, after the tokens of their parents.

        Args:
            memory: memory of the parents, shape (nodes, width); None for heads without a memory.
            tokens: tokens of the parents, shape (nodes,), int64; the anchor at level 0.
            states: states of the level, shape (nodes, hidden).

        Returns:
            The bias, shape (nodes, draft vocabulary), float32, and the memory of the nodes.
        """
        raise NotImplementedError(f"{type(self).__name__} has no bias: has_bias is False")

    def confidence(self, tokens: Tensor, states: Tensor) -> Tensor | None:
        """Return the estimated probability that the draft of a level is accepted, shape (nodes,).

        Args:
            tokens: as in `follow`.
            states: as in `follow`.

        Returns:
            None for heads without the estimate.
        """
        return None
