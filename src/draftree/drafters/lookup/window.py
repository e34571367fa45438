"""State of lookahead decoding: a pool of n-grams, a window of guesses at later positions, and their tree.

A window is a list of rows of equal length: rows[l][i] guesses the token at position 1 + i + l after the root, and
column i is lane i. Row 0 is the chain after the root; the rest of lane i is attached to its i-th node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from draftree.core.tree import ROOT, TokenTree
from draftree.core.types import Budget

Rows = list[list[int]]


class Pool:
    """Latest continuations of each token. Mutable; at most `size` per token.

    Args:
        n: tokens of an n-gram, key included.
        size: number of continuations that are kept for a key.
    """

    def __init__(self, n: int, size: int) -> None:
        self._n = n
        self._size = size
        # dictionaries are ordered: latest last
        self._continuations: dict[int, dict[tuple[int, ...], None]] = {}

    def add(self, gram: Sequence[int]) -> None:
        """Add an n-gram as the latest of its first token."""
        known = self._continuations.setdefault(gram[0], {})
        rest = tuple(gram[1:])
        known.pop(rest, None)
        known[rest] = None
        if len(known) > self._size:
            del known[next(iter(known))]

    def read(self, tokens: Sequence[int]) -> None:
        """Add every n-gram of a text."""
        for start in range(len(tokens) - self._n + 1):
            self.add(tokens[start : start + self._n])

    def after(self, token: int) -> list[tuple[int, ...]]:
        """Return the continuations of a token, latest first."""
        return list(self._continuations.get(token, ()))[::-1]


def grams(rows: Rows, ends: Sequence[int | None]) -> list[tuple[int, ...]]:
    """Return the lanes that have a pick at their end, with it."""
    return [(*lane, end) for *lane, end in zip(*rows, ends, strict=True) if end is not None]


def moved(rows: Rows, ends: Sequence[int | None], *, written: int, depth: int) -> list[list[int | None]]:
    """Return the window after the new root, moved by the number of written tokens.

    Args:
        rows: the window before the round.
        ends: the target's pick at each lane's end, or None; empty if no lane was scored.
        written: number of tokens written in the round.
        depth: rows of a full window. Until it is full the picks are an additional row; then the first row is dropped,
            which is a move of one position.

    Returns:
        Rows of equal length, shorter than before if the text moved further than the rows.
    """
    grown: list[list[int | None]] = [list(row) for row in rows]
    if ends:
        grown.append(list(ends))
    dropped = max(0, len(grown) - depth)
    return [row[written - dropped :] for row in grown[dropped:]]


def filled(rows: Sequence[Sequence[int | None]], width: int, *, pool: Pool, guesses: Iterator[int]) -> Rows:
    """Return a full window: lanes continue with tokens of the pool or else of `guesses`."""
    lanes = []
    for column in range(width):
        lane: list[int] = []
        for row in rows:
            token = row[column] if column < len(row) else None
            if token is None:
                break
            lane.append(token)
        if not lane:
            lane.append(next(guesses))
        known = pool.after(lane[-1])
        lane += known[0] if known else ()
        lane += [next(guesses) for _ in range(len(rows) - len(lane))]
        lanes.append(lane[: len(rows)])
    return [[lane[level] for lane in lanes] for level in range(len(rows))]


class Comb:
    """Tree under construction, within a budget: equal tokens under one parent are one node.

    Args:
        budget: maximum nodes and levels.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._depths: list[int] = []
        self._sources: list[tuple[str, ...]] = []
        self._known: dict[tuple[int, int], int] = {}

    def add(self, parent: int, tokens: Sequence[int], source: str) -> list[int]:
        """Add a path below `parent`, as far as the budget allows; return its nodes."""
        nodes = []
        for token in tokens:
            node = self._known.get((parent, token))
            if node is None:
                node = self._append(parent, token)
            if node is None:
                break
            if source not in self._sources[node]:
                self._sources[node] = (*self._sources[node], source)
            nodes.append(node)
            parent = node
        return nodes

    def _append(self, parent: int, token: int) -> int | None:
        depth = 1 if parent == ROOT else self._depths[parent] + 1
        node = len(self._tokens)
        if node >= self._budget.num_nodes or depth > self._budget.depth:
            return None
        self._known[parent, token] = node
        self._tokens.append(token)
        self._parents.append(parent)
        self._depths.append(depth)
        self._sources.append(())
        return node

    def _has_room(self, parent: int, tokens: Sequence[int]) -> bool:
        depth = 0 if parent == ROOT else self._depths[parent]
        if depth + len(tokens) > self._budget.depth:
            return False
        missing = len(tokens)
        for token in tokens:
            node = self._known.get((parent, token))
            if node is None:
                break
            parent, missing = node, missing - 1
        return len(self._tokens) + missing <= self._budget.num_nodes

    def hang(self, rows: Rows, source: str) -> list[int | None]:
        """Add a window below the root, lane by lane, complete lanes only.

        Returns:
            For each lane its last node; None from the first lane on that did not fit.
        """
        ends: list[int | None] = []
        stem = ROOT
        for lane in zip(*rows, strict=True):
            if not self._has_room(stem, lane):
                break
            nodes = self.add(stem, lane, source)
            stem = nodes[0]
            ends.append(nodes[-1])
        return ends + [None] * (len(rows[0]) - len(ends))

    def tree(self) -> TokenTree:
        """Return the tree."""
        return TokenTree(tuple(self._tokens), tuple(self._parents), sources=tuple(self._sources))
