"""Choice of the nodes and levels that maximize expected tokens per second of the batch.

Every sequence writes at least one token per round. Nodes are taken by descending survival from all trees: no node
survives more often than its parent, so this maximizes the expected tokens for each number of nodes. Every number is
evaluated, because costs have steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftree.planners.estimates.constants import AUTO

MEASURED_COUNTS = (8, 16, 32, 64, 128, 256, 512)
"""Numbers of nodes for which the cost of a row is averaged; over fewer, a measured curve is mostly noise."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Nodes of every tree, ascending, with the expected tokens and seconds of the round."""

    nodes: tuple[tuple[int, ...], ...]
    tokens: float
    seconds: float

    @property
    def speed(self) -> float:
        """Expected tokens per second."""
        return self.tokens / self.seconds


def choose_nodes(
    survivals: Sequence[Sequence[float]], seconds: Sequence[float], *, sunk: float = 0.0, others: int = 0
) -> Chosen:
    """Choose the nodes that are worth a row of the pass.

    Args:
        survivals: of every tree's nodes; no node's is above its parent's.
        seconds: time of a pass over 0, 1, 2, … rows, roots included.
        sunk: seconds that the round has taken so far.
        others: sequences of the pass without a tree here; each writes a token, and `seconds` include their rows.
    """
    batch = len(survivals)
    least = least_survival(seconds, batch)
    ranked = sorted(
        (-survival, tree, node)
        for tree, row in enumerate(survivals)
        for node, survival in enumerate(row)
        if survival >= least
    )
    del ranked[max(0, len(seconds) - 1 - batch) :]
    tokens = float(batch + others)
    plain = Chosen(((),) * batch, tokens, sunk + seconds[batch])
    best_speed, best, best_tokens = AUTO.node_margin * plain.speed, 0, tokens
    for count, (negative, _, _) in enumerate(ranked, 1):
        tokens -= negative
        speed = tokens / (sunk + seconds[batch + count])
        if speed > best_speed:
            best_speed, best, best_tokens = speed, count, tokens
    if not best:
        return plain
    nodes: list[list[int]] = [[] for _ in survivals]
    for _, tree, node in ranked[:best]:
        nodes[tree].append(node)
    return Chosen(tuple(tuple(sorted(row)) for row in nodes), best_tokens, sunk + seconds[batch + best])


def least_survival(seconds: Sequence[float], batch: int) -> float:
    """Return the survival below which a node is not considered: less where rows cost less than that share of a pass.

    A row of a pass that waits for its weights may cost a thousandth of it, and then even unlikely nodes pay.

    Args:
        seconds: time of a pass over 0, 1, 2, … rows.
        batch: rows of a pass without nodes.
    """
    last = len(seconds) - 1
    if batch > last or seconds[batch] <= 0.0:
        return AUTO.min_survival
    shares = [
        (seconds[batch + count] / seconds[batch] - 1.0) / count for count in MEASURED_COUNTS if batch + count <= last
    ]
    return max(AUTO.least_survival, min([AUTO.min_survival, *shares]))


@dataclass(frozen=True, slots=True)
class Depth:
    """A number of levels to draft, with the expected tokens and seconds of the round."""

    levels: int
    tokens: float
    seconds: float

    @property
    def speed(self) -> float:
        """Expected tokens per second."""
        return self.tokens / self.seconds


def choose_depth(
    gains: Sequence[float], level_seconds: Sequence[float], *, tokens: float, seconds: float, bias: float = 1.0
) -> Depth:
    """Choose how many levels to draft.

    Args:
        gains: tokens that each level is expected to add to the batch.
        level_seconds: cost of each level, including its rows in the target's pass.
        tokens: expected without a draft.
        seconds: of the round without a draft.
        bias: minimum speed relative to no draft; higher for a disabled drafter, as hysteresis.
    """
    best = plain = Depth(0, tokens, seconds)
    least = bias * plain.speed
    for level, (gain, cost) in enumerate(zip(gains, level_seconds, strict=True), 1):
        tokens, seconds = tokens + gain, seconds + cost
        if tokens / seconds > max(least, best.speed):
            best = Depth(level, tokens, seconds)
    return best
