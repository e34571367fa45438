"""Drafters in training on texts with cached hidden states; feature heads."""

from __future__ import annotations

import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from draftree.heads.base import TargetParts
from draftree.heads.vocabulary import DraftVocabulary
from draftree.train.batches import Batch, collate, cut, first_chain, is_usable, pack
from draftree.train.checkpoints import TrainingError
from draftree.train.data.shards import Text, TrainingData
from draftree.train.evaluate import Evaluation, JudgedStep, StepLogits, evaluate
from draftree.train.losses import Loss
from draftree.train.preparing import Prepared
from draftree.train.settings import TrainSettings
from draftree.train.teacher import TargetRows, Teacher
from draftree.train.unroll import StepTotals, backward, unroll

DISTRIBUTIONS = "distributions"  # folder of the target's distributions in the folder of the data
logger = logging.getLogger(__name__)

TokenWeights = Callable[[Batch, Sequence[int]], Tensor]
"""Weights of the predictions of a batch, given the numbers of its texts; shape (chains,)."""


class Texts(Protocol):
    def __getitem__(self, index: int, /) -> Text: ...


class TextTrainee(ABC):
    """Drafter that is trained on texts with cached hidden states.

    `module`: the drafter, on its device. `seen`: numbers of the texts of training. `unseen`: numbers of the texts of
    evaluations. `vocabulary`: the tokens that it can propose; None for that of a head. `token_weights`: weights of
    predictions; None for equal ones.
    """

    def __init__(
        self,
        module: Any,
        parts: TargetParts,
        data: Texts,
        seen: Sequence[int],
        unseen: Sequence[int],
        settings: TrainSettings,
        *,
        vocabulary: DraftVocabulary | None = None,
        token_weights: TokenWeights | None = None,
    ) -> None:
        self.module = module
        self.vocabulary: DraftVocabulary = module.vocabulary if vocabulary is None else vocabulary
        self._data = data
        self._settings = settings
        self._token_weights = token_weights
        self._device = parts.output.device
        self._seen, self.lengths, self._chains = self._usable(seen)
        self._unseen, self._unseen_lengths, _ = self._usable(unseen)
        if not self._seen:
            raise TrainingError("no text of training has an answer: make more data with 'draftree train data'")
        self._rows = TargetRows(parts, self.vocabulary, settings.temperature)
        self._unkept: list[tuple[Path, range]] = []

    @classmethod
    def of(cls, prepared: Prepared, module: Any, data: Texts, **options: Any) -> Self:
        """Return the trainee of a run."""
        return cls(module, prepared.parts, data, prepared.seen, prepared.unseen, prepared.settings, **options)

    def keep_rows(self, data: TrainingData) -> None:
        """Read the target's distributions from the data's folders, or write them there once all are computed.

        They take a third of the time of the first epoch, and are equal in all runs with the same data and vocabulary.
        """
        for folder in data.folders:
            sums = [shard.sha256 for shard in folder.manifest.shards]
            facts = "".join(map(str, (self._rows.digest(), self._settings.max_length, *sums)))
            digest = hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()
            path = folder.path / DISTRIBUTIONS / f"{digest}.safetensors"
            if path.is_file():
                self._rows.load(path, folder.texts.start)
            # a file of a run on fewer texts of the same data lacks some
            numbers = [number for number in self._seen if number in folder.texts]
            if data.recipe.top_k is None and not self._rows.has(numbers):
                self._unkept.append((path, folder.texts))

    def _usable(self, numbers: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
        """Return the texts with an answer, and their numbers of rows and of chains; one text is in memory at a time."""
        read = self._data.stored if isinstance(self._data, ScaledTexts) else self._data.__getitem__
        texts = ((number, cut(read(number), self._settings.max_length)) for number in numbers)
        usable = [
            (number, text.num_rows, text.num_rows - first_chain(text)) for number, text in texts if is_usable(text)
        ]
        kept, rows, chains = ([row[column] for row in usable] for column in range(3))
        return kept, rows, chains

    def count(self, texts: Sequence[int]) -> int:
        """Return the number of predictions of texts of training."""
        return sum(self._chains[text] for text in texts)

    def batch(self, numbers: Sequence[int]) -> Batch:
        texts = [cut(self._data[number], self._settings.max_length) for number in numbers]
        return collate(texts, device=self._device, dtype=next(self.module.parameters()).dtype)

    def gradients(self, texts: Sequence[int], *, total: float, loss: Loss, levels: int) -> list[StepTotals]:
        """Add the gradients of texts of training; return sums by level."""
        if not texts:
            return []
        numbers = [self._seen[text] for text in texts]
        batch = self.batch(numbers)
        return backward(
            self.states_of(batch, levels),
            lambda step, chains, states: self.logits_of(batch, step, chains, states),
            batch,
            self.teacher(batch, numbers),
            loss=loss,
            weights=self._settings.weights,
            total=total,
            token_weights=None if self._token_weights is None else self._token_weights(batch, numbers),
        )

    @torch.no_grad()
    def teacher(self, batch: Batch, numbers: Sequence[int]) -> Teacher:
        """Return the target's distributions after the start of each chain of a batch, given its texts' numbers."""
        teacher = self._rows.of(batch.texts, numbers)
        if self._unkept and len(self._rows) >= len(self._seen) and self._rows.has(self._seen):
            try:
                for path, texts in self._unkept:
                    self._rows.save(path, texts)
            except OSError as error:
                logger.warning("the target's distributions are not kept for other runs: %s", error)
            self._unkept.clear()
        return teacher

    @abstractmethod
    def states_of(self, batch: Batch, levels: int) -> Iterator[Tensor]:
        """Yield the states of all chains for each level, shape (chains, hidden)."""

    @abstractmethod
    def logits_of(self, batch: Batch, level: int, chains: Tensor, states: Tensor) -> Tensor:
        """Return logits of some chains at a level, from 0; float32."""

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
        batches = map(self.batch, self.unseen_batches(limit))
        return evaluate(batches, self.steps_of, self.vocabulary, self._settings.depth, watch=watch)

    def unseen_batches(self, limit: int | None) -> Iterator[list[int]]:
        """Yield numbers of unseen texts, at most `limit` of them, in batches."""
        lengths = self._unseen_lengths[:limit]
        for chosen in pack(lengths, self._settings.batch_tokens, seed=0, epoch=0) if lengths else ():
            yield [self._unseen[index] for index in chosen]

    def text(self, number: int) -> Text:
        return self._data[number]

    def steps_of(self, batch: Batch, depth: int) -> Iterator[StepLogits]:
        def logits_of(level: int, states: Tensor, chains: Tensor) -> Tensor:
            return self.logits_of(batch, level, chains, states[chains])

        for level, states in enumerate(self.states_of(batch, depth)):
            yield partial(logits_of, level, states)


class HeadTrainee(TextTrainee):
    """Feature head in training; `module` is bound to the target's parts."""

    def states_of(self, batch: Batch, levels: int) -> Iterator[Tensor]:
        return unroll(self.module, batch, levels)

    def logits_of(self, batch: Batch, level: int, chains: Tensor, states: Tensor) -> Tensor:
        return self.module.logits(states)


# Hidden states of size 1 for training: the first product of a head sees them divided by the sizes of their elements.
#
# Elements of a residual stream differ in size by orders of magnitude, so the weights that read them must differ too. An
# optimizer with equal steps for all weights then changes some by many times their size. Training therefore divides
# hidden states by fixed sizes; the division is folded into the first product before a head is written.

SIZED_TEXTS = 64  # texts from which sizes are taken


class ScaledTexts:
    """Texts with some of their hidden states, divided by sizes.

    `places`: places of the hidden states that are kept, in order. `sizes`: sizes of their elements, shape (places,
    target hidden).
    """

    def __init__(self, data: Texts, places: Sequence[int], sizes: Tensor) -> None:
        self._data, self._places, self.sizes = data, list(places), sizes

    def __getitem__(self, index: int) -> Text:
        text = self._data[index]
        features = text.features[:, self._places]
        return replace(text, features=(features.float() / self.sizes).to(features.dtype))

    def stored(self, index: int) -> Text:
        """Return a text with all hidden states as they are stored, which takes no computation."""
        return self._data[index]


@torch.no_grad()
def feature_sizes(texts: Iterable[Text], places: Sequence[int]) -> Tensor:
    """Return the root mean square of each element of hidden states, shape (places, target hidden), float32.

    Elements that are nearly constant 0 count as a tenth of the median size of their layer.
    """
    total, count = torch.zeros(()), 0
    for text in texts:
        total = total + text.features[:, list(places)].double().square().sum(dim=0)
        count += text.num_rows
    sizes = (total / max(1, count)).sqrt()
    least = 0.1 * sizes.median(dim=-1, keepdim=True).values
    return sizes.maximum(least).clamp_min(1e-6).float()


@torch.no_grad()
def fold(head: Any, sizes: Tensor) -> None:
    """Change the first product so that it reads hidden states as they are; nothing for norms before it."""
    if not (head.config.fc_norm or head.config.norm_before_fc):
        head.fc.weight.copy_(head.fc.weight.float() / sizes.flatten().to(head.fc.weight.device))


def unfold(head: Any, sizes: Tensor) -> None:
    """Undo `fold`."""
    fold(head, 1 / sizes)


def sizes_for(config: Any, texts: Iterable[Text], places: Sequence[int]) -> Tensor:
    """Return sizes for a head: 1 if it has norms before its first product."""
    sizes = feature_sizes(texts, places)
    return torch.ones_like(sizes) if config.fc_norm or config.norm_before_fc else sizes
