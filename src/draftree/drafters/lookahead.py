"""Lookahead decoding: n-grams from a window of guesses that the target scores in every pass.

For every token, the pool has the latest continuations seen after it in the prompt, the text and the window. Those of
the last token are the candidates. The window is a comb after the root: a chain of `window` guesses at the next
positions, and from its i-th node a lane of guesses at the positions after that. The target token at a lane's end
completes an n-gram of `n` tokens, which is added to the pool; the lane drops its first token and appends it, so
it moves with the text (a Jacobi iteration with columns n - 2 rounds deep). Lanes that the text has passed are refilled
with tokens of the text and their continuations from the pool. Candidates and window share equal prefixes, and window
nodes that equal the target tokens are accepted like any other.

With `window=0` the pool uses prompt and text only; `random` different tokens of the text may be guessed if the pool has
no candidate.

Target tokens include the noise of their position. With fixed noise the next token is a function of the preceding
text, so the iteration converges as it does at temperature 0. An n-gram at other positions has other noise, so it is
only as likely as two samples are to agree.

Source: lookahead decoding, arXiv 2402.02057 (W = `window`, N = `n`, G = `candidates`), algorithm 2.
Differences: window nodes can be accepted, the window moves as far as the text, and it is refilled from the pool.
Costs up to (window + candidates) * (n - 1) more rows in every pass, and some tens of microseconds for the pool. The
window gains if these rows are nearly free, as on accelerators limited by memory bandwidth, and loses on a CPU. Planners
that learn from acceptance would cut the window, so with a window the default planner is `fixed`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import final

from draftree.core.errors import ConfigurationError
from draftree.core.tree import ROOT, Draw, TokenTree
from draftree.core.types import MAX_NODES, Budget
from draftree.drafters.base import Drafter, DraftTraits, Observation, SequenceView

Rows = list[list[int]]


class Pool:
    """Latest continuations of each token. Mutable; at most `size` per token."""

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


def moved(rows: Rows, ends: Sequence[int | None], *, written: int, depth: int) -> list[list[int | None]]:
    """Return the window after the new root, moved by the number of written tokens.

    Args:
        ends: the target's pick at each lane's end, or None; empty if no lane was scored.
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
        lane = lane or [next(guesses)]
        lane += next(iter(pool.after(lane[-1])), ())
        lane += [next(guesses) for _ in range(len(rows) - len(lane))]
        lanes.append(lane[: len(rows)])
    return [list(row) for row in zip(*lanes, strict=True)]


class Comb:
    """Tree under construction, within a budget: equal tokens under one parent are one node."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._depths = {ROOT: 0}
        self._sources: list[tuple[str, ...]] = []
        self._known: dict[tuple[int, int], int] = {}

    def add(self, parent: int, tokens: Sequence[int], source: str) -> list[int]:
        """Add a path below `parent`, as far as the budget allows; return its nodes."""
        nodes = []
        for token in tokens:
            node = self._known.get((parent, token))
            if node is None:
                node = len(self._tokens)
                if node >= self._budget.num_nodes or self._depths[parent] >= self._budget.depth:
                    break
                self._known[parent, token] = node
                self._tokens.append(token)
                self._parents.append(parent)
                self._depths[node] = self._depths[parent] + 1
                self._sources.append(())
            if source not in self._sources[node]:
                self._sources[node] = (*self._sources[node], source)
            nodes.append(node)
            parent = node
        return nodes

    def _has_room(self, parent: int, tokens: Sequence[int]) -> bool:
        if self._depths[parent] + len(tokens) > self._budget.depth:
            return False
        missing = len(tokens)
        for token in tokens:
            node = self._known.get((parent, token))
            if node is None:
                break
            parent, missing = node, missing - 1
        return len(self._tokens) + missing <= self._budget.num_nodes

    def hang(self, rows: Rows, source: str) -> list[int | None]:
        """Add complete lanes of a window below the root; return their last nodes, None from one on that did not fit."""
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
        return TokenTree(tuple(self._tokens), tuple(self._parents), sources=tuple(self._sources))


POOL, WINDOW, RANDOM = "pool", "window", "random"
"""Sources of nodes in the statistics."""


@dataclass(slots=True)
class _Lookahead:
    """State of one sequence. Mutated by the drafter only."""

    view: SequenceView
    pool: Pool
    rows: Rows
    """Rows of the window."""
    seen: int
    """Number of tokens of the history that are in the pool."""
    ends: list[int | None] = field(default_factory=list)
    """Last node of every lane in the last tree; None for lanes beyond the budget."""


@final
class LookaheadDrafter(Drafter[_Lookahead]):
    """Drafter of candidates from the pool and of the window."""

    @dataclass(frozen=True, slots=True)
    class Config:
        """Options.

        Attributes:
            window: number of lanes of the window, W; 0 for the pool only.
            n: tokens of an n-gram, N: the key and its continuation.
            candidates: number of continuations that are kept and drafted for a token, the latest ones, G.
            random: number of different tokens of the text that are drafted if the pool has no candidate.
        """

        window: int = 0
        n: int = 4
        candidates: int = 3
        random: int = 0

        def __post_init__(self) -> None:
            for name, least in (("window", 0), ("n", 2), ("candidates", 1), ("random", 0)):
                if getattr(self, name) < least:
                    raise ConfigurationError(
                        f"drafter 'lookahead' has {name}={getattr(self, name)}: it must be at least {least}"
                    )
            if self.num_nodes > MAX_NODES:
                raise ConfigurationError(
                    f"drafter 'lookahead' with window={self.window}, n={self.n}, candidates={self.candidates}, "
                    f"random={self.random} has trees of {self.num_nodes} nodes: {MAX_NODES} fit in a pass, choose less"
                )

        @property
        def num_nodes(self) -> int:
            """Maximum number of nodes of a tree."""
            return self.window * (self.n - 1) + max(self.candidates * (self.n - 1), self.random)

    @classmethod
    def describe(cls, config: Config) -> DraftTraits:
        """Return the traits; the depth is that of the last lane, and one candidate without a window is a chain."""
        return DraftTraits(
            draws=frozenset({Draw.FREE}),
            depth=max(0, config.window - 1) + config.n - 1,
            nodes=config.num_nodes,
            branches=config.window > 0 or config.candidates > 1 or config.random > 1,
            works_ahead=config.window > 0,
            wants_picks=config.window > 0,
        )

    def open(self, sequence: SequenceView) -> _Lookahead:
        config, tokens = self._config, sequence.history.tokens
        pool = Pool(config.n, config.candidates)
        pool.read(tokens.tolist())
        guesses = _guesses(sequence, "open")
        return _Lookahead(sequence, pool, [[next(guesses) for _ in range(config.window)]], len(tokens))

    def draft_one(self, state: _Lookahead, budget: Budget) -> TokenTree:
        self._catch_up(state, ())
        comb = Comb(budget)
        candidates = state.pool.after(int(state.view.history.tokens[-1]))
        for candidate in candidates:
            comb.add(ROOT, candidate, POOL)
        if self._config.random and not candidates:
            guesses = _guesses(state.view, "random")
            for token in {next(guesses): None for _ in range(self._config.random)}:
                comb.add(ROOT, (token,), RANDOM)
        state.ends = comb.hang(state.rows, WINDOW) if self._config.window else []
        return comb.tree()

    def observe(self, observations: Sequence[Observation[_Lookahead]]) -> None:
        """Move every window as far as its text, with the picks at the lanes' ends as its last row."""
        for state, tree, verdict in ((o.state, o.tree, o.verdict) for o in observations):
            if verdict is not None:  # `open` adds the prompt to the pool
                has_picks = len(verdict.picks) == len(tree) + 1 > 1
                ends = [None if node is None else verdict.picks[1 + node] for node in state.ends] if has_picks else []
                self._catch_up(state, ends)

    def _catch_up(self, state: _Lookahead, ends: Sequence[int | None]) -> None:
        """Add the tokens written since the last call to the pool."""
        config, tokens = self._config, state.view.history.tokens
        written, state.ends = len(tokens) - state.seen, []
        if not written:
            return
        if len(state.rows) == config.n - 1 and ends:
            for *lane, end in zip(*state.rows, ends, strict=True):
                if end is not None:
                    state.pool.add([*lane, end])
        # after the window's n-grams, so that these count as later ones
        state.pool.read(tokens[max(0, state.seen - config.n + 1) :].tolist())
        state.seen = len(tokens)
        if config.window:
            rows = moved(state.rows, ends, written=written, depth=config.n - 1)
            state.rows = filled(rows, config.window, pool=state.pool, guesses=_guesses(state.view, "fill"))


def _guesses(view: SequenceView, purpose: str) -> Iterator[int]:
    """Yield random tokens of the text without end, a function of the seed, the text's length and the purpose."""
    tokens = view.history.tokens
    stream = view.controls.noise.stream("draft", purpose, len(tokens))
    return (int(tokens[int(stream.uniform(place) * len(tokens))]) for place in itertools.count())
