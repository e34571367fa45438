"""Tables of the comparison of a drafter's distributions with the target's."""

from __future__ import annotations

from collections.abc import Sequence

from draftree.bench.grids import Grid
from draftree.bench.records import DistributionRecord
from draftree.bench.replay import hit_rates, independent_tokens, mean_kept, replayed_tokens, surviving_tokens

NUM_SHOWN = 5
LENGTHS = (1, 2, 3, 4, 6, 8)
RULES = (
    ("token", (0,)),
    ("multistep", (1, 2)),
    ("recursive", (0, 1, 2)),
    ("match", (0, 1, 2)),
    ("likeliest", (0, 1, 2)),
)


def distribution_grids(records: Sequence[DistributionRecord]) -> list[Grid]:
    """Return tables of guesses, verifiers and tokens per round, by category and temperature; empty without records."""
    if not records:
        return []
    groups: dict[tuple[str, float], list[DistributionRecord]] = {}
    for record in records:
        groups.setdefault((record.category, record.temperature), []).append(record)
    named = [(f"{category} at {temperature:g}", part) for (category, temperature), part in groups.items()]
    return [_guesses(named), _rules(named), _tokens(named)]


def _guesses(named: Sequence[tuple[str, list[DistributionRecord]]]) -> Grid:
    rows = []
    for name, records in named:
        rates = hit_rates(records)
        cumulated = [sum(rates[: rank + 1]) for rank in range(NUM_SHOWN)]
        positions = sum(record.num_positions for record in records)
        rows.append((name, str(positions), *(f"{value:.3f}" for value in cumulated)))
    headings = ("texts", "positions", *(f"first {rank}" for rank in range(1, NUM_SHOWN + 1)))
    return Grid(
        "Share of positions with the target's pick among the drafter's first guesses, shared noise",
        headings,
        tuple(rows),
    )


def _rules(named: Sequence[tuple[str, list[DistributionRecord]]]) -> Grid:
    rows = []
    for name, records in named:
        rates = hit_rates(records)
        coupled = " / ".join(
            f"{value:.3f}" for value in (mean_kept(records, "coupled"), sum(rates[:2]), sum(rates[:4]))
        )
        cells = [" / ".join(f"{mean_kept(records, rule, place):.3f}" for place in places) for rule, places in RULES]
        rows.append((name, coupled, *cells))
    headings = (
        "texts",
        "coupled 1 / 2 / 4",
        "token 1",
        "multistep 2 / 4",
        "recursive 1 / 2 / 4",
        "match 1 / 2 / 4",
        "likeliest 1 / 2 / 4",
    )
    return Grid("Probability that one of 1 / 2 / 4 children of a node is accepted", headings, tuple(rows))


def _tokens(named: Sequence[tuple[str, list[DistributionRecord]]]) -> Grid:
    rows = []
    for name, records in named:
        for label, tokens in (
            ("independent", lambda depth, part=records: independent_tokens(part, depth)),
            ("position by position", lambda depth, part=records: surviving_tokens(part, depth)),
            ("replayed", lambda depth, part=records: replayed_tokens(part, (1,) * depth)),
        ):
            rows.append((f"{name}, {label}", *(f"{tokens(depth):.2f}" for depth in LENGTHS)))
    return Grid(
        "Tokens per round of a coupled chain, from the distributions", ("texts", *map(str, LENGTHS)), tuple(rows)
    )
