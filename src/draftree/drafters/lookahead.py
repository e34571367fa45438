"""N-grams that the target makes itself: a window of guesses at later positions rides in every pass and fills a pool.

The pool holds, for every token, the latest continuations that were seen behind it: in the prompt, in the text, and in
the window. Those of the last token are the candidates. The window is a comb behind the root: a chain of `window`
guesses at the next positions, and from its i-th node a lane of guesses at the positions behind that. The target's pick
at a lane's end completes an n-gram of `n` tokens: it goes into the pool, the lane loses its first token and takes the
pick as its last, so that the lane travels with the text (a Jacobi iteration of which every column is n - 2 rounds
deep). Places that the text has overrun are filled with tokens of the text and what the pool has behind them. Candidates
and window share equal prefixes, and window nodes that happen to be the picks are accepted like any other.

With `window=0` the pool learns from prompt and text alone; `random` tokens of the text may then be guessed where it has
nothing.

Picks carry the noise of their position. Under a fixed noise the next token is still a function of the text before it,
so the iteration settles as it does at temperature 0; and an n-gram was made with the noise of the positions for which
its lane was waiting. Found again elsewhere, it is only as likely as two samples are to agree.

Source: lookahead decoding, arXiv 2402.02057 (W = `window`, N = `n`, G = `candidates`), algorithm 2; ours differs in
that the window may be accepted too, that it moves as far as the text did, and in what fills it.
Costs up to (window + candidates) * (n - 1) rows more in every pass, and some tens of microseconds for the pool. The
window pays where so many rows are nearly free, as on accelerators that wait for memory, and loses on a CPU. Planners
that learn from what is accepted take a window for a bad draft and cut it: with one, `fixed` is the planner unless
another is named.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import final

from draftree.core.errors import ConfigurationError
from draftree.core.tree import ROOT, Draw, TokenTree
from draftree.core.types import MAX_NODES, Budget
from draftree.drafters.base import DraftContext, DraftTraits, Observation, SequenceDrafter, SequenceView
from draftree.drafters.lookup.window import Comb, Pool, Rows, filled, grams, moved

POOL, WINDOW, RANDOM = "pool", "window", "random"
"""Where a node came from, in the statistics by source."""


@dataclass(slots=True)
class _Lookahead:
    """What is known of one sequence. Mutated by the drafter only; as large as the text and the rounds behind it."""

    view: SequenceView
    pool: Pool
    rows: Rows
    """The window."""
    seen: int
    """Tokens of the history that the pool and the window know of."""
    ends: list[int | None] = field(default_factory=list)
    """For every lane of the last tree the node at its end; None where the budget had no room for it."""


@final
class LookaheadDrafter(SequenceDrafter[_Lookahead]):
    """Candidates from the pool, the window beside them."""

    @dataclass(frozen=True, slots=True)
    class Config:
        """What is guessed and what is learned.

        Attributes:
            window: positions ahead that the window works on, W; 0 for the pool alone.
            n: tokens of an n-gram, N: the key and its continuation.
            candidates: continuations that are kept for a token and guessed behind it, G; the latest count.
            random: different tokens of the text that are guessed where the pool has nothing; 0 for none.
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
                    f"random={self.random} has trees of {self.num_nodes} nodes: {MAX_NODES} fit in a pass, take less"
                )

        @property
        def num_nodes(self) -> int:
            """Nodes of the largest tree."""
            return self.window * (self.n - 1) + max(self.candidates * (self.n - 1), self.random)

    @classmethod
    def describe(cls, config: Config) -> DraftTraits:
        """Down to the end of the last lane; a single candidate without a window is a chain."""
        return DraftTraits(
            draws=frozenset({Draw.FREE}),
            depth=max(0, config.window - 1) + config.n - 1,
            nodes=config.num_nodes,
            branches=config.window > 0 or config.candidates > 1 or config.random > 1,
            works_ahead=config.window > 0,
            wants_picks=config.window > 0,
        )

    def __init__(self, config: Config, context: DraftContext) -> None:
        self._config = config

    def open(self, sequence: SequenceView) -> _Lookahead:
        """A pool that has read the prompt, and a window of one row."""
        config, tokens = self._config, sequence.history.tokens
        pool = Pool(config.n, config.candidates)
        pool.read(tokens.tolist())
        guesses = _guesses(sequence, "open")
        return _Lookahead(sequence, pool, [[next(guesses) for _ in range(config.window)]], len(tokens))

    def draft_one(self, state: _Lookahead, budget: Budget) -> TokenTree:
        """Candidates first, so that a small budget cuts the window; then as many whole lanes as fit."""
        self._catch_up(state, ())
        comb = Comb(budget)
        candidates = state.pool.behind(int(state.view.history.tokens[-1]))
        for candidate in candidates:
            comb.add(ROOT, candidate, POOL)
        if self._config.random and not candidates:
            guesses = _guesses(state.view, "random")
            for token in {next(guesses): None for _ in range(self._config.random)}:
                comb.add(ROOT, (token,), RANDOM)
        state.ends = comb.hang(state.rows, WINDOW) if self._config.window else []
        return comb.tree()

    def observe(self, observations: Sequence[Observation[_Lookahead]]) -> None:
        """Move every window as far as its text went, with the picks at the lanes' ends as its last row."""
        for state, tree, verdict in ((o.state, o.tree, o.verdict) for o in observations):
            if verdict is None:
                continue  # `open` has read the prompt
            has_picks = len(verdict.picks) == len(tree) + 1 > 1
            ends = [None if node is None else verdict.picks[1 + node] for node in state.ends] if has_picks else []
            self._catch_up(state, ends)

    def _catch_up(self, state: _Lookahead, ends: Sequence[int | None]) -> None:
        """Learn what was written since the last time; rounds without a draft may have gone by unheard."""
        config, tokens = self._config, state.view.history.tokens
        written, state.ends = len(tokens) - state.seen, []
        if not written:
            return
        if len(state.rows) == config.n - 1 and ends:
            for gram in grams(state.rows, ends):
                state.pool.add(gram)
        # behind the window's, so as to count as later: what was written is known to be right
        state.pool.read(tokens[max(0, state.seen - config.n + 1) :].tolist())
        state.seen = len(tokens)
        if config.window:
            rows = moved(state.rows, ends, written=written, depth=config.n - 1)
            state.rows = filled(rows, config.window, pool=state.pool, guesses=_guesses(state.view, "fill"))


def _guesses(view: SequenceView, purpose: str) -> Iterator[int]:
    """Tokens of the text by chance, without end: a function of the seed, the text's length and the purpose."""
    tokens = view.history.tokens
    stream = view.controls.noise.stream("draft", purpose, len(tokens))
    return (int(tokens[int(stream.uniform(place) * len(tokens))]) for place in itertools.count())
