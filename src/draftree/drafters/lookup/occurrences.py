"""Index of earlier occurrences of the last tokens, extended token by token, with bounded memory.

Every position is linked to the previous one at which the same run of tokens ended, and a hash table has the latest
position of each run, as the hash chains of LZ77 compressors, for runs of two lengths. Short runs find all matches; long
runs find long matches among many short ones. Adding a token costs two links, without rebuilds; dropping the oldest
texts moves the rest down.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

SEPARATOR = -1
"""Separator of texts: no match extends across it."""
FEW = 32
"""Maximum number of new tokens that are linked one by one; more are sorted by hash."""
KEPT_SHARE = 0.75
"""Share of the capacity that is dropped at once, so that drops are rare."""


class Match(NamedTuple):
    """Earlier occurrence; a tuple because a draft creates hundreds.

    Attributes:
        length: number of last tokens of the text that match.
        followers: the tokens after it; a negative one ends them.
    """

    length: int
    followers: Sequence[int]
    weight: float = 1.0


@dataclass(slots=True)
class _Chains:
    """Positions by the run of `order` tokens that ends there; positions are stored plus one, 0 is none."""

    order: int
    heads: np.ndarray
    earlier: np.ndarray

    @classmethod
    def empty(cls, order: int, room: int) -> _Chains:
        # the system provides zeroed memory page by page: unused capacity costs nothing
        return cls(order, np.zeros(1 << max(4, (room - 1).bit_length()), np.int32), np.zeros(room, np.int32))

    def hashes(self, tokens: np.ndarray) -> np.ndarray:
        """Return the bucket of every complete run of these tokens, in order."""
        total = np.zeros(len(tokens) - self.order + 1, np.uint64)
        for shift in range(self.order):
            total = (total + tokens[shift : shift + len(total)].astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        return (total >> np.uint64(64 - (len(self.heads) - 1).bit_length())).astype(np.int64)

    def link(self, tokens: np.ndarray, start: int) -> None:
        """Add the positions from `start` on; `tokens` are all tokens."""
        first = max(start, self.order - 1)
        if first >= len(tokens):
            return
        buckets = self.hashes(tokens[first - self.order + 1 :])
        places = np.arange(first + 1, len(tokens) + 1, dtype=np.int32)
        if len(buckets) <= FEW:
            for bucket, place in zip(buckets.tolist(), places.tolist(), strict=True):
                self.earlier[place - 1] = self.heads[bucket]
                self.heads[bucket] = place
            return
        order = np.argsort(buckets, kind="stable")
        buckets, places = buckets[order], places[order]
        differs = buckets[1:] != buckets[:-1]
        is_first = np.append(True, differs)
        is_last = np.append(differs, True)
        before = np.roll(places, 1)
        before[is_first] = self.heads[buckets[is_first]]
        self.earlier[places - 1] = before
        self.heads[buckets[is_last]] = places[is_last]

    def latest(self, tail: np.ndarray, limit: int) -> list[int]:
        """Return the latest positions in the bucket of the last run of `tail`; a few may have another run."""
        places: list[int] = []
        if len(tail) < self.order:
            return places
        place, earlier = int(self.heads[self.hashes(tail[-self.order :])[0]]), self.earlier.data
        while place and len(places) < limit:
            places.append(place - 1)
            place = earlier[place - 1]
        return places

    def move_down(self, distance: int, length: int) -> None:
        """Remove the first `distance` positions, of which `length` remain."""
        for links in (self.heads, self.earlier):
            links -= distance
            np.maximum(links, 0, out=links)
        self.earlier[:length] = self.earlier[distance : distance + length].copy()
        self.earlier[length:] = 0


class Occurrences:
    """Texts and an index of the runs of tokens in them.

    Args:
        orders: lengths of indexed runs; the smallest is the minimum length of a match.
        capacity: maximum number of tokens; None keeps all.
        room: initial allocation in tokens; None for the capacity. It doubles where more is needed.
    """

    def __init__(self, orders: tuple[int, ...], *, capacity: int | None = None, room: int | None = None) -> None:
        self._capacity = capacity
        self._orders = tuple(sorted(set(orders), reverse=True))
        self._starts: deque[int] = deque()
        self._length = 0
        self._tokens = np.zeros(0, np.int32)
        self._allocate(room or capacity or 1024)

    def _allocate(self, room: int) -> None:
        tokens = np.zeros(room, np.int32)
        tokens[: self._length] = self._tokens[: self._length]
        self._tokens = tokens
        self._chains = [_Chains.empty(order, room) for order in self._orders]

    def __len__(self) -> int:
        return self._length

    @property
    def num_bytes(self) -> int:
        """Size of all arrays in bytes when they are full."""
        links = sum(chains.heads.nbytes + chains.earlier.nbytes for chains in self._chains)
        return self._tokens.nbytes + links

    @property
    def tokens(self) -> np.ndarray:
        """All texts, oldest first, each with a separator after it, int32 of shape (tokens,); a view."""
        return self._tokens[: self._length]

    def restore(self, tokens: np.ndarray) -> None:
        """Fill an empty index with texts as `tokens` returns them, or with the latest that fit into the capacity."""
        assert not self._length, "an index is restored once"
        ends = np.flatnonzero(tokens == SEPARATOR) + 1
        starts = np.append(0, ends[:-1])
        if self._capacity is not None and len(tokens) > self._capacity:
            fitting = np.flatnonzero(len(tokens) - starts <= int(KEPT_SHARE * self._capacity))
            starts = starts[fitting]
            tokens = tokens[starts[0] :] if len(starts) else tokens[:0]
        if len(tokens):
            self._make_room(len(tokens))
            self._starts.extend((starts - starts[0]).tolist())
            self._append(tokens)

    def add_text(self, tokens: np.ndarray) -> None:
        """Add a text, or as much of its end as fits; the oldest texts are dropped to make room."""
        kept = len(tokens) if self._capacity is None else max(0, int(KEPT_SHARE * self._capacity) - 1)
        tokens = tokens[max(0, len(tokens) - kept) :]
        if not len(tokens):
            return
        self._make_room(len(tokens) + 1)
        self._starts.append(self._length)
        self._append(np.append(tokens, SEPARATOR))

    def extend(self, tokens: np.ndarray) -> None:
        """Extend the only text of an index without a capacity."""
        assert self._capacity is None, "a growing text cannot keep its positions while others are dropped"
        if len(tokens):
            self._make_room(len(tokens))
            self._append(tokens)

    def _append(self, tokens: np.ndarray) -> None:
        start, self._length = self._length, self._length + len(tokens)
        self._tokens[start : self._length] = tokens
        for chains in self._chains:
            chains.link(self._tokens[: self._length], start)

    def _make_room(self, count: int) -> None:
        if self._length + count <= len(self._tokens):
            return
        if self._capacity is None or len(self._tokens) < self._capacity:
            room = max(2 * len(self._tokens), self._length + count)
            self._allocate(room if self._capacity is None else min(room, self._capacity))
            for chains in self._chains:
                chains.link(self._tokens[: self._length], 0)
        if self._capacity is not None and self._length + count > len(self._tokens):
            self.shrink(min(int(KEPT_SHARE * self._capacity), self._capacity - count))

    def shrink(self, kept: int) -> None:
        """Drop the oldest texts until at most `kept` tokens remain."""
        while self._starts and self._length - self._starts[0] > kept:
            self._starts.popleft()
        distance = self._starts[0] if self._starts else self._length
        self._length -= distance
        self._tokens[: self._length] = self._tokens[distance : distance + self._length].copy()
        self._starts = deque(start - distance for start in self._starts)
        for chains in self._chains:
            chains.move_down(distance, self._length)

    def find(
        self, tail: np.ndarray, *, depth: int, limit: int, is_own: bool = False, weight: float = 1.0
    ) -> list[Match]:
        """Find earlier positions that match `tail`, latest first for every run length.

        Args:
            tail: last tokens of a text; no match is longer.
            is_own: whether the text is the last one in the index: its end is not a match, and the continuation of an
                overlapping match repeats itself.

        Returns:
            Matches, whose followers are `SEPARATOR` after the end of a text.
        """
        end = self._length - 1 if is_own else self._length
        known: dict[int, None] = {}
        for chains in self._chains:
            known.update(dict.fromkeys(chains.latest(tail, limit + is_own)))
        places = np.fromiter(known, np.int64, len(known))
        places = places[places < end]
        index = places[:, None] - np.arange(len(tail))
        equal = np.zeros((len(places), len(tail) + 1), bool)
        equal[:, :-1] = (self._tokens[np.maximum(index, 0)] == tail[::-1]) & (index >= 0)
        lengths = equal.argmin(axis=1)
        kept = lengths >= self._orders[-1]
        followers = self._followers(places[kept], depth, is_own=is_own).tolist()
        return [Match(length, row, weight) for length, row in zip(lengths[kept].tolist(), followers, strict=True)]

    def _followers(self, places: np.ndarray, depth: int, *, is_own: bool) -> np.ndarray:
        steps = np.arange(depth)
        if is_own:
            period = (self._length - 1 - places)[:, None]
            return self._tokens[places[:, None] + 1 + steps % period]
        index = places[:, None] + 1 + steps
        rows = np.where(index < self._length, self._tokens[np.minimum(index, len(self._tokens) - 1)], SEPARATOR)
        over = np.logical_or.accumulate(rows == SEPARATOR, axis=1)
        rows[over] = SEPARATOR
        return rows
