"""Live beams, and the selection of their continuations on tensors without waiting for the device.

The order is total: score descending, then rank of the parent beam, then token id.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftree.beam.forest import Tip
from draftree.core.tensors import on_host

Columns = tuple[list[float], list[int], list[float]]
"""Scores, places and log-probabilities of the candidates of a group."""


@dataclass(slots=True, eq=False)
class Beam:
    """A sequence in progress.

    Attributes:
        tips: end of the beam in the forest of each model.
        draft_tips: end of the beam in the forests of the drafter.
        tokens: generated tokens.
        score: cumulative log-probability.
        logprobs: what each token added to it.
        ranks: for each token the rank of the beam that it continued.
        state: state of the strategy.
        trie_node: node of the trie that the sequence has reached.
        attention: for each token the weights of cross-attention with which it was predicted, if they are wanted.
    """

    tips: list[Tip]
    tokens: tuple[int, ...] = ()
    score: float = 0.0
    logprobs: tuple[float, ...] = ()
    ranks: tuple[int, ...] = ()
    state: Any = None
    trie_node: int = 0
    draft_tips: list[Tip] = field(default_factory=list)
    attention: tuple[np.ndarray, ...] = ()

    @property
    def is_scored(self) -> bool:
        """Whether every model has scored it."""
        return all(tip.row is not None for tip in self.tips)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A continuation on the host: `logprob` is what the token added to the cumulative `score`."""

    parent: Beam
    rank: int
    token: int
    score: float
    logprob: float


class Candidates(NamedTuple):
    """Continuations of the live beams of one search, best first, or in the order of their draws.

    Attributes:
        scores: cumulative log-probabilities, shape (count,); -inf for an impossible candidate.
        places: rank of the parent times the vocabulary plus the token id, int64, shape (count,).
        logprobs: what the token added to the score, shape (count,).
    """

    scores: Tensor
    places: Tensor
    logprobs: Tensor


def at_places(totals: Tensor, logprobs: Tensor, places: Tensor) -> Candidates:
    """Return candidates at flat `places` of `totals` and `logprobs`, both of shape (beams, vocab)."""
    return Candidates(totals.reshape(-1)[places], places, logprobs.reshape(-1)[places])


def best(values: Tensor, count: int) -> Tensor:
    """Return the places of the `count` largest entries of a vector, of equals the first; with NaN any places."""
    found, places = values.topk(count)
    lowest = found[-1]
    size = len(values)
    if on_host(values) and int((values >= lowest).sum()) == count:
        by_place = places.argsort()
        return places[by_place][found[by_place].argsort(descending=True, stable=True)]
    # entries above the lowest are unambiguous; of those equal to it the first ones are taken
    ids = torch.arange(size, device=values.device)
    firsts = torch.where(values == lowest, ids, size).topk(count, largest=False).values
    merged = torch.cat((torch.where(found > lowest, places, size), firsts)).sort().values
    ranks = torch.where(merged < size, values[merged.clamp(max=size - 1)], -math.inf)
    ranks = torch.where(merged < size, ranks.clamp(min=torch.finfo(values.dtype).min), ranks)
    # with NaN nothing compares equal: any places do, since the caller raises
    return merged[ranks.argsort(descending=True, stable=True)][:count].clamp_(max=size - 1)


def best_of_all(logprobs: Tensor, scores: Tensor, count: int) -> Candidates:
    """Return the best candidates of all beams, from `logprobs` (beams, vocab) and cumulative `scores` (beams,)."""
    totals = logprobs + scores[:, None]
    return at_places(totals, logprobs, best(totals.reshape(-1), min(count, totals.numel())))


def best_of_each(logprobs: Tensor, scores: Tensor, count: int) -> Candidates:
    """Return the best `count` candidates of every beam, all sorted together."""
    beams, vocab = logprobs.shape
    totals = logprobs + scores[:, None]
    count = min(count, vocab)
    places = torch.cat([best(totals[beam], count) + beam * vocab for beam in range(beams)])
    return at_places(totals, logprobs, places[totals.reshape(-1)[places].argsort(descending=True, stable=True)])


def drawn(logprobs: Tensor, scores: Tensor, count: int, generator: torch.Generator, *, width: int) -> Candidates:
    """Draw candidates without replacement from the softmax of the cumulative scores, in the order of the draws.

    The draws are those of `width` rows, as in transformers; there are fewer if fewer have a probability above 0.
    """
    totals = logprobs + scores[:, None]
    missing = (width - len(totals)) * totals.shape[1]
    weights = torch.nn.functional.pad(totals.reshape(-1).softmax(dim=-1).cpu(), (0, missing))
    count = min(count, int((weights > 0).sum()))
    places = torch.multinomial(weights, count, generator=generator).to(totals.device)
    return at_places(totals, logprobs, places)


def keep_top(logprobs: Tensor, *, top_k: int, top_p: float, least: int = 1) -> Tensor:
    """Return rows of log-probabilities with -inf outside of the filters, which keep at least `least` tokens of a row.

    Tokens equal to the last of the top k are kept too, and so is the one that crosses `top_p`.
    """
    vocab = logprobs.shape[-1]
    if top_k:
        lowest = logprobs.topk(min(max(top_k, least), vocab), dim=-1).values[:, -1:]
        logprobs = logprobs.masked_fill(logprobs < lowest, -math.inf)
    if top_p < 1.0:
        ascending, order = logprobs.sort(dim=-1)
        tail = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
        tail[:, -min(least, vocab) :] = False
        logprobs = logprobs.masked_fill(tail.scatter(-1, order, tail), -math.inf)
    return logprobs
