"""Frequency of the target's next token among a drafter's first guesses, from a trace. No torch.

Works for every drafter, also one with another tokenizer, since a trace holds drafted trees in the target's tokens.
Record with `--plan watch` and a tree of one level (`tree=8`): then every position of the text has a draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftree.analysis.trace import Step, Trace


@dataclass(frozen=True, slots=True)
class RankHits:
    """Hits by rank among the children of the root, in draft order.

    Attributes:
        num_positions: positions at which the target wrote a token.
        num_drafted: those of them at which something was drafted.
        hits: number of positions whose next token is the first guess, the second, …
    """

    num_positions: int
    num_drafted: int
    hits: tuple[int, ...]

    @property
    def cumulated(self) -> tuple[float, ...]:
        """Share of all positions whose token is among the first 1, 2, … guesses."""
        share = max(1, self.num_positions)
        return tuple(sum(self.hits[: rank + 1]) / share for rank in range(len(self.hits)))


def rank_hits(trace: Trace) -> RankHits:
    """Count the hits of a trace by rank; a failed sequence has no next token and is left out."""
    steps = [step for one in trace.rounds for step in one.steps if step.tokens]
    ranks = [_rank(step) for step in steps]
    width = max((len(_guesses(step)) for step in steps), default=0)
    drafted = sum(1 for step in steps if len(step.tree))
    return RankHits(len(steps), drafted, tuple(ranks.count(rank) for rank in range(1, width + 1)))


def _guesses(step: Step) -> Sequence[int]:
    """Return the tokens of the root's children, in draft order."""
    return [token for token, parent in zip(step.tree.tokens, step.tree.parents, strict=True) if parent < 0]


def _rank(step: Step) -> int:
    """Return the rank of the next token among the guesses, from 1; 0 if it is not among them."""
    guesses = _guesses(step)
    return guesses.index(step.tokens[0]) + 1 if step.tokens[0] in guesses else 0
