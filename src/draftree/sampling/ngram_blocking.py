"""N-gram blocking on tensors, for all beams of a batch at once.

A token is banned if it would complete an n-gram that has occurred before: its score becomes -inf, in place. No mask of
the vocabulary's width is made: work and memory grow with the tokens of the texts, not with the vocabulary. Source of
the rule: arXiv 1705.04304, section 2.5.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from draftree.core.tensors import on_host


def ban_repeated_ngrams(
    scores: Tensor,
    tokens: Tensor,
    *,
    size: int,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    waits: bool | None = None,
) -> Tensor:
    """Ban the tokens that would repeat an n-gram of their own row.

    Args:
        scores: logits or log-probabilities, float of shape (rows, vocab); changed in place. Ids at or above its width
            are ignored.
        tokens: integers of shape (rows, width) on the device of the scores; row i's text is in the columns from
            `starts[i]` up to `lengths[i]`, and other columns may hold anything.
        size: tokens of an n-gram, at least 1. At 1 every token of the row's text is banned, an end-of-text token or
            start token among them included.
        lengths: ends of the texts, shape (rows,); None for the whole width.
        starts: beginnings of the texts, shape (rows,); None for column 0. The prompt's length excludes the prompt.
        waits: whether the host may wait for the device in order to write only to the places found; None for only
            if the scores are in host memory. Otherwise the scores at the row's own tokens are written without a wait.

    Returns:
        The same tensor.
    """
    contexts = _contexts(tokens, size, lengths, starts)[:, None]
    return _ban(scores, _Texts(tokens, starts, lengths), contexts, waits=waits)


def ban_ngrams_of_source(
    scores: Tensor,
    tokens: Tensor,
    source: Tensor,
    *,
    size: int,
    lengths: Tensor | None = None,
    starts: Tensor | None = None,
    source_lengths: Tensor | None = None,
    source_starts: Tensor | None = None,
    waits: bool | None = None,
) -> Tensor:
    """Ban the tokens that would write an n-gram of another text, such as the source of an encoder-decoder model.

    Args:
        scores: as for `ban_repeated_ngrams`.
        tokens: as for `ban_repeated_ngrams`.
        source: integers of shape (sources, source width); every source belongs to rows / sources adjacent rows.
        size: as for `ban_repeated_ngrams`; at 1 every token of the source is banned.
        lengths: ends of the rows' texts.
        starts: beginnings of the rows' texts.
        source_lengths: ends of the sources, shape (sources,); None for the whole width.
        source_starts: beginnings of the sources, shape (sources,); None for column 0.
        waits: as for `ban_repeated_ngrams`.

    Returns:
        The same tensor as `scores`.
    """
    if len(tokens) % len(source):
        raise ValueError(f"{len(tokens)} rows cannot be divided among {len(source)} sources: give rows of all sources")
    contexts = _contexts(tokens, size, lengths, starts)
    contexts = contexts.view(len(source), len(tokens) // len(source), size - 1)
    return _ban(scores, _Texts(source, source_starts, source_lengths), contexts, waits=waits)


class _Texts(NamedTuple):
    """Texts whose n-grams are banned: the columns from `starts` up to `lengths` of each row of `tokens`."""

    tokens: Tensor
    starts: Tensor | None
    lengths: Tensor | None

    def are_inside(self, rows: Tensor, first: Tensor, size: int) -> Tensor:
        """Whether the n-grams that begin at these columns are inside the texts of these rows; the shapes broadcast."""
        inside = torch.ones((), dtype=torch.bool, device=first.device)
        if self.starts is not None:
            inside = inside & (first >= self.starts[rows])
        return inside if self.lengths is None else inside & (first + size <= self.lengths[rows])


def _contexts(tokens: Tensor, size: int, lengths: Tensor | None, starts: Tensor | None) -> Tensor:
    """Return the last size - 1 tokens of each row; -1 where a row has fewer."""
    if size < 1:
        raise ValueError(f"size={size}: an n-gram has at least 1 token")
    rows, width = tokens.shape
    if lengths is None:
        lengths = torch.full((rows,), width, device=tokens.device)
    columns = lengths[:, None] - torch.arange(size - 1, 0, -1, device=tokens.device)
    missing = columns < (0 if starts is None else starts[:, None])
    if not width:
        return columns.fill_(-1)
    return tokens.gather(1, columns.clamp(min=0)).masked_fill(missing, -1)


def _ban(scores: Tensor, texts: _Texts, contexts: Tensor, *, waits: bool | None) -> Tensor:
    """Write -inf to the scores of the tokens that followed each context in its text.

    Args:
        scores: shape (groups * members, vocab).
        texts: one for each group.
        contexts: shape (groups, members, size - 1).
        waits: whether the host may wait for the device.
    """
    if texts.tokens.shape[1] < contexts.shape[2] + 1:
        return scores
    may_wait = on_host(scores) if waits is None else waits
    return _ban_places(scores, texts, contexts) if may_wait else _ban_followers(scores, texts, contexts)


def _ban_places(scores: Tensor, texts: _Texts, contexts: Tensor) -> Tensor:
    """Find the places first, comparing one column of all texts and few places of the others; the host waits."""
    groups, members, last = contexts.shape
    tokens = texts.tokens
    num_windows = tokens.shape[1] - last
    if last:
        found = contexts[:, :, -1:] == tokens[:, None, last - 1 : last - 1 + num_windows]
    else:
        found = torch.ones(groups, members, num_windows, dtype=torch.bool, device=tokens.device)
    places = found.view(-1).nonzero()[:, 0]
    rows = places // num_windows
    first, group = places - rows * num_windows, rows // members
    inside = texts.are_inside(group, first, last + 1).expand_as(first)
    for column in range(last - 1):
        inside = inside & (tokens[group, first + column] == contexts.view(-1, last)[rows, column])
    ids = tokens[group, first + last]
    inside = inside & (ids < scores.shape[1])
    scores[rows[inside], ids[inside].long()] = -math.inf
    return scores


def _ban_followers(scores: Tensor, texts: _Texts, contexts: Tensor) -> Tensor:
    """Lower the score of every token that has n-1 tokens before it to -inf or +inf, which leaves it; without a wait."""
    groups, members, last = contexts.shape
    tokens = texts.tokens
    num_windows = tokens.shape[1] - last
    first = torch.arange(num_windows, device=tokens.device)
    ids = tokens[:, last:]
    found = texts.are_inside(torch.arange(groups, device=tokens.device)[:, None], first, last + 1)
    found = (found & (ids < scores.shape[1]))[:, None].expand(groups, members, num_windows)
    for column in range(last):
        found = found & (contexts[:, :, column : column + 1] == tokens[:, None, column : column + num_windows])
    targets = ids.long()[:, None].masked_fill(~found, 0).view(-1, num_windows)
    limits = scores.new_full((), math.inf).expand(found.shape).masked_fill(found, -math.inf).view(-1, num_windows)
    return scores.scatter_reduce_(1, targets, limits, "amin")
