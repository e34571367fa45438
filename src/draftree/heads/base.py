"""Interfaces of learned heads.

A row is a pair of the state before a position t and the token at t; it predicts the token at t + 1. The state before a
position of the sequence comes from the target's hidden states of token t - 1 (`FeatureHead.project`). The state before
a drafted node comes from the head's own state of the node's parent (`FeatureHead.recycle`), since the target has not
read the parent yet. The parent of a node of the first level is the row of the last written token.

The code of the layers is the same in training and decoding. The two differ in `Attend`: which rows attend to which.
Tensors may have leading dimensions before the rows, such as a batch of sequences in training.

A block head drafts all levels in one pass (`peagle`, `dflash`, `dspark`, `medusa`). A context row is a pair of the
target's hidden states of token t - 1 and the token at t. The last context row of a sequence has its last written token,
the anchor. A pass reads the new context rows of several sequences, whose keys and values are kept, and one block of
rows per sequence, whose keys and values are dropped. It returns one state per level: level 0 predicts the token after
the anchor. A head may change the logits of a level by the tokens before (`follow`), so that the children of different
nodes differ.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from draftree.core.errors import ConfigurationError
from draftree.heads.config import HeadConfig
from draftree.heads.vocabulary import DraftVocabulary
from draftree.models.base import EmbeddingFacts, LanguageModel


@dataclass(frozen=True, slots=True, eq=False)
class TargetParts:
    """Parts of a target, read only. Heads use them without copies.

    Attributes:
        embedding: the embedding as passes use it, not scaled, shape (vocabulary, target hidden).
        output: the output head, shape (vocabulary, target hidden).
        facts: scales, cap and bias of both.
        finish: the final norm: outputs of the last layer, shape (..., target hidden), to the head's input.
        num_layers: number of the target's layers.
    """

    embedding: Tensor
    output: Tensor
    facts: EmbeddingFacts
    finish: Callable[[Tensor], Tensor]
    num_layers: int

    @classmethod
    def of(cls, model: LanguageModel) -> TargetParts:
        """Return the parts of a loaded model."""
        facts = model.embedding_facts()
        output = model.output_head()
        embedding = output if facts.is_tied else model.input_embedding()
        return cls(embedding, output, facts, model.final_norm, model.num_layers)

    @property
    def vocab_size(self) -> int:
        """Number of rows of the output head, the width of the target's logits."""
        return self.output.shape[0]

    @property
    def hidden(self) -> int:
        """Width of the target's hidden states."""
        return self.output.shape[1]


class Attend(Protocol):
    """Attention of the rows of one pass; called once for each layer."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend.

        Args:
            layer: index of the head's layer, from 0.
            query: shape (..., rows, heads, head_dim), rotated, not scaled: scores are multiplied by
                1 / sqrt(head_dim).
            key: keys of the same rows, rotated, shape (..., rows, kv_heads, head_dim).
            value: shape (..., rows, kv_heads, head_dim).

        Returns:
            Shape (..., rows, heads, head_dim).
        """


class Head(nn.Module, ABC):
    """A learned head.

    The names of its parameters are the names of tensors in the layout of speculators. Parts that it shares with the
    target are no parameters: they are set by `bind`, and are neither saved nor trained.

    Args:
        config: its configuration.
        vocabulary: the tokens that it can propose.

    Raises:
        ConfigurationError: the vocabulary does not have the sizes of the configuration.
    """

    def __init__(self, config: HeadConfig, vocabulary: DraftVocabulary) -> None:
        super().__init__()
        sizes = (len(vocabulary), vocabulary.vocab_size)
        if sizes != (config.draft_vocab_size, config.vocab_size):
            raise ConfigurationError(
                f"head: its configuration has {config.draft_vocab_size} of {config.vocab_size} tokens, and its "
                f"vocabulary {sizes[0]} of {sizes[1]}"
            )
        self.config = config
        self.vocabulary = vocabulary

    @abstractmethod
    def bind(self, parts: TargetParts) -> None:
        """Set the parts that are shared with the target.

        Raises:
            ConfigurationError: the head was made for a target of other sizes.
        """

    def require_target(self, parts: TargetParts) -> None:
        """Check that the sizes of a target are those that the head was made for."""
        config = self.config
        for name, made_for, actual in (
            ("hidden states", config.target_hidden, parts.hidden),
            ("a vocabulary", config.vocab_size, parts.vocab_size),
        ):
            if made_for != actual:
                wanted = f" ({config.target_name})" if config.target_name else ""
                raise ConfigurationError(
                    f"the head was made for a target{wanted} with {name} of {made_for}, and this one has {actual}: "
                    "choose the target that it was made for, or another head"
                )
        if config.target_layers not in (0, parts.num_layers):
            raise ConfigurationError(
                f"the head was made for a target of {config.target_layers} layers, and this one has "
                f"{parts.num_layers}: choose the target that it was made for, or name the "
                "hidden states in eagle_config of its config.json"
            )
        missing = [layer for layer in config.features if not -parts.num_layers <= layer + 1 <= parts.num_layers + 1]
        if missing:
            raise ConfigurationError(
                f"the head reads hidden state {missing[0]}, and the target has {parts.num_layers} layers: choose the "
                "target that it was made for, or another head"
            )


class FeatureHead(Head):
    """Head that drafts level by level: `eagle`, `eagle3`, `peagle`, `mtp`."""

    window: int | None = None
    """Number of last positions that a row sees; None for all."""

    @property
    def sinks(self) -> Tensor | None:
        """Logits that enter the sum of the attention's weights only, shape (heads,); None for none."""
        return None

    @abstractmethod
    def project(self, features: Tensor) -> Tensor:
        """Return the states before the tokens that follow, from the target's hidden states.

        Args:
            features: shape (..., rows, features, target hidden), layers as in `config.features`.

        Returns:
            Shape (..., rows, hidden).
        """

    @abstractmethod
    def run(
        self, tokens: Tensor, before: Tensor, positions: Tensor, attend: Attend, chosen: Tensor | None = None
    ) -> Tensor:
        """Return the state of each row, or of some rows.

        Args:
            tokens: token ids of the target, shape (..., rows), int64.
            before: states before the tokens, from `project` or `recycle`, shape (..., rows, hidden).
            positions: positions of the tokens in the sequence, from 1, shape (..., rows), int64.
            attend: attention of the rows.
            chosen: indices of the rows whose states are wanted, for inputs without leading dimensions; None for all.
                A last layer that computes only keys and values of the other rows gives `attend` fewer queries than
                keys.

        Returns:
            Shape (..., rows, hidden).
        """

    @abstractmethod
    def recycle(self, states: Tensor) -> Tensor:
        """Return the states before the children of rows, shape (..., rows, hidden), from the states of the rows."""

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """Return logits of the next tokens, shape (..., rows, draft vocabulary), float32, or float64 for float64."""


@dataclass(frozen=True, slots=True)
class BlockRows:
    """New context rows of several sequences, those of one sequence after those of another.

    Attributes:
        features: hidden states of the token before each row, shape (rows, features, target hidden).
        tokens: token of each row, shape (rows,), int64.
        positions: position of each token in its sequence, from 1, shape (rows,), int64.
        counts: number of rows of each sequence, at least 1.
    """

    features: Tensor
    tokens: Tensor
    positions: Tensor
    counts: Sequence[int]

    @property
    def anchors(self) -> list[int]:
        """Index of the last row of each sequence."""
        ends = []
        total = 0
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
        """Attend from the rows of each block to all context rows of its sequence and to the block.

        Args:
            layer: index of the layer.
            query: shape (sequences, rows of a block, heads, head_dim).
            key: shape (sequences, rows of a block, kv_heads, head_dim).
            value: shape (sequences, rows of a block, kv_heads, head_dim).
            is_causal: whether a row sees only itself and earlier rows of the block.
            window: number of last positions of context that a row sees; 0 for all.

        Returns:
            Shape of `query`.
        """


@dataclass(frozen=True, slots=True, eq=False)
class BlockNodes:
    """Places of a tree after which tokens are drafted.

    Attributes:
        tokens: token of each node, shape (nodes,), int64; the anchor at level 0.
        levels: level whose tokens are drafted, shape (nodes,), int64.
        states: states of these levels, shape (nodes, hidden).
        logits: their logits without bias, shape (nodes, draft vocabulary).
        memory: memory of the parents, shape (nodes, width); None for heads without a memory.
    """

    tokens: Tensor
    levels: Tensor
    states: Tensor
    logits: Tensor
    memory: Tensor | None


class BlockHead(Head):
    """Head that drafts all levels in one pass."""

    has_bias: bool = False
    """Whether `follow` changes logits."""
    first_slot: int = 0
    """Slot of a block that predicts level 0: 0 or 1."""

    @property
    @abstractmethod
    def num_levels(self) -> int:
        """Number of levels of a pass."""

    @abstractmethod
    def run(self, rows: BlockRows, attend: BlockAttend) -> Tensor:
        """Return the states of each block, shape (sequences, slots, hidden); slot `first_slot` + l predicts level l."""

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """Return logits without bias, float32, shape (sequences, slots, draft vocabulary), from states of `run`."""

    def start(self, states: Tensor, anchors: Tensor, previous: Tensor) -> Tensor | None:
        """Return the memory before level 0, shape (sequences, width); None for heads without a memory.

        Args:
            states: as `run` returned them.
            anchors: last token of each sequence, shape (sequences,).
            previous: the tokens before them, shape (sequences,).
        """
        return None

    def follow(self, nodes: BlockNodes) -> tuple[Tensor, Tensor | None]:
        """Return the logits after nodes, shape (nodes, draft vocabulary), float32, and their memory."""
        raise NotImplementedError(f"{type(self).__name__} has no bias: has_bias is False")

    def confidence(self, tokens: Tensor, states: Tensor) -> Tensor | None:
        """Return the estimated probability that the draft of a level is accepted, shape (nodes,).

        Args:
            tokens: as in `BlockNodes`.
            states: as in `BlockNodes`.

        Returns:
            None for heads without the estimate.
        """
        return None
