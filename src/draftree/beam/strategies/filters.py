"""Filters of the draws: the most likely tokens of each row."""

from __future__ import annotations

import math

from torch import Tensor


def keep_top(logprobs: Tensor, *, top_k: int, top_p: float, least: int = 1) -> Tensor:
    """Return log-probabilities with -inf at tokens outside of the filters; the others stay unchanged.

    Args:
        logprobs: shape (rows, vocab).
        top_k: number of most likely tokens; 0 keeps all. Tokens equal to the last of them are kept too.
        top_p: the most likely tokens that together have this probability, the one that crosses it included.
        least: tokens of a row that are kept in any case.
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
