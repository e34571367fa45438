"""Closed forms on a recorded comparison of distributions: tokens per round of chains and trees. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from draftree.bench.records import DistributionRecord


def mean_kept(records: Iterable[DistributionRecord], rule: str, place: int = 0) -> float:
    """Return a verifier's mean acceptance over positions; `place` 0, 1, 2 means 1, 2, 4 children."""
    return statistics.fmean(values[place] for record in records for values in record.kept[rule])


def hit_rates(records: Sequence[DistributionRecord]) -> list[float]:
    """Return how often the target's pick is the drafter's first, second, … guess with shared noise."""
    positions = sum(record.num_positions for record in records)
    return [sum(column) / positions for column in zip(*(record.shared_hits for record in records), strict=True)]


def independent_tokens(records: Sequence[DistributionRecord], depth: int) -> float:
    """Return tokens per round of a coupled chain with the mean acceptance at every position, independently."""
    mean = mean_kept(records, "coupled")
    return sum(mean**level for level in range(depth + 1))


def surviving_tokens(records: Sequence[DistributionRecord], depth: int) -> float:
    """Return tokens per round from each position's own probability: 1 + the mean of their products along the text."""
    products: list[float] = []
    for record in records:
        chances = [values[0] for values in record.kept["coupled"]]
        for start in range(len(chances) - depth + 1):
            survival, total = 1.0, 1.0
            for chance in chances[start : start + depth]:
                survival *= chance
                total += survival
            products.append(total)
    return statistics.fmean(products) if products else float("nan")


def replayed_tokens(records: Iterable[DistributionRecord], widths: Sequence[int]) -> float:
    """Return tokens per round of a coupled tree of these widths, replayed on the texts with their own noise.

    A round continues while the pick is among the drafter's first `width` guesses, and writes one token more; the next
    round starts after it. The replay uses the actual picks of plain decoding, so no distribution is assumed.
    """
    rounds = written = 0
    for record in records:
        place = 0
        while place < record.num_positions:
            level = 0
            while (
                level < len(widths)
                and place + level < record.num_positions - 1
                and 1 <= record.own_ranks[place + level] <= widths[level]
            ):
                level += 1
            rounds += 1
            written += level + 1
            place += level + 1
    return written / rounds
