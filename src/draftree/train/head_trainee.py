"""Drafters in training on texts with cached hidden states; feature heads."""

from __future__ import annotations

import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from draftree.heads.base import FeatureHead, TargetParts
from draftree.heads.vocabulary import DraftVocabulary
from draftree.train.batches import Batch, collate, cut, first_chain, is_usable, pack
from draftree.train.checkpoints import TrainingError
from draftree.train.data.shards import DataFolder, Text, TrainingData
from draftree.train.evaluate import Evaluation, JudgedStep, StepLogits, evaluate
from draftree.train.losses import Loss
from draftree.train.settings import TrainSettings
from draftree.train.teacher import TargetRows, Teacher
from draftree.train.unroll import StepTotals, backward, unroll

DISTRIBUTIONS = "distributions"
"""Folder of the target's distributions in the folder of the data."""
logger = logging.getLogger(__name__)

TokenWeights = Callable[[Batch, Sequence[int]], Tensor]
"""Weights of the predictions of a batch, given the numbers of its texts; shape (chains,)."""


class Texts(Protocol):
    """Texts by number."""

    def __getitem__(self, index: int, /) -> Text: ...


@runtime_checkable
class ChangedTexts(Protocol):
    """Texts with hidden states that are computed at each access, from stored ones."""

    def stored(self, index: int) -> Text:
        """Return a text with its hidden states as they are stored."""


class TextTrainee(ABC):
    """Drafter that is trained on texts with cached hidden states.

    Args:
        module: the drafter, on its device.
        vocabulary: the tokens that it can propose.
        seen: numbers of the texts of training.
        unseen: numbers of the texts of evaluations.
        category: category of a prompt, given its number; empty for none.
        token_weights: weights of predictions; None for equal ones.
    """

    def __init__(
        self,
        module: nn.Module,
        vocabulary: DraftVocabulary,
        parts: TargetParts,
        data: Texts,
        seen: Sequence[int],
        unseen: Sequence[int],
        settings: TrainSettings,
        *,
        category: Callable[[int], str] = lambda prompt: "",
        token_weights: TokenWeights | None = None,
    ) -> None:
        self._module, self.vocabulary = module, vocabulary
        self._data, self._settings, self._category, self._token_weights = data, settings, category, token_weights
        self._device = parts.output.device
        self._seen, self.lengths, self._chains = self._usable(seen)
        self._unseen, self._unseen_lengths, _ = self._usable(unseen)
        if not self._seen:
            raise TrainingError("no text of training has an answer: make more data with 'draftree train data'")
        self._rows = TargetRows(parts, vocabulary, settings.temperature)
        self._unkept: list[tuple[Path, range]] = []

    def keep_rows(self, data: TrainingData) -> None:
        """Read the target's distributions from the data's folders, or write them there once all are computed.

        They take a third of the time of the first epoch, and are equal in all runs with the same data and vocabulary.
        """
        for folder in data.folders:
            path = folder.path / DISTRIBUTIONS / f"{self._digest(folder)}.safetensors"
            if path.is_file():
                self._rows.load(path, folder.texts.start)
            # a file of a run on fewer texts of the same data lacks some
            own = [number for number in self._seen if number in folder.texts]
            if data.recipe.top_k is None and not self._rows.has(own):
                self._unkept.append((path, folder.texts))

    def _digest(self, folder: DataFolder) -> str:
        facts = hashlib.blake2b(digest_size=8)
        sums = [shard.sha256 for shard in folder.manifest.shards]
        for value in (self._rows.digest(), self._settings.max_length, *sums):
            facts.update(str(value).encode())
        return facts.hexdigest()

    def _write_rows(self) -> None:
        if not self._unkept or len(self._rows) < len(self._seen) or not self._rows.has(self._seen):
            return
        try:
            for path, texts in self._unkept:
                self._rows.save(path, texts)
        except OSError as error:
            logger.warning("the target's distributions are not kept for other runs: %s", error)
        self._unkept.clear()

    @property
    def module(self) -> nn.Module:
        return self._module

    def _usable(self, numbers: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
        """Return the texts with an answer, and their numbers of rows and of chains; one text is in memory at a time."""
        found: tuple[list[int], list[int], list[int]] = ([], [], [])
        read = self._data.stored if isinstance(self._data, ChangedTexts) else self._data.__getitem__
        for number in numbers:
            text = cut(read(number), self._settings.max_length)
            if is_usable(text):
                for kept, value in zip(found, (number, text.num_rows, text.num_rows - first_chain(text)), strict=True):
                    kept.append(value)
        return found

    def count(self, texts: Sequence[int]) -> int:
        """Return the number of predictions of texts of training."""
        return sum(self._chains[text] for text in texts)

    def batch(self, numbers: Sequence[int]) -> Batch:
        texts = [cut(self._data[number], self._settings.max_length) for number in numbers]
        return collate(texts, device=self._device, dtype=next(self._module.parameters()).dtype)

    def gradients(self, texts: Sequence[int], *, total: float, loss: Loss, levels: int) -> list[StepTotals]:
        """Add the gradients of texts of training; return sums by level."""
        if not texts:
            return []
        numbers = [self._seen[text] for text in texts]
        batch = self.batch(numbers)
        teacher = self.teacher(batch, numbers)
        weights = None if self._token_weights is None else self._token_weights(batch, numbers)
        return backward(
            self.states_of(batch, levels),
            lambda step, chains, states: self.logits_of(batch, step, chains, states),
            batch,
            teacher,
            loss=loss,
            weights=self._settings.weights,
            total=total,
            token_weights=weights,
        )

    @torch.no_grad()
    def teacher(self, batch: Batch, numbers: Sequence[int]) -> Teacher:
        """Return the target's distributions after the start of each chain of a batch, given its texts' numbers."""
        found = self._rows.of(batch.texts, numbers)
        self._write_rows()
        return found

    @abstractmethod
    def states_of(self, batch: Batch, levels: int) -> Iterator[Tensor]:
        """Yield the states of all chains for each level, shape (chains, hidden)."""

    @abstractmethod
    def logits_of(self, batch: Batch, level: int, chains: Tensor, states: Tensor) -> Tensor:
        """Return logits of some chains, float32.

        Args:
            level: the level, from 0.
        """

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
        return evaluate(self._unseen_batches(limit), self.steps_of, self.vocabulary, self._settings.depth, watch=watch)

    def _unseen_batches(self, limit: int | None) -> Iterator[tuple[Batch, list[str]]]:
        for numbers in self.unseen_batches(limit):
            batch = self.batch(numbers)
            yield batch, [self._category(text.prompt_id) for text in batch.texts]

    def unseen_batches(self, limit: int | None) -> Iterator[list[int]]:
        """Yield numbers of unseen texts, at most `limit` of them, in batches."""
        lengths = self._unseen_lengths[:limit]
        for chosen in pack(lengths, self._settings.batch_tokens, seed=0, epoch=0) if lengths else ():
            yield [self._unseen[index] for index in chosen]

    def text(self, number: int) -> Text:
        return self._data[number]

    def steps_of(self, batch: Batch, depth: int) -> Iterator[StepLogits]:
        """Yield the logits of each level."""
        for level, states in enumerate(self.states_of(batch, depth)):
            yield partial(self._logits_of_chains, batch, level, states)

    def _logits_of_chains(self, batch: Batch, level: int, states: Tensor, chains: Tensor) -> Tensor:
        return self.logits_of(batch, level, chains, states[chains])


class HeadTrainee(TextTrainee):
    """Feature head in training.

    Args:
        head: the head, bound to the target's parts, on its device.
    """

    def __init__(
        self,
        head: FeatureHead,
        parts: TargetParts,
        data: Texts,
        seen: Sequence[int],
        unseen: Sequence[int],
        settings: TrainSettings,
        **more: Any,
    ) -> None:
        super().__init__(head, head.vocabulary, parts, data, seen, unseen, settings, **more)
        self.head = head

    def states_of(self, batch: Batch, levels: int) -> Iterator[Tensor]:
        return unroll(self.head, batch, levels)

    def logits_of(self, batch: Batch, level: int, chains: Tensor, states: Tensor) -> Tensor:
        return self.head.logits(states)


# Hidden states of size 1 for training: the first product of a head sees them divided by the sizes of their elements.
#
# Elements of a residual stream differ in size by orders of magnitude, so the weights that read them must differ too. An
# optimizer with equal steps for all weights then changes some by many times their size. Training therefore divides
# hidden states by fixed sizes; the division is folded into the first product before a head is written.

SIZED_TEXTS = 64
"""Texts from which sizes are taken."""


class ScaledTexts:
    """Texts with some of their hidden states, divided by sizes.

    Args:
        places: places of the hidden states that are kept, in order.
        sizes: sizes of their elements, shape (places, target hidden).
    """

    def __init__(self, data: Texts, places: Sequence[int], sizes: Tensor) -> None:
        self._data, self._places, self.sizes = data, list(places), sizes

    def __getitem__(self, index: int) -> Text:
        text = self._data[index]
        features = text.features[:, self._places]
        return replace(text, features=(features.float() / self.sizes).to(features.dtype))

    def stored(self, index: int) -> Text:
        """Return a text with all hidden states as they are stored."""
        return self._data[index]


@torch.no_grad()
def feature_sizes(texts: Iterable[Text], places: Sequence[int]) -> Tensor:
    """Return the root mean square of each element of hidden states, shape (places, target hidden), float32.

    Elements that are nearly constant 0 count as a tenth of the median size of their layer.

    Args:
        places: places of hidden states, in order.
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
    if _reads_plainly(head):
        head.fc.weight.copy_(head.fc.weight.float() / sizes.flatten().to(head.fc.weight.device))


@torch.no_grad()
def unfold(head: Any, sizes: Tensor) -> None:
    """Undo `fold`."""
    if _reads_plainly(head):
        head.fc.weight.copy_(head.fc.weight.float() * sizes.flatten().to(head.fc.weight.device))


def _reads_plainly(head: Any) -> bool:
    return not (head.config.fc_norm or head.config.norm_before_fc)


def sizes_for(config: Any, texts: Iterable[Text], places: Sequence[int]) -> Tensor:
    """Return sizes for a head: 1 if it has norms before its first product."""
    sizes = feature_sizes(texts, places)
    return torch.ones_like(sizes) if config.fc_norm or config.norm_before_fc else sizes
