"""Processors that change the likelihood of tokens: logit bias and the penalties on repetition."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from draftree.sampling.processors import Processor, RowContext


class LogitBias(Processor):
    """Adds a number to the logits of some tokens.

    Args:
        biases: by token id; -inf forbids the token.
    """

    __slots__ = ("_biases", "_tokens")

    def __init__(self, biases: Mapping[int, float]) -> None:
        tokens = sorted(biases)
        self._tokens = torch.tensor(tokens, dtype=torch.int64)
        self._biases = torch.tensor([biases[token] for token in tokens], dtype=torch.float64)

    def apply(self, logits: Tensor, context: RowContext) -> Tensor:
        """Add the biases."""
        inside = self._tokens < logits.shape[-1]
        tokens = self._tokens[inside].to(logits.device)
        logits[:, tokens] += self._biases[inside].to(logits.device, logits.dtype)
        return logits


class RepetitionPenalty(Processor):
    """Makes every token of prompt, output and path less likely, independent of its count.

    A positive logit is divided by the penalty, a negative one is multiplied. Source: arXiv 1909.05858.

    Args:
        penalty: above 1 against repetition, below 1 for it.
    """

    __slots__ = ("_penalty",)

    def __init__(self, penalty: float) -> None:
        self._penalty = penalty

    def apply(self, logits: Tensor, context: RowContext) -> Tensor:
        """Apply the penalty."""
        return context.all_counts.update(logits, self._penalised)

    def _penalised(self, values: Tensor, counts: Tensor) -> Tensor:
        return torch.where(values < 0, values * self._penalty, values / self._penalty)


class CountPenalty(Processor):
    """Subtracts from the logits of output and path tokens; prompt tokens are not counted.

    Args:
        presence: subtracted once.
        frequency: subtracted once per occurrence of the token.
    """

    __slots__ = ("_frequency", "_presence")

    def __init__(self, presence: float, frequency: float) -> None:
        self._presence = presence
        self._frequency = frequency

    def apply(self, logits: Tensor, context: RowContext) -> Tensor:
        """Subtract the penalties."""
        return context.output_counts.update(logits, self._penalised)

    def _penalised(self, values: Tensor, counts: Tensor) -> Tensor:
        return values - self._frequency * counts - self._presence
