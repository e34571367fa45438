"""Training of a feature head on texts with cached hidden states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from draftree.heads.base import FeatureHead
from draftree.heads.target_parts import TargetParts
from draftree.train.batches import Batch, collate, cut, first_chain, is_usable, pack
from draftree.train.data.texts import Text
from draftree.train.errors import TrainingError
from draftree.train.evaluate import Evaluation, evaluate
from draftree.train.judging import JudgedStep, StepLogits
from draftree.train.losses import Loss
from draftree.train.settings import TrainSettings
from draftree.train.target_rows import TargetRows
from draftree.train.unroll import StepTotals, backward, unroll

__all__ = ["HeadTrainee"]

TokenWeights = Callable[[Batch, Sequence[int]], Tensor]
"""Weights of the predictions of a batch, given the numbers of its texts; shape (chains,)."""


class HeadTrainee:
    """A head in training: `Trainee` of the loop.

    Args:
        head: the head, bound to the target's parts, on its device.
        parts: the target's parts.
        data: all texts.
        seen: numbers of the texts of training.
        unseen: numbers of the texts of evaluations.
        settings: settings of the run.
        category: category of a prompt, given its number; empty for none.
        token_weights: weights of predictions; None for equal ones.

    Raises:
        TrainingError: no text of training has an answer.
    """

    def __init__(
        self,
        head: FeatureHead,
        parts: TargetParts,
        data: Sequence[Text],
        seen: Sequence[int],
        unseen: Sequence[int],
        settings: TrainSettings,
        *,
        category: Callable[[int], str] = lambda prompt: "",
        token_weights: TokenWeights | None = None,
    ) -> None:
        self.module = head
        self._data, self._settings, self._category, self._token_weights = data, settings, category, token_weights
        self._device = parts.output.device
        self._seen, self.lengths = self._usable(seen)
        self._unseen, self._unseen_lengths = self._usable(unseen)
        if not self._seen:
            raise TrainingError("no text of training has an answer: make more data with 'draftree train data'")
        self._rows = TargetRows(parts, head.vocabulary, settings.temperature)

    def _usable(self, numbers: Sequence[int]) -> tuple[list[int], list[int]]:
        texts = [(number, cut(self._data[number], self._settings.max_length)) for number in numbers]
        kept = [(number, text.num_rows) for number, text in texts if is_usable(text)]
        return [number for number, _ in kept], [length for _, length in kept]

    def count(self, texts: Sequence[int]) -> int:
        """Return the number of predictions of texts of training."""
        return sum(self.lengths[text] - first_chain(self._data[self._seen[text]]) for text in texts)

    def batch(self, numbers: Sequence[int]) -> Batch:
        """Return the batch of texts, given by their numbers in the data."""
        texts = [cut(self._data[number], self._settings.max_length) for number in numbers]
        return collate(texts, device=self._device, dtype=next(self.module.parameters()).dtype)

    def gradients(self, texts: Sequence[int], *, total: float, loss: Loss, levels: int) -> list[StepTotals]:
        """Add the gradients of texts of training; return sums by level."""
        if not texts:
            return []
        numbers = [self._seen[text] for text in texts]
        batch = self.batch(numbers)
        with torch.no_grad():
            teacher = self._rows.of(batch.texts, numbers)
        return backward(
            self.module,
            batch,
            teacher,
            steps=levels,
            loss=loss,
            weights=self._settings.weights,
            total=total,
            token_weights=None if self._token_weights is None else self._token_weights(batch, numbers),
        )

    def check(self, texts: Sequence[int]) -> None:
        """Raise TrainingError if hidden states of these texts are not finite."""
        for number in (self._seen[text] for text in texts):
            text = self._data[number]
            for states in (text.features, text.last, None if text.top is None else text.top.logits):
                if states is not None and not states.isfinite().all():
                    raise TrainingError(
                        f"text {number} of the data (prompt {text.prompt_id}) has hidden states that are not finite: "
                        "make the data again without this prompt, or in float32"
                    )

    def evaluate(
        self, limit: int | None, *, watch: Callable[[Batch, list[JudgedStep]], None] | None = None
    ) -> Evaluation:
        """Return the acceptance on unseen texts."""
        return evaluate(
            self._unseen_batches(limit), self.steps_of, self.module.vocabulary, self._settings.depth, watch=watch
        )

    def _unseen_batches(self, limit: int | None) -> Iterator[tuple[Batch, list[str]]]:
        lengths = self._unseen_lengths[:limit]
        for chosen in pack(lengths, self._settings.batch_tokens, seed=0, epoch=0) if lengths else ():
            batch = self.batch([self._unseen[index] for index in chosen])
            yield batch, [self._category(text.prompt_id) for text in batch.texts]

    def steps_of(self, batch: Batch, depth: int) -> Iterator[StepLogits]:
        """Yield the head's logits of each level."""
        for states in unroll(self.module, batch, depth):
            yield lambda chains, states=states: self.module.logits(states[chains])
