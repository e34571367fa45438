"""The loop: plan, draft, score, verify, commit, learn. Plain decoding is the same with an empty tree."""

from __future__ import annotations

import time
from collections.abc import Sequence as Series
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from draftree.core.errors import NonFiniteLogitsError
from draftree.core.tree import EMPTY, ROOT, Draw, TokenTree, depths, is_chain, prune
from draftree.core.types import MAX_NODES, Budget, RoundRecord, SequenceRecord, Verdict
from draftree.engine.logprobs import token_logprobs
from draftree.engine.parts import Parts
from draftree.engine.sequence import WritingSequence
from draftree.models.base import Extend, Slot
from draftree.sampling.laws import LawRows, Laws
from draftree.verifiers.chance import NoiseChance


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of a prompt that a sequence reads without writing yet."""

    sequence: WritingSequence
    num_tokens: int


def run_round(parts: Parts, sequences: Series[WritingSequence], chunks: Series[Chunk] = ()) -> RoundRecord | None:
    """Write at least one token of every sequence, and read chunks of other prompts in the same pass.

    A sequence that fails is marked and fails alone.

    Args:
        parts: what the round works with.
        sequences: those that write; what they have not read yet is read before their root.
        chunks: what others read.

    Returns:
        The record of the round; None if nobody wrote.

    Raises:
        Exception: what a part raised. What was written until then is verified and stays.
    """
    if not sequences:
        _read(parts, chunks)
        return None
    clock = [time.perf_counter()]
    states = [s.plan_state for s in sequences]
    budgets = [_held(budget, s) for budget, s in zip(parts.planner.budgets(states), sequences, strict=True)]
    clock.append(time.perf_counter())
    offered = _draft(parts, sequences, budgets)
    clock.append(time.perf_counter())
    kept = _trim(parts, states, offered, clock[2] - clock[1])
    trees = [tree if nodes is None else prune(tree, nodes) for tree, nodes in zip(offered, kept, strict=True)]
    clock.append(time.perf_counter())
    pending = [_pending(s) for s in sequences]
    jobs = [_job(s, p, t) for s, p, t in zip(sequences, pending, trees, strict=True)]
    scores = parts.target.extend([*jobs, *map(_chunk_job, chunks)])
    clock.append(time.perf_counter())
    laws = Laws(scores.logits, [_rows(s, tree) for s, tree in zip(sequences, trees, strict=True)])
    verdicts = _verify(parts, sequences, trees, laws)
    clock.append(time.perf_counter())
    rows = tuple(
        _write(s, tree, verdict, laws, index)
        for index, (s, tree, verdict) in enumerate(zip(sequences, trees, verdicts, strict=True))
    )
    drafts = [Drafted(*given) for given in zip(offered, trees, kept, strict=True)]
    _commit(parts, sequences, pending, drafts, verdicts, chunks)
    clock.append(time.perf_counter())
    plan, draft, trim, score, verify, commit = (after - before for before, after in pairwise(clock))
    num_read = sum(chunk.num_tokens for chunk in chunks)
    record = RoundRecord(
        plan_seconds=plan + trim,
        draft_seconds=draft,
        score_seconds=score,
        verify_seconds=verify,
        commit_seconds=commit,
        total_seconds=clock[-1] - clock[0],
        num_rows=num_read + sum(len(job.tokens) for job in jobs),
        sequences=tuple(replace(row, offered=tree) for row, tree in zip(rows, offered, strict=True)),
        part_seconds=parts.drafter.part_seconds if parts.drafter is not None and any(map(len, offered)) else (),
        num_prompt_rows=num_read + sum(len(p) - 1 for p in pending),
    )
    parts.planner.observe(states, record)
    reason = parts.planner.explain() if any(s.is_finished for s in sequences) else ""
    for sequence, row, tree, verdict in zip(sequences, rows, trees, verdicts, strict=True):
        _count(sequence, record, row, tree, verdict)
        if sequence.is_finished:
            sequence.counts.explain = reason
    for chunk in chunks:
        chunk.sequence.counts.prefill_seconds += record.total_seconds
    return record


def _read(parts: Parts, chunks: Series[Chunk]) -> None:
    """A pass in which nobody writes."""
    start = time.perf_counter()
    parts.target.extend([_chunk_job(chunk) for chunk in chunks])
    parts.target.commit_many([_slot(c.sequence) for c in chunks], [range(c.num_tokens) for c in chunks])
    seconds = time.perf_counter() - start
    for chunk in chunks:
        chunk.sequence.counts.prefill_seconds += seconds


def _chunk_job(chunk: Chunk) -> Extend:
    tokens = _pending(chunk.sequence)[: chunk.num_tokens]
    return Extend(_slot(chunk.sequence), tokens, range(-1, len(tokens) - 1), logits_at=())


def _slot(sequence: WritingSequence) -> Slot:
    assert sequence.slot is not None, "a sequence in a round has a slot"
    return sequence.slot


def _pending(sequence: WritingSequence) -> list[int]:
    tokens: list[int] = sequence.history.tokens[_slot(sequence).length :].tolist()
    return tokens


def _held(budget: Budget, sequence: WritingSequence) -> Budget:
    # a round writes one token more than it drafts: the bonus needs room as well
    return replace(budget.within(MAX_NODES, sequence.room - 1), room=min(MAX_NODES, sequence.room - 1))


def _draft(parts: Parts, sequences: Series[WritingSequence], budgets: Series[Budget]) -> list[TokenTree]:
    trees = [EMPTY] * len(sequences)
    asked = [i for i, budget in enumerate(budgets) if _may_draft(sequences[i], budget)]
    if parts.drafter is None or not asked:
        return trees
    drafted = parts.drafter.draft([sequences[i].draft_state for i in asked], [budgets[i] for i in asked])
    for i, tree in zip(asked, drafted, strict=True):
        if not parts.target.supports_trees and not is_chain(tree.parents):
            raise AssertionError("a target that scores chains only was given a tree")
        trees[i] = tree
    return trees


def _may_draft(sequence: WritingSequence, budget: Budget) -> bool:
    """Whether there is a budget, or room for what a grammar forces, which needs none."""
    return bool(budget.num_nodes and budget.depth) or (sequence.controls.guide is not None and budget.room > 0)


def _trim(
    parts: Parts, states: Series[Any], offered: Series[TokenTree], draft_seconds: float
) -> list[Series[int] | None]:
    """What the planner keeps of each tree; of draws from a law everything, since one that was looked at must count."""
    if not any(map(len, offered)) or any(tree.draw not in (Draw.FREE, Draw.POINT) for tree in offered):
        return [None] * len(offered)
    return parts.planner.trim(states, offered, draft_seconds=draft_seconds)


@dataclass(frozen=True, slots=True)
class Drafted:
    """A tree as it was drafted, what of it was scored, and which nodes those are (None: all)."""

    offered: TokenTree
    tree: TokenTree
    kept: Series[int] | None

    def heard(self, verdict: Verdict) -> Verdict:
        """The verdict on the scored tree as one on the drafted tree, whose drafter knows no other."""
        if self.kept is None:
            return verdict
        path = tuple(self.kept[node] for node in verdict.path)
        if not verdict.picks:
            return Verdict(path, verdict.bonus)
        picks: list[int | None] = [verdict.picks[0]] + [None] * len(self.offered)
        for node, pick in zip(self.kept, verdict.picks[1:], strict=True):
            picks[1 + node] = pick
        return Verdict(path, verdict.bonus, tuple(picks))


def _job(sequence: WritingSequence, pending: Series[int], tree: TokenTree) -> Extend:
    """The pending tokens as a chain, and the tree at its end, which is the root."""
    root = len(pending) - 1
    parents = [*range(-1, root), *(root + 1 + parent for parent in tree.parents)]
    return Extend(_slot(sequence), [*pending, *tree.tokens], parents, logits_at=range(root, root + 1 + len(tree)))


def _rows(sequence: WritingSequence, tree: TokenTree) -> LawRows:
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*paths[parent + 1], token))
    return LawRows(sequence.history, sequence.controls, paths)


def _verify(
    parts: Parts, sequences: Series[WritingSequence], trees: Series[TokenTree], laws: Laws
) -> list[Verdict | None]:
    chances = [NoiseChance(s.controls.noise.stream("verify", len(s.history))) for s in sequences]
    found = parts.verifier.verify_many(trees, [laws.of(index) for index in range(len(laws))], chances)
    if parts.drafter is not None and parts.drafter.wants_picks:
        # computed once for the whole batch: by the rule if it walks along picks, else here
        found = [replace(verdict, picks=tuple(laws.of(index).picks())) for index, verdict in enumerate(found)]
    verdicts: list[Verdict | None] = [*found]
    # rows that the walk did not visit do not count: plain decoding would never have seen them
    visited = [[0, *(node + 1 for node in verdict.path)] for verdict in found]
    for index, finite in enumerate(laws.finite(visited)):
        if not finite:
            verdicts[index] = None
            _fail(sequences[index])
    return verdicts


def _fail(sequence: WritingSequence) -> None:
    sequence.fail(
        NonFiniteLogitsError(
            f"request {sequence.request_id}: at position {len(sequence.history)} the model's logits are NaN or "
            "infinite, or the sampling controls left no token: check weights and dtype (float16 overflows "
            "where bfloat16 does not), or loosen the controls"
        )
    )


def _write(
    sequence: WritingSequence, tree: TokenTree, verdict: Verdict | None, laws: Laws, index: int
) -> SequenceRecord:
    prefix, room = len(sequence.history), sequence.room
    depth = max(depths(tree.parents), default=0)
    if verdict is None:
        return SequenceRecord(
            sequence.request_id, prefix, len(tree), depth, 0, 0, 0, index=sequence.index, tree=tree, room=room
        )
    try:
        _write_tokens(sequence, tree, verdict, laws, index)
    except Exception as error:
        # turning tokens into text is this sequence's own affair, and so is its failure
        sequence.fail(error)
    written = len(sequence.history) - prefix
    accepted = min(written, len(verdict.path))
    return SequenceRecord(
        sequence.request_id,
        prefix,
        len(tree),
        depth,
        accepted,
        written,
        len(verdict.path),
        _matches(tree, verdict),
        index=sequence.index,
        tree=tree,
        path=tuple(verdict.path),
        bonus=verdict.bonus,
        room=room,
    )


def _write_tokens(sequence: WritingSequence, tree: TokenTree, verdict: Verdict, laws: Laws, index: int) -> None:
    tokens = [*(tree.tokens[node] for node in verdict.path), verdict.bonus]
    written = sequence.write(tokens, len(verdict.path))
    top = sequence.controls.params.logprobs
    if top is not None:
        rows = [0, *(node + 1 for node in verdict.path)][:written]
        sequence.logprobs.extend(token_logprobs(laws.of(index).raw[rows], tokens[:written], top=top))


def _matches(tree: TokenTree, verdict: Verdict) -> tuple[tuple[int, int], ...]:
    """How many children each visited node had, and which of them was accepted."""
    children = tree.children()
    ways = zip((ROOT, *verdict.path), (*verdict.path, None), strict=True)
    return tuple(
        (len(children[node + 1]), 0 if kept is None else children[node + 1].index(kept) + 1)
        for node, kept in ways
        if children[node + 1]
    )


def _commit(
    parts: Parts,
    sequences: Series[WritingSequence],
    pending: Series[Series[int]],
    drafts: Series[Drafted],
    verdicts: Series[Verdict | None],
    chunks: Series[Chunk],
) -> None:
    going = [
        (s, p, drafted, verdict)
        for s, p, drafted, verdict in zip(sequences, pending, drafts, verdicts, strict=True)
        if verdict is not None and not s.is_finished
    ]
    paths: list[Series[int]] = [[*range(len(p)), *(len(p) + node for node in v.path)] for _, p, _, v in going]
    slots = [_slot(s) for s, _, _, _ in going]
    if going or chunks:
        parts.target.commit_many(
            [*slots, *(_slot(c.sequence) for c in chunks)], [*paths, *(range(c.num_tokens) for c in chunks)]
        )
    if going and parts.drafter is not None:
        heard = [drafted.heard(verdict) for _, _, drafted, verdict in going]
        parts.drafter.observe([g[0].draft_state for g in going], [g[2].offered for g in going], heard)


def _count(
    sequence: WritingSequence, record: RoundRecord, row: SequenceRecord, tree: TokenTree, verdict: Verdict | None
) -> None:
    counts = sequence.counts
    if counts.rounds == 0:
        # the first round reads the prompt: its seconds are the wait for the first token
        counts.prefill_seconds += record.total_seconds
        counts.first_tokens = row.num_written
    else:
        counts.decode_seconds += record.total_seconds
        for phase in ("plan", "draft", "score", "verify", "commit"):
            name = f"{phase}_seconds"
            setattr(counts, name, getattr(counts, name) + getattr(record, name))
    counts.rounds += 1
    counts.draft_tokens += row.num_drafted
    counts.accepted_tokens += row.num_accepted
    while len(counts.drafted_by_depth) < row.draft_depth:
        counts.drafted_by_depth.append(0)
        counts.accepted_by_depth.append(0)
    for depth in depths(tree.parents):
        counts.drafted_by_depth[depth - 1] += 1
    for depth in range(row.num_accepted):
        counts.accepted_by_depth[depth] += 1
    for names in tree.sources:
        counts.drafted_by_source.update(names)
    if verdict is not None and tree.sources:
        for node in verdict.path[: row.num_accepted]:
            counts.accepted_by_source.update(tree.sources[node])
