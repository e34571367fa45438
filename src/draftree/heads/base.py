"""Interfaces of learned heads.

A row is a pair of the state before a position t and the token at t; it predicts the token at t + 1. The state before a
position of the text comes from the target's hidden states of token t - 1 (`FeatureHead.project`). The state before a
drafted node comes from the head's own state of the node's parent (`FeatureHead.recycle`), since the target has not read
the parent yet. The parent of a node of the first level is the row of the last written token.

The code of the layers is the same in training and decoding. The two differ in `Attend`: which rows attend to which.
Tensors may have leading dimensions before the rows, such as a batch of texts in training.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol

from torch import Tensor, nn

from draftree.core.errors import ConfigurationError
from draftree.heads.config import HeadConfig
from draftree.heads.target_parts import TargetParts
from draftree.heads.vocabulary import DraftVocabulary


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
        """Check that the sizes of a target are those that the head was made for.

        Raises:
            ConfigurationError: they differ.
        """
        config = self.config
        for name, made_for, found in (
            ("hidden states", config.target_hidden, parts.hidden),
            ("a vocabulary", config.vocab_size, parts.vocab_size),
        ):
            if made_for != found:
                wanted = f" ({config.target_name})" if config.target_name else ""
                raise ConfigurationError(
                    f"the head was made for a target{wanted} with {name} of {made_for}, and this one has {found}: "
                    "choose the target that it was made for, or another head"
                )
        missing = [layer for layer in config.features if not -parts.num_layers <= layer + 1 <= parts.num_layers + 1]
        if missing:
            raise ConfigurationError(
                f"the head reads hidden state {missing[0]}, and the target has {parts.num_layers} layers: choose the "
                "target that it was made for, or another head"
            )


class FeatureHead(Head):
    """Head that drafts level by level: `eagle`, `eagle3`, `peagle`, `mtp`."""

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
            positions: positions of the tokens in the text, from 1, shape (..., rows), int64.
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
