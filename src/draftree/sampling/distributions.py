"""Logits become distributions and picks: for target and drafter alike, here and nowhere else.

A row is a node of a token tree (or its root). Its distribution depends on the request's controls and on the tokens
before it: the history and the drafted tokens on the way from the root to the node.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftree.core.noise import Noise, gumbel
from draftree.core.tensors import to_host
from draftree.sampling.controls import Controls
from draftree.sampling.history import History
from draftree.sampling.logits import Logits, RowNoise, perturbed
from draftree.sampling.logits_processors import Ban, RowContext, places_on


@dataclass(frozen=True, slots=True)
class DistributionRows:
    """Rows of logits that belong to one sequence."""

    history: History  # the written tokens; the last one is the root
    controls: Controls  # the request's sampling controls
    # for each row the drafted tokens from the root down to its node; empty for the root itself
    paths: Sequence[Sequence[int]]

    @property
    def positions(self) -> list[int]:
        """Position of the token that each row chooses."""
        start = len(self.history)
        return [start + len(path) for path in self.paths]


class _Search(NamedTuple):
    """The logits and the noise of a search, and whether it may overwrite the logits' memory."""

    logits: Logits
    noise: RowNoise
    overwrites: bool


class Distributions:
    """The processed distributions of all rows of a pass.

    A tensor is made when an operation first needs one. As a context manager, what the logits do for torch operations
    (`Logits.computing`) ends with the context.

    Args:
        rows: whose rows they are, in order; together they cover `logits`.
        overwrites: the memory of `logits` may be used, and they are not read again: at this width fresh memory costs
            more than arithmetic.
    """

    def __init__(self, logits: Logits, rows: Sequence[DistributionRows], *, overwrites: bool = False) -> None:
        self._source = logits
        self._overwrites = overwrites
        self._scope: ExitStack | None = None
        self.rows = rows
        self._starts = list(accumulate((len(entry.paths) for entry in rows), initial=0))
        self._raw: Tensor | None = None
        self._logits: Tensor | None = None
        self._picks: list[int] | None = None
        self._is_sound: list[bool] | None = None

    def __enter__(self) -> Distributions:
        self._scope = ExitStack()
        return self

    def __exit__(self, *error: object) -> None:
        if self._scope is not None:
            self._scope.close()
        self._scope = None

    @property
    def raw(self) -> Tensor:
        """The model's logits, shape (rows, vocab)."""
        if self._raw is None:
            if self._scope is not None:
                self._scope.enter_context(self._source.computing())
            self._raw = self._source.tensor()
        return self._raw

    @property
    def width(self) -> int:
        return self._source.width

    @property
    def logits(self) -> Tensor:
        """Processed logits over temperature, shape (rows, vocab); -inf where a control forbids the token."""
        if self._logits is None:
            self._logits = self._processed()
        return self._logits

    def __len__(self) -> int:
        return len(self.rows)

    def of(self, index: int) -> NodeDistributions:
        return NodeDistributions(self, index)

    def span(self, index: int) -> slice:
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
                context = RowContext(entry.history, entry.paths)
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
        good = to_host(self.logits.amax(dim=-1).isfinite()) if self._is_sound is None else self._is_sound
        if rows is None:
            return [all(good[self.span(index)]) for index in range(len(self.rows))]
        pairs = zip(self._starts, rows, strict=False)
        return [all(good[start + row] for row in counted) for start, counted in pairs]

    def perturbed(self, streams: Sequence[Noise]) -> Tensor:
        """Processed logits over temperature, plus each sequence's noise; at temperature 0 without noise.

        Returns:
            Shape (rows, vocab). The largest entry of a row is its pick; the k largest are k draws without
            replacement from its distribution (Gumbel-top-k).
        """
        return perturbed(self.logits, self._noise(streams))

    def perturbed_rows(self, streams: Sequence[Noise]) -> Tensor:
        """As `perturbed`, but with one noise per row: children of different nodes are independent draws."""
        scores = self.logits.clone()
        token_ids = torch.arange(scores.shape[-1], dtype=torch.int32, device=scores.device)
        for index, entry in enumerate(self.rows):
            if entry.controls.temperature > 0:
                span = self.span(index)
                keys = [s.keys(position) for s, position in zip(streams[span], entry.positions, strict=True)]
                scores[span] += gumbel(keys, token_ids)
        return scores

    def picks(self) -> list[int]:
        """The pick of every row under its request's own noise; one transfer from the device."""
        if self._picks is None and self._source.has_controls:
            self._picks, self._is_sound = self._source.picks(())
        if self._picks is None:
            with self._searched([entry.controls.noise for entry in self.rows]) as search:
                self._picks, self._is_sound = search.logits.picks(search.noise)
        return self._picks

    def ranked(
        self, streams: Sequence[Noise], count: int, *, in_place: bool = False
    ) -> tuple[list[list[int]], list[list[float]]]:
        """The tokens of highest perturbed score, in descending order, and what share of the row's they have.

        Returns:
            For each row token ids, and logarithms of the softmax of the perturbed scores.
        """
        with self._searched(streams) as search:
            top = search.logits.top(search.noise, count, overwrites=in_place and search.overwrites)
        pairs = zip(top.scores, top.totals, strict=True)
        return top.tokens, [[score - total for score in scores] for scores, total in pairs]

    @contextmanager
    def _searched(self, streams: Sequence[Noise]) -> Iterator[_Search]:
        """The logits to search: the model's own, without a copy, where only a temperature and bans change them."""
        if self._logits is not None or not all(entry.controls.only_bans for entry in self.rows):
            overwrites = self._overwrites or self.logits is not self.raw
            yield _Search(self._source.replaced(self.logits), self._noise(streams), overwrites)
            return
        noise, places = self._noise(streams, divides=True), self._banned()
        if not len(places[0]):
            yield _Search(self._source, noise, self._overwrites)
            return
        raw = self.raw
        index = places_on(raw, *places)
        with torch.inference_mode():  # a pass in this mode returns tensors that are not writable outside of it
            kept = raw[index]
            raw[index] = -math.inf
        try:
            yield _Search(self._source.replaced(raw), noise, self._overwrites)
        finally:
            with torch.inference_mode():
                raw[index] = kept

    def _banned(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows and tokens that the bans of all sequences forbid."""
        rows, tokens = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
        for index, entry in enumerate(self.rows):
            context = RowContext(entry.history, entry.paths)
            for processor in entry.controls.processors:
                assert isinstance(processor, Ban), "only bans are written in place"
                banned_rows, banned_tokens = processor.places(context)
                rows.append(banned_rows + self._starts[index])
                tokens.append(banned_tokens)
        return np.concatenate(rows), np.concatenate(tokens)

    def _noise(self, streams: Sequence[Noise], *, divides: bool = False) -> RowNoise:
        """What is added to each row; `divides` if the rows are not divided by the temperature yet."""
        return [
            (stream.keys(position), entry.controls.temperature if divides else 1.0)
            if entry.controls.temperature
            else None
            for entry, stream in zip(self.rows, streams, strict=True)
            for position in entry.positions
        ]


class NodeDistributions:
    """The distributions of one sequence: row 0 is the root's, row 1 + i is tree node i's."""

    __slots__ = ("_distributions", "_span", "source")

    def __init__(self, distributions: Distributions, index: int) -> None:
        self._distributions = distributions
        self._span = distributions.span(index)
        self.source = distributions.rows[index]  # whose distributions they are: history, controls and paths

    @property
    def positions(self) -> list[int]:
        return self.source.positions

    @property
    def logits(self) -> Tensor:
        return self._distributions.logits[self._span]

    @property
    def raw(self) -> Tensor:
        return self._distributions.raw[self._span]

    def picks(self) -> list[int]:
        return self._distributions.picks()[self._span]

    def probs(self, rows: Sequence[int] | slice = slice(None)) -> Tensor:
        """The distribution of these rows, shape (rows, vocab), sums to 1; at temperature 0 all on the largest logit."""
        logits = self.logits[rows]
        if self.source.controls.temperature > 0:
            return torch.softmax(logits, dim=-1)
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(dim=-1, keepdim=True), 1.0)
