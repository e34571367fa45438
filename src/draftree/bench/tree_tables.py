"""Tables of the costs of scoring and drafting trees."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from draftree.bench.grids import NOTHING, Grid
from draftree.bench.records import TreeRecord

WAYS = ("tree", "chain", "batched", "one by one")


def tree_grids(records: Sequence[TreeRecord]) -> list[Grid]:
    """Return the tables of scoring and drafting that have records."""
    scored = [record for record in records if record.how in WAYS]
    drafted = [record for record in records if record.how not in WAYS]
    return [grid(part) for grid, part in ((_scoring, scored), (_drafting, drafted)) if part]


def _scoring(records: Sequence[TreeRecord]) -> Grid:
    medians = {(record.shape, record.how): statistics.median(record.milliseconds) for record in records}
    rows = []
    for record in records:
        if record.how != "tree":
            continue
        tree = medians[record.shape, "tree"]
        chain, batched, alone = (medians[record.shape, how] for how in WAYS[1:])
        rows.append(
            (
                record.shape,
                str(record.rows),
                str(record.leaves),
                *(f"{value:.1f}" for value in (tree, chain)),
                f"{tree / chain:.3f}",
                *(f"{value:.1f} ({value / tree:.2f})" for value in (batched, alone)),
            )
        )
    headings = ("shape", "nodes", "leaves", "tree ms", "chain ms", "tree / chain", "batched (x tree)", "alone (x tree)")
    title = f"Scoring a tree after {records[0].prefix} tokens: in one pass, as a chain of equal size, path by path"
    return Grid(title, headings, tuple(rows))


def _drafting(records: Sequence[TreeRecord]) -> Grid:
    pairs = zip(records[::2], records[1::2], strict=True)
    rows = []
    for whole, passes in pairs:
        grown, inside = statistics.median(whole.milliseconds), statistics.median(passes.milliseconds)
        temperature = whole.how.rpartition(" ")[2]
        shares = (f"{grown:.2f}", f"{inside:.2f}", f"{grown / inside:.3f}" if inside else NOTHING)
        rows.append((f"{whole.shape} at {temperature}", str(whole.rows), *shares))
    title = f"Drafting a tree after {records[0].prefix} tokens, and the drafter's passes in it"
    return Grid(title, ("shape at temperature", "nodes", "ms", "passes ms", "x passes"), tuple(rows))
