"""Logits processors: controls that depend on the tokens before a row, and filters of single rows.

Each processor sees the history of its row: the prompt, the output, and the path of a drafted tree.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import final

import numpy as np
import torch
from torch import Tensor

from draftree.core.tensors import on_host, to_device, widened
from draftree.sampling.history import History
from draftree.sampling.logits import drop_below, largest

# A row is a node of a tree: its history is the written tokens and the drafted ones on the path from the root to it. A
# processor must give a node exactly the logits that plain decoding would have once that path is written.

NO_TOKEN = -1  # placeholder in `RowContext.tails` for a missing token; equal to no token id


class Processor(ABC):
    """One control over rows of logits."""

    @abstractmethod
    def apply(self, logits: Tensor, context: RowContext) -> Tensor:
        """Return the logits under this control.

        Args:
            logits: shape (rows, vocab), finite or -inf; may be changed in place, the caller hands over a copy.
            context: the tokens before each row.

        Returns:
            Same shape and dtype; perhaps the same tensor.
        """


class Ban(Processor):
    """A control that forbids some tokens and leaves all other logits as they are."""

    __slots__ = ()

    @abstractmethod
    def places(self, context: RowContext) -> tuple[np.ndarray, np.ndarray]:
        """Return rows and tokens that are forbidden, both int64 of shape (places,); a place may occur twice."""

    @final
    def apply(self, logits: Tensor, context: RowContext) -> Tensor:
        return forbid(logits, *self.places(context))


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """The number of occurrences of tokens before each row.

    The history is shared by all rows, so its tokens are counted once. The tokens of a row's own path are
    corrections, which replace the shared count.
    """

    tokens: np.ndarray  # the history's different tokens, ascending, shape (tokens,)
    counts: np.ndarray  # how often each occurs in the history, shape (tokens,)
    path_rows: np.ndarray  # rows of the corrections, shape (corrections,)
    path_tokens: np.ndarray  # tokens of the corrections; a pair of row and token occurs once
    path_counts: np.ndarray  # occurrences of that token in history and path together

    def places(self, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Return rows and tokens of all that occur before each of `num_rows` rows."""
        rows = np.repeat(np.arange(num_rows), len(self.tokens))
        tokens = np.tile(self.tokens, num_rows)
        return np.concatenate((rows, self.path_rows)), np.concatenate((tokens, self.path_tokens))

    def update(self, logits: Tensor, change: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Change the logits of these tokens in place.

        Args:
            logits: shape (rows, vocab).
            change: new values from old ones and counts (in the logits' dtype); the shapes broadcast.
        """
        end = int(np.searchsorted(self.tokens, logits.shape[-1]))
        inside = self.path_tokens < logits.shape[-1]
        rows = _on(self.path_rows[inside], logits)
        tokens = _on(self.path_tokens[inside], logits)
        corrected = change(logits[rows, tokens], _on(self.path_counts[inside], logits).to(logits.dtype))
        shared = _on(self.tokens[:end], logits)
        counts = _on(self.counts[:end], logits).to(logits.dtype)
        logits.index_copy_(1, shared, change(logits.index_select(1, shared), counts))
        logits[rows, tokens] = corrected
        return logits


class RowContext:
    """The tokens before each row of one sequence. Derived values are computed on first use.

    Args:
        paths: for each row the drafted tokens from the root to its node; empty for the root itself.
    """

    def __init__(self, history: History, paths: Sequence[Sequence[int]]) -> None:
        self.history = history
        self.paths = paths

    def tails(self, width: int, *, start: int = 0) -> np.ndarray:
        """Return the last tokens before each row, int64 of shape (rows, width), right-aligned, padded by `NO_TOKEN`."""
        tails = np.full((len(self.paths), width), NO_TOKEN, dtype=np.int64)
        written = self.history.tokens[start:]
        for row, path in enumerate(self.paths):
            drafted = min(len(path), width)
            room = min(width - drafted, len(written))
            tails[row, width - drafted :] = path[len(path) - drafted :]
            tails[row, width - drafted - room : width - drafted] = written[len(written) - room :]
        return tails

    @property
    def num_output_tokens(self) -> np.ndarray:
        """Number of tokens after the prompt before each row, shape (rows,)."""
        return self.history.num_output_tokens + np.fromiter(map(len, self.paths), np.int64, len(self.paths))

    @cached_property
    def all_counts(self) -> TokenCounts:
        """Counts of prompt, output and path tokens."""
        return _counted(self.history.tokens, self.paths)

    @cached_property
    def output_counts(self) -> TokenCounts:
        """Counts of output and path tokens."""
        return _counted(self.history.output, self.paths)


def forbid(logits: Tensor, rows: np.ndarray, tokens: np.ndarray) -> Tensor:
    """Set logits[rows[i], tokens[i]] to -inf, in place; tokens beyond the logits' width are ignored."""
    logits[places_on(logits, rows, tokens)] = -math.inf
    return logits


def places_on(logits: Tensor, rows: np.ndarray, tokens: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return rows and tokens, both int64 of shape (n,), as indices into `logits`, without tokens beyond its width."""
    inside = tokens < logits.shape[-1]
    return _on(rows[inside], logits), _on(tokens[inside], logits)


def _on(values: np.ndarray, logits: Tensor) -> Tensor:
    return to_device(values, logits.device, dtype=torch.from_numpy(values).dtype)


def _counted(written: np.ndarray, paths: Sequence[Sequence[int]]) -> TokenCounts:
    # with counts numpy sorts; without them it uses a hash table, ten times slower here
    tokens, counts = np.unique(written, return_counts=True)
    drafted = np.array([token for path in paths for token in path], dtype=np.int64)
    if not len(drafted):
        return TokenCounts(tokens, counts, drafted, drafted, drafted)
    rows = np.repeat(np.arange(len(paths)), [len(path) for path in paths])
    span = int(drafted.max()) + 1
    pairs, path_counts = np.unique(rows * span + drafted, return_counts=True)
    path_rows, path_tokens = np.divmod(pairs, span)
    if len(tokens):
        place = np.minimum(np.searchsorted(tokens, path_tokens), len(tokens) - 1)
        path_counts += np.where(tokens[place] == path_tokens, counts[place], 0)
    return TokenCounts(tokens, counts, path_rows, path_tokens, path_counts)


_ANY_TOKEN = NO_TOKEN - 1


class AllowedTokens(Processor):
    """Forbids all tokens except the given ones."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = torch.tensor(sorted(set(tokens)), dtype=torch.int64)

    def apply(self, logits: Tensor, context: RowContext) -> Tensor:
        tokens = self._tokens[self._tokens < logits.shape[-1]].to(logits.device)
        kept = logits.index_select(-1, tokens)
        return logits.fill_(-math.inf).index_copy_(-1, tokens, kept)


@dataclass(frozen=True, slots=True)
class NoRepeatNgram(Ban):
    """Forbids every token that would complete a repeated run of `size` tokens of a row's text, its path included.

    The written tokens are looked up in the history's index, which grows as they are written; the runs that end in a
    row's path are compared directly. At size 1 every token of the text is forbidden, also an end-of-text token.
    """

    size: int
    _: KW_ONLY
    includes_prompt: bool = (
        True  # whether a row's text begins with the prompt, as in transformers, or after it (fairseq)
    )

    def places(self, context: RowContext) -> tuple[np.ndarray, np.ndarray]:
        if self.size == 1:
            counts = context.all_counts if self.includes_prompt else context.output_counts
            return counts.places(len(context.paths))
        last = self.size - 1
        history = context.history
        start = 0 if self.includes_prompt else history.prompt_length
        depth = max(map(len, context.paths), default=0)
        if len(history) - start + depth < self.size:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        recent = context.tails(last + depth, start=start)
        newest = recent[:, recent.shape[1] - last :]
        rows, tokens = history.ngrams(self.size, start).followers(history.tokens[start:], newest)
        # a shorter row has NO_TOKEN before its tokens: such a run ends at the row's own end, where no token follows
        ends, starts = np.nonzero(recent[:, last - 1 : -1] == newest[:, -1:])
        for column in range(last):
            if not len(ends):
                break
            fits = recent[ends, starts + column] == newest[ends, column]
            ends, starts = ends[fits], starts[fits]
        rows = np.concatenate((rows, ends))
        tokens = np.concatenate((tokens, recent[ends, starts + last]))
        is_token = tokens != NO_TOKEN
        return rows[is_token], tokens[is_token]


class BadWords(Ban):
    """Forbids the last token of a word where prompt, output and path end with its other tokens."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        longest = max(map(len, words))
        self._lasts = np.array([word[-1] for word in words], dtype=np.int64)
        self._prefixes = np.full((len(words), longest - 1), _ANY_TOKEN, dtype=np.int64)
        for row, word in enumerate(words):
            self._prefixes[row, longest - len(word) :] = word[:-1]

    def places(self, context: RowContext) -> tuple[np.ndarray, np.ndarray]:
        tails = context.tails(self._prefixes.shape[1])[:, None]
        fits = (tails == self._prefixes) | (self._prefixes == _ANY_TOKEN)
        rows, words = np.nonzero(fits.all(axis=-1))
        return rows, self._lasts[words]


@dataclass(frozen=True, slots=True)
class MinTokens(Ban):
    """Forbids the tokens that end the text before it has `least` tokens, path included."""

    least: int
    stop_ids: Sequence[int]

    def places(self, context: RowContext) -> tuple[np.ndarray, np.ndarray]:
        early = np.flatnonzero(context.num_output_tokens < self.least)
        tokens = np.array(self.stop_ids, dtype=np.int64)
        return np.repeat(early, len(tokens)), np.tile(tokens, len(early))


# Filters that keep only the more likely tokens of each row: top-k, top-p, min-p.
#
# Each computes the smallest logit that a row keeps and keeps every token that reaches it. So tokens of equal logits are
# kept or dropped together, and the result depends neither on their order nor on the other rows. (A sort would keep some
# of them, and which ones would change with the batch.)

_NUCLEI = (256, 2048)  # numbers of largest logits in which top-p searches before it sorts whole rows


class Filter(ABC):
    """One control over rows of logits that is independent of the previous tokens."""

    @abstractmethod
    def apply(self, logits: Tensor) -> Tensor:
        """Return logits with the dropped tokens at -inf; every row keeps its largest.

        Args:
            logits: logits over temperature, shape (rows, vocab), finite or -inf; may be changed in place.

        Returns:
            Same shape and dtype; perhaps the same tensor.
        """


@dataclass(frozen=True, slots=True)
class TopK(Filter):
    """Keeps the `count` (at least 1) largest logits, including ties with the smallest of them."""

    count: int

    def apply(self, logits: Tensor) -> Tensor:
        return drop_below(logits, largest(logits, min(self.count, logits.shape[-1]))[:, -1:])


@dataclass(frozen=True, slots=True)
class TopP(Filter):
    """Keeps a token if all more likely tokens together have a probability below `mass`, which is in (0, 1).

    `top_k`: count of a `TopK` before it, 0 for none. If it is small, logits after the first nucleus equal its smallest
    or are -inf: a wider search, for which the host waits, finds no other bound.
    """

    mass: float
    top_k: int = 0

    def apply(self, logits: Tensor) -> Tensor:
        # softmax sums each row independently, so that a row's mass is the same in every batch
        peak = torch.softmax(logits, dim=-1).amax(dim=-1, keepdim=True)
        wider = () if 0 < self.top_k <= _NUCLEI[0] else (_NUCLEI[1], logits.shape[-1])
        return drop_below(logits, self._least(logits, peak, (_NUCLEI[0], *wider)))

    def _least(self, logits: Tensor, peak: Tensor, counts: tuple[int, ...]) -> Tensor:
        """Return the smallest kept logit per row, searched among its `counts[0]` largest, or else more."""
        values = largest(logits, min(counts[0], logits.shape[-1]))
        mass = widened((values - values[:, :1]).exp_().mul_(peak)).cumsum(dim=-1)
        wanted = torch.full_like(mass[:, :1], self.mass)
        least = values.gather(1, torch.searchsorted(mass, wanted).clamp_(max=values.shape[-1] - 1))
        short = (mass[:, -1] < self.mass) & ~values[:, -1].isneginf()
        if len(counts) > 1 and bool(short.any()):
            least[short] = self._least(logits[short], peak[short], counts[1:])
        return least


@dataclass(frozen=True, slots=True)
class MinP(Filter):
    """Keeps the tokens that are at least `fraction`, in (0, 1], times as likely as the most likely one."""

    fraction: float

    def apply(self, logits: Tensor) -> Tensor:
        return drop_below(logits, logits.amax(dim=-1, keepdim=True) + math.log(self.fraction))


class LogitBias(Processor):
    """Adds a number to the logits of some tokens, by token id; -inf forbids the token."""

    def __init__(self, biases: Mapping[int, float]) -> None:
        tokens = sorted(biases)
        self._tokens = torch.tensor(tokens, dtype=torch.int64)
        self._biases = torch.tensor([biases[token] for token in tokens], dtype=torch.float64)

    def apply(self, logits: Tensor, context: RowContext) -> Tensor:
        inside = self._tokens < logits.shape[-1]
        tokens = self._tokens[inside].to(logits.device)
        logits[:, tokens] += self._biases[inside].to(logits.device, logits.dtype)
        return logits


@dataclass(frozen=True, slots=True)
class RepetitionPenalty(Processor):
    """Makes every token of prompt, output and path less likely (above 1) or more likely, independent of its count.

    A positive logit is divided by the penalty, a negative one is multiplied. Source: arXiv 1909.05858.
    """

    penalty: float

    def apply(self, logits: Tensor, context: RowContext) -> Tensor:
        return context.all_counts.update(logits, self._penalised)

    def _penalised(self, values: Tensor, counts: Tensor) -> Tensor:
        return torch.where(values < 0, values * self.penalty, values / self.penalty)


@dataclass(frozen=True, slots=True)
class CountPenalty(Processor):
    """Subtracts from the logits of output and path tokens; prompt tokens are not counted."""

    presence: float
    frequency: float

    def apply(self, logits: Tensor, context: RowContext) -> Tensor:
        return context.output_counts.update(logits, self._penalised)

    def _penalised(self, values: Tensor, counts: Tensor) -> Tensor:
        return values - self.frequency * counts - self.presence


# N-gram blocking on tensors, for all beams of a batch at once.
#
# A token is banned if it would complete an n-gram that has occurred before: its score becomes -inf, in place. No mask
# of the vocabulary's width is made: work and memory grow with the tokens of the texts, not with the vocabulary. Source
# of the rule: arXiv 1705.04304, section 2.5.


def ban_repeated_ngrams(scores: Tensor, tokens: Tensor, *, size: int, waits: bool | None = None) -> Tensor:
    """Ban the tokens that would repeat an n-gram of their own row.

    Args:
        scores: logits or log-probabilities, float of shape (rows, vocab); changed in place. Ids at or above its width
            are ignored.
        tokens: integers of shape (rows, width) on the device of the scores.
        size: tokens of an n-gram, at least 1. At 1 every token of the row is banned, an end-of-text token or start
            token among them included.
        waits: whether the host may wait for the device in order to write only to the places found; None for only
            if the scores are in host memory. Otherwise the scores at the row's own tokens are written without a wait.
    """
    return ban_ngrams_of_source(scores, tokens, tokens, size=size, waits=waits)


def ban_ngrams_of_source(
    scores: Tensor, tokens: Tensor, source: Tensor, *, size: int, waits: bool | None = None
) -> Tensor:
    """Ban the tokens that would write an n-gram of another text, such as the source of an encoder-decoder model.

    Args:
        source: integers of shape (sources, source width); every source belongs to rows / sources adjacent rows. Other
            arguments as for `ban_repeated_ngrams`.
    """
    if size < 1:
        raise ValueError(f"size={size}: an n-gram has at least 1 token")
    if len(tokens) % len(source):
        raise ValueError(f"{len(tokens)} rows cannot be divided among {len(source)} sources: give rows of all sources")
    last = size - 1
    width = tokens.shape[1]
    if width < last or source.shape[1] < size:
        return scores
    contexts = tokens[:, width - last :].reshape(len(source), len(tokens) // len(source), last)
    may_wait = on_host(scores) if waits is None else waits
    return _ban_places(scores, source, contexts) if may_wait else _ban_followers(scores, source, contexts)


def _ban_places(scores: Tensor, source: Tensor, contexts: Tensor) -> Tensor:
    """Write -inf to the scores (groups * members, vocab) of the tokens that followed contexts (groups, members, n-1).

    The places are found first, by one column of all sources and few places of the others; the host waits.
    """
    groups, members, last = contexts.shape
    num_windows = source.shape[1] - last
    matches = torch.ones(groups, members, num_windows, dtype=torch.bool, device=source.device)
    if last:
        matches = contexts[:, :, -1:] == source[:, None, last - 1 : last - 1 + num_windows]
    places = matches.view(-1).nonzero()[:, 0]
    rows = places // num_windows
    first, group = places - rows * num_windows, rows // members
    ids = source[group, first + last]
    fits = ids < scores.shape[1]
    for column in range(last - 1):
        fits &= source[group, first + column] == contexts.view(-1, last)[rows, column]
    scores[rows[fits], ids[fits].long()] = -math.inf
    return scores


def _ban_followers(scores: Tensor, source: Tensor, contexts: Tensor) -> Tensor:
    """Lower the score of every token that has n-1 tokens before it to -inf or +inf, which leaves it; without a wait."""
    groups, members, last = contexts.shape
    num_windows = source.shape[1] - last
    ids = source[:, last:]
    matches = (ids < scores.shape[1])[:, None].expand(groups, members, num_windows)
    for column in range(last):
        matches = matches & (contexts[:, :, column : column + 1] == source[:, None, column : column + num_windows])
    targets = ids.long()[:, None].masked_fill(~matches, 0).view(-1, num_windows)
    limits = scores.new_full((), math.inf).expand(matches.shape).masked_fill(matches, -math.inf).view(-1, num_windows)
    return scores.scatter_reduce_(1, targets, limits, "amin")
