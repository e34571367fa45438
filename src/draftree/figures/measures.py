"""Measures on replayed positions: acceptance of the first child, hits by level and rank, confidences. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftree.analysis.trace import Trace
from draftree.core.tree import ROOT
from draftree.figures.intervals import Estimate, ratio
from draftree.figures.replaying import Position, Text

__all__ = [
    "Guess", "acceptance", "acceptances", "deepest", "estimates", "guesses", "texts_by_sequence",
    "tokens_per_round", "widest",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Guess:
    """A drafted node whose parent is on the text: its level, rank, confidence, and whether it is on the text.

    The confidence is the drafter's probability of the node given its parent; NaN if trees have no scores.
    """

    level: int
    rank: int
    confidence: float
    is_accepted: bool


def guesses(position: Position) -> Iterator[Guess]:
    """Yield the nodes whose parents are on the text."""
    on_text = {ROOT, *position.path}
    tree = position.tree
    for node, parent in enumerate(tree.parents):
        if parent not in on_text:
            continue
        confidence = math.nan
        if tree.scores:
            before = 0.0 if parent == ROOT else tree.scores[parent]
            confidence = math.exp(min(0.0, tree.scores[node] - before))
        yield Guess(position.levels[node], position.ranks[node], confidence, node in position.path)


def acceptances(texts: Sequence[Text]) -> list[tuple[int, int]]:
    """Return for every text how often the first drafted token was the next one, and the number of its positions.

    The last position of a text is left out: nothing that is drafted there can be accepted.
    """
    found = []
    for text in texts:
        places = text.positions[:-1]
        hits = sum(bool(p.path) and p.levels[p.path[0]] == 1 and p.ranks[p.path[0]] == 1 for p in places)
        found.append((hits, len(places)))
    return found


def acceptance(texts: Sequence[Text]) -> Estimate:
    """Return the acceptance α of the first drafted token over all positions."""
    pairs = acceptances(texts)
    return ratio([hits for hits, _ in pairs], [count for _, count in pairs])


def deepest(texts: Sequence[Text]) -> int:
    """Return the deepest level that was drafted."""
    return max((level for text in texts for p in text.positions for level in p.levels), default=0)


def widest(texts: Sequence[Text]) -> int:
    """Return the largest number of children of the root."""
    return max(
        (p.ranks[node] for text in texts for p in text.positions for node in range(len(p.tree)) if p.levels[node] == 1),
        default=0,
    )


def estimates(rows: Sequence[Mapping[str, Any]], name: str) -> list[Estimate]:
    """Return the estimates that rows hold under a name."""
    return [Estimate(row[name], row[f"{name}_low"], row[f"{name}_high"]) for row in rows]


def tokens_per_round(trace: Trace) -> Estimate:
    """Return tokens per round over the texts of a trace, as measured."""
    counts: dict[str, list[int]] = {}
    for one in trace.rounds:
        for step in one.steps:
            found = counts.setdefault(step.sequence, [0, 0])
            found[0] += step.num_written
            found[1] += 1
    return ratio([tokens for tokens, _ in counts.values()], [rounds for _, rounds in counts.values()])


def texts_by_sequence(trace: Trace) -> list[tuple[int, ...]]:
    """Return the tokens of every text, in order of admission."""
    found: dict[str, list[int]] = {}
    for one in trace.rounds:
        for step in one.steps:
            found.setdefault(step.sequence, []).extend(step.tokens[: step.num_written])
    return [tuple(tokens) for tokens in found.values()]
