"""Logits become distributions and picks: for target and drafter alike, here and nowhere else.

A row is a node of a token tree (or its root). Its distribution depends on the request's controls and on the tokens
before it: the history and the drafted tokens on the way from the root to the node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftree.core import transfer
from draftree.core.noise import Noise, gumbel
from draftree.core.transfer import to_device
from draftree.sampling.controls import Controls
from draftree.sampling.history import History
from draftree.sampling.processors import RowContext
from draftree.sampling.search import argmax, decided, leading, log_total, read_pairs
from draftree.sampling.searcher import RowNoise, RowsAt, can_search, exact_picks, rows_at, rows_of, search


@dataclass(frozen=True, slots=True)
class DistributionRows:
    """Rows of logits that belong to one sequence.

    Attributes:
        history: the written tokens; the last one is the root.
        controls: the request's sampling controls.
        paths: for each row the drafted tokens from the root down to its node; empty for the root itself.
    """

    history: History
    controls: Controls
    paths: Sequence[Sequence[int]]

    @property
    def positions(self) -> list[int]:
        """Position of the token that each row chooses."""
        start = len(self.history)
        return [start + len(path) for path in self.paths]


class Distributions:
    """The processed distributions of all rows of a pass.

    Args:
        raw: the model's logits, shape (rows, vocab); None if `at` alone knows them.
        rows: whose rows they are, in order; together they cover `raw`.
        overwrites: work in `raw` itself, which is not read again: at this width fresh memory costs more than
            arithmetic.
        at: where `raw` lies, if that is known.
        before_torch: called before the first of torch's operations on rows; a search needs none.
    """

    def __init__(
        self,
        raw: Tensor | None,
        rows: Sequence[DistributionRows],
        *,
        overwrites: bool = False,
        at: RowsAt | None = None,
        before_torch: Callable[[], None] | None = None,
    ) -> None:
        self._raw = raw
        self._at = at
        self._before_torch = before_torch
        self._overwrites = overwrites
        self.rows = rows
        starts = [0]
        for entry in rows:
            starts.append(starts[-1] + len(entry.paths))
        self._starts = starts
        self._logits: Tensor | None = None
        self._picks: list[int] | None = None
        self._sound: list[bool] | None = None

    @property
    def raw(self) -> Tensor:
        """The model's logits, shape (rows, vocab)."""
        if self._before_torch is not None:
            self._before_torch()
        if self._raw is None:
            self._raw = rows_of(self._raw, self._at)
        return self._raw

    @property
    def width(self) -> int:
        """Tokens of a row."""
        return self.raw.shape[-1] if self._at is None else self._at.width

    @property
    def logits(self) -> Tensor:
        """Processed logits over temperature, shape (rows, vocab); -inf where a control forbids the token."""
        if self._logits is None:
            self._logits = self._processed()
        return self._logits

    def __len__(self) -> int:
        return len(self.rows)

    def of(self, index: int) -> NodeDistributions:
        """The distributions of one sequence."""
        return NodeDistributions(self, index)

    def span(self, index: int) -> slice:
        """Where the rows of a sequence lie."""
        return slice(self._starts[index], self._starts[index + 1])

    def _processed(self) -> Tensor:
        if all(entry.controls.is_plain for entry in self.rows):
            return self.raw
        logits = self.raw if self._overwrites else self.raw.clone()
        for index, entry in enumerate(self.rows):
            controls = entry.controls
            if controls.is_plain:
                continue
            span = self.span(index)
            part = logits[span]
            if controls.processors:
                context = RowContext(entry.history, entry.paths, part.device)
                for processor in controls.processors:
                    part = processor.apply(part, context)
            if controls.temperature not in (0.0, 1.0):
                part = part.div_(controls.temperature)
            for keep in controls.filters:
                part = keep.apply(part)
            if part.data_ptr() != logits[span].data_ptr():
                logits[span] = part
        return logits

    def finite(self, rows: Sequence[Sequence[int]] | None = None) -> list[bool]:
        """For each sequence, whether its rows have a token to choose and no NaN.

        Args:
            rows: for each sequence the rows that count (0 the root's, 1 + i node i's); None for all.
        """
        if not self.rows:
            return []
        good = transfer.to_host(self.logits.amax(dim=-1).isfinite()) if self._sound is None else self._sound
        if rows is None:
            return [all(good[self.span(index)]) for index in range(len(self.rows))]
        return [all(good[start + row] for row in own) for start, own in zip(self._starts, rows, strict=False)]

    def perturbed(self, streams: Sequence[Noise], *, in_place: bool = False) -> Tensor:
        """Processed logits over temperature, plus each sequence's noise; at temperature 0 without noise.

        Args:
            streams: one noise a sequence.
            in_place: the distributions may be lost on the way.

        Returns:
            Shape (rows, vocab). The largest entry of a row is its pick; the k largest are k draws without
            replacement from its distribution (Gumbel-top-k).
        """
        noisy = [index for index, entry in enumerate(self.rows) if entry.controls.temperature > 0]
        if not noisy:
            return self.logits
        token_ids = torch.arange(self.logits.shape[-1], dtype=torch.int32, device=self.logits.device)
        if len(noisy) == len(self.rows):
            noise = _noise_of_rows(self._keys(noisy, streams), token_ids)
            is_whole = noise.dtype == self.logits.dtype and noise.shape == self.logits.shape
            if in_place:
                return self.logits.add_(noise)
            return noise.add_(self.logits) if is_whole else self.logits + noise
        scores = self.logits.clone()
        for index in noisy:
            scores[self.span(index)] += _noise_of_rows(self._keys([index], streams), token_ids)
        return scores

    def perturbed_rows(self, streams: Sequence[Noise]) -> Tensor:
        """As `perturbed`, with a noise of its own for every row: children of different nodes are independent draws."""
        scores = self.logits.clone()
        token_ids = torch.arange(scores.shape[-1], dtype=torch.int32, device=scores.device)
        for index, entry in enumerate(self.rows):
            if entry.controls.temperature > 0:
                span = self.span(index)
                keys = [s.keys(position) for s, position in zip(streams[span], entry.positions, strict=True)]
                scores[span] += gumbel(keys, token_ids)
        return scores

    def _keys(self, indices: Sequence[int], streams: Sequence[Noise]) -> list[tuple[int, int]]:
        return [streams[index].keys(position) for index in indices for position in self.rows[index].positions]

    def picks(self) -> list[int]:
        """The pick of every row under its request's own noise; one transfer from the device."""
        if self._picks is None:
            streams = [entry.controls.noise for entry in self.rows]
            if self._can_search(1):
                at, logits = self._searched()
                self._picks, self._sound = exact_picks(at, self._noise(streams), logits)
            elif transfer.on_host(self.raw):
                self._picks = argmax(self.perturbed(streams))
            else:
                self._picks, self._sound = decided(self.perturbed(streams), self.logits)
        return self._picks

    def ranked(
        self, streams: Sequence[Noise], count: int, *, in_place: bool = False
    ) -> tuple[list[list[int]], list[list[float]]]:
        """The tokens of highest perturbed score, in descending order, and what share of the row's they have.

        Args:
            streams: one noise a sequence.
            count: tokens a row.
            in_place: the distributions may be lost on the way.

        Returns:
            For each row token ids, and logarithms of the softmax of the perturbed scores.
        """
        if self._can_search(count):
            found = search(self._searched()[0], self._noise(streams), count)
            pairs = zip(found.scores, found.totals, strict=True)
            return found.tokens, [[score - total for score in scores] for scores, total in pairs]
        perturbed = self.perturbed(streams, in_place=in_place)
        tokens, scores = leading(perturbed, count)
        return read_pairs(tokens, scores - log_total(perturbed))

    def _can_search(self, count: int) -> bool:
        if not can_search(count):
            return False
        self._at = self._at or rows_at(self.raw)
        return self._at is not None and count <= self._at.width

    @property
    def _is_raw(self) -> bool:
        """Whether a search does it all: it divides by the temperature, which spares a copy of the logits."""
        return self._logits is None and not any(e.controls.processors or e.controls.filters for e in self.rows)

    def _searched(self) -> tuple[RowsAt, Callable[[], Tensor]]:
        """Where lies what is searched, and what gives it."""
        is_raw = self._is_raw
        at = self._at if is_raw else rows_at(self.logits)
        assert at is not None, "processed logits lie as the model's own"
        return at, lambda: self.raw if is_raw else self.logits

    def _noise(self, streams: Sequence[Noise]) -> RowNoise:
        """What a search adds to each row."""
        is_raw = self._is_raw
        return [
            (stream.keys(position), entry.controls.temperature if is_raw else 1.0)
            if entry.controls.temperature
            else None
            for entry, stream in zip(self.rows, streams, strict=True)
            for position in entry.positions
        ]


def _noise_of_rows(keys: Sequence[tuple[int, int]], token_ids: Tensor) -> Tensor:
    """Noise of every row, or one row for all; nodes of one depth stand at one position, whose noise is hashed once."""
    distinct = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    noise = gumbel(list(distinct), token_ids)
    if len(distinct) in (1, len(keys)):
        return noise
    return noise[to_device([distinct[key] for key in keys], token_ids.device)]


class NodeDistributions:
    """The distributions of one sequence: row 0 is the root's, row 1 + i is tree node i's."""

    __slots__ = ("_distributions", "_index")

    def __init__(self, distributions: Distributions, index: int) -> None:
        self._distributions = distributions
        self._index = index

    @property
    def source(self) -> DistributionRows:
        """Whose distributions they are: history, controls and paths."""
        return self._distributions.rows[self._index]

    @property
    def positions(self) -> list[int]:
        """Position of the token that each row chooses."""
        return self._distributions.rows[self._index].positions

    @property
    def logits(self) -> Tensor:
        """Processed logits over temperature, shape (rows, vocab); -inf where a control forbids the token."""
        return self._distributions.logits[self._distributions.span(self._index)]

    @property
    def raw(self) -> Tensor:
        """The model's own logits, shape (rows, vocab)."""
        return self._distributions.raw[self._distributions.span(self._index)]

    def picks(self) -> list[int]:
        """The request's pick at every row."""
        return self._distributions.picks()[self._distributions.span(self._index)]

    def probs(self, rows: Sequence[int] | slice = slice(None)) -> Tensor:
        """The distribution of these rows, shape (rows, vocab), sums to 1; at temperature 0 all on the largest logit."""
        logits = self.logits[rows]
        if self._distributions.rows[self._index].controls.temperature > 0:
            return torch.softmax(logits, dim=-1)
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(dim=-1, keepdim=True), 1.0)
