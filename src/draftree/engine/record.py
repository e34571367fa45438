"""Statistics of a round: the accepted child at each node, and the raw counts of a sequence."""

from __future__ import annotations

from dataclasses import replace

from draftree.core.tree import ROOT, TokenTree, depths
from draftree.core.types import RoundRecord, SequenceRecord, Verdict
from draftree.engine.sequence import SequenceCounts


def matches(tree: TokenTree, verdict: Verdict) -> tuple[tuple[int, int], ...]:
    """Return the number of children of each visited node, and which of them was accepted."""
    children = tree.children()
    ways = zip((ROOT, *verdict.path), (*verdict.path, None), strict=True)
    return tuple(
        (len(children[node + 1]), 0 if kept is None else children[node + 1].index(kept) + 1)
        for node, kept in ways
        if children[node + 1]
    )


def without_distributions(row: SequenceRecord) -> SequenceRecord:
    """Return a record that holds no tensors, to be kept until it is read."""
    drafted, tree = (replace(tree, distributions=None) for tree in (row.drafted, row.tree))
    return replace(row, drafted=drafted, tree=tree)


def count(counts: SequenceCounts, record: RoundRecord, row: SequenceRecord) -> None:
    """Add a round to a sequence's counts."""
    if counts.rounds == 0:
        # the first round includes the prefill: its seconds are the time to first token
        counts.prefill_seconds += record.total_seconds
        counts.first_tokens = row.num_written
    else:
        counts.decode_seconds += record.total_seconds
        counts.plan_seconds += record.plan_seconds
        counts.draft_seconds += record.draft_seconds
        counts.score_seconds += record.score_seconds
        counts.verify_seconds += record.verify_seconds
        counts.commit_seconds += record.commit_seconds
    counts.rounds += 1
    if row.num_drafted:
        _count_draft(counts, row)


def _count_draft(counts: SequenceCounts, row: SequenceRecord) -> None:
    tree = row.tree
    counts.draft_tokens += row.num_drafted
    counts.accepted_tokens += row.num_accepted
    missing = row.draft_depth - len(counts.drafted_by_depth)
    counts.drafted_by_depth.extend([0] * missing)
    counts.accepted_by_depth.extend([0] * missing)
    for depth in depths(tree.parents):
        counts.drafted_by_depth[depth - 1] += 1
    for depth in range(row.num_accepted):
        counts.accepted_by_depth[depth] += 1
    for names in tree.sources:
        counts.drafted_by_source.update(names)
    for node in row.path[: row.num_accepted] if tree.sources else ():
        counts.accepted_by_source.update(tree.sources[node])
