"""Batches of texts for training: their rows one after another, and the places of the rows in a padded rectangle."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from draftree.train.data.shards import Text


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Places of rows in a padded rectangle of (texts, longest)."""

    places: Tensor  # index of each row in the flattened rectangle, shape (rows,)
    num_texts: int  # rectangles' first size
    longest: int

    @classmethod
    def of(cls, counts: Sequence[int], device: torch.device) -> Layout:
        """Return the layout of texts with these numbers of rows."""
        longest = max(counts)
        places = torch.cat([torch.arange(count) + text * longest for text, count in enumerate(counts)])
        return cls(places.to(device), len(counts), longest)

    @property
    def texts(self) -> Tensor:
        """Text of each row, shape (rows,)."""
        return self.places // self.longest

    @property
    def columns(self) -> Tensor:
        """Place of each row in the line of its text, shape (rows,)."""
        return self.places % self.longest

    def padded(self, rows: Tensor) -> Tensor:
        """Return rows in the rectangle, shape (texts, longest, ...), zeros elsewhere."""
        empty = rows.new_zeros(self.num_texts * self.longest, *rows.shape[1:])
        return empty.index_copy(0, self.places, rows).view(self.num_texts, self.longest, *rows.shape[1:])

    def flat(self, padded: Tensor) -> Tensor:
        """Return the rows of a rectangle, shape (rows, ...)."""
        return padded.flatten(0, 1).index_select(0, self.places)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Rows of some texts. A row is a token of a text other than its first and last; it predicts the next token.

    Chains are the rows from which drafts start in training: those that predict tokens of the answer. Step s of the
    chain of token t drafts from the tokens up to t + s, of which the last s are read as a drafter reads its own.
    """

    texts: Sequence[Text]
    tokens: Tensor  # token of each row, shape (rows,), int64
    features: Tensor  # hidden states of the token before, shape (rows, features, target hidden)
    positions: Tensor  # position of the token in its text, shape (rows,), int64
    rows: Layout
    chains: Tensor  # row of each chain, ascending, shape (chains,)
    chain_rows: Layout
    picks: Tensor  # the target's token after the start of each chain, shape (chains,), int64
    room: Tensor  # for each chain the number of steps that its text has room for, shape (chains,); at least 1

    @property
    def num_chains(self) -> int:
        """Number of chains: tokens that the loss counts at the first step."""
        return len(self.chains)

    def step_rows(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the row whose token each chain reads at a step, and whether its text has room for the step.

        Chains without room get the last row of their text, so that all steps have the same rows.
        """
        has_room = self.room > step
        return self.chains + torch.minimum(self.room - 1, torch.full_like(self.room, step)), has_room

    def step_chains(self, step: int) -> Tensor:
        """Return for each chain the chain that starts at the token which it reads at a step, clamped as rows are."""
        chains = torch.arange(self.num_chains, device=self.chains.device)
        return chains + torch.minimum(self.room - 1, torch.full_like(self.room, step))


def collate(texts: Sequence[Text], *, device: torch.device, dtype: torch.dtype) -> Batch:
    """Return the batch of at least one text; `is_usable` holds for each."""
    firsts = [first_chain(text) for text in texts]
    counts = [text.num_rows - 1 for text in texts]
    chain_counts = [text.num_rows - first for text, first in zip(texts, firsts, strict=True)]
    starts = [0, *accumulate(counts)]

    def joined(parts: Iterable[Tensor]) -> Tensor:
        return torch.cat(list(parts)).to(device)

    return Batch(
        texts=texts,
        tokens=joined(text.tokens[1:-1] for text in texts),
        features=joined(text.features[:-1] for text in texts).to(dtype),
        positions=joined(torch.arange(1, count + 1) for count in counts),
        rows=Layout.of(counts, device),
        chains=joined(
            torch.arange(first - 1, count) + start for first, count, start in zip(firsts, counts, starts, strict=False)
        ),
        chain_rows=Layout.of(chain_counts, device),
        picks=joined(text.tokens[first + 1 :] for text, first in zip(texts, firsts, strict=True)),
        room=joined(torch.arange(count, 0, -1) for count in chain_counts),
    )


def first_chain(text: Text) -> int:
    """Return the first token whose row predicts a token of the answer: the prompt's last, but not a text's first."""
    return max(1, text.prompt_length - 1)


def is_usable(text: Text) -> bool:
    """Return whether a text has a row that predicts a token of the answer."""
    return text.num_rows > first_chain(text)


def cut(text: Text, max_length: int | None) -> Text:
    """Return the first tokens of a text; None for no limit."""
    if max_length is None or len(text.tokens) <= max_length:
        return text
    rows = max_length - 1
    top = text.top
    return replace(
        text,
        tokens=text.tokens[:max_length],
        features=text.features[:rows],
        last=None if text.last is None else text.last[:rows],
        top=None if top is None else replace(top, ids=top.ids[:rows], logits=top.logits[:rows], lse=top.lse[:rows]),
    )


def pack(lengths: Sequence[int], batch_tokens: int, *, seed: int, epoch: int, window: int = 64) -> Iterator[list[int]]:
    """Yield batches of texts of similar lengths, in a random order that depends on seed and epoch only.

    Texts are shuffled, sorted by length within windows of some batches, and packed until a batch is full.

    `batch_tokens`: maximum number of padded tokens of a batch; a longer text is a batch of its own. `window`: number of
    batches' worth of texts that are sorted together.
    """
    random = np.random.default_rng((seed, epoch))
    order = random.permutation(len(lengths))
    mean = max(1.0, float(np.mean(lengths)))
    span = max(1, int(window * max(1.0, batch_tokens / mean)))
    batches: list[list[int]] = []
    for start in range(0, len(order), span):
        batch: list[int] = []
        for index in sorted(order[start : start + span].tolist(), key=lambda index: lengths[index]):
            if not batch or (len(batch) + 1) * lengths[index] > batch_tokens:
                batches.append(batch := [])
            batch.append(index)
    for index in random.permutation(len(batches)):
        yield batches[index]
