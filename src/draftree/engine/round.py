"""The loop: plan, draft, score, verify, commit, learn. Plain decoding is the same with an empty tree."""

from __future__ import annotations

from collections.abc import Sequence as Series
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from draftree.core.node_map import NodeMap
from draftree.core.tree import Draw, TokenTree, depths
from draftree.core.types import RoundRecord, SequenceRecord, Verdict
from draftree.engine.failures import no_token_error
from draftree.engine.logprobs import score_prompt, token_logprobs
from draftree.engine.observing import Gain, observe, record
from draftree.engine.parts import Parts
from draftree.engine.record import count, matches, without_distributions
from draftree.engine.sequence import WritingSequence
from draftree.engine.turns import DraftedTurns, Turn, draft_turns, slot_of
from draftree.models.base import Commit, Extend, Pass, PassResult
from draftree.sampling.distributions import DistributionRows, Distributions
from draftree.verifiers.base import NoiseSource


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
        The record of the round; None if no sequence decoded.

    Raises:
        Exception: what a part raised. What was written until then is verified and stays.
    """
    if not sequences:
        _read(parts, chunks)
        return None
    return finish_round(parts, draft_turns(parts, sequences), chunks)


def finish_round(
    parts: Parts,
    drafted: DraftedTurns,
    chunks: Series[Chunk] = (),
    *,
    beside: AbstractContextManager[object] | None = None,
) -> RoundRecord:
    """Score, verify, commit and learn.

    Args:
        parts: as for `run_round`.
        drafted: drafts of the sequences that write.
        chunks: as for `run_round`.
        beside: work beside the pass: entered before it, and left after it. Its time is in no record.

    Returns:
        The record of the round.

    Raises:
        Exception: as `run_round`.
    """
    turns, states = drafted.turns, drafted.states
    times = [parts.clock()]
    _trim(parts, turns, states, drafted.draft_seconds)
    times.append(parts.clock())
    jobs = [*map(_job, turns), *map(_chunk_job, chunks)]
    with beside or nullcontext():
        start = parts.clock()
        result = parts.target.run(Pass(jobs, capture=parts.capture))
        score_seconds = parts.clock() - start
    times.append(parts.clock())
    with Distributions(result.first(len(turns)), [_rows(turn) for turn in turns]) as distributions:
        _verify(parts, turns, distributions)
        times.append(parts.clock())
        rows = tuple([_write(turn, distributions, index) for index, turn in enumerate(turns)])
    _score_prompts(chunks, result, first=len(turns))
    _commit(parts, turns, chunks, result)
    times.append(parts.clock())
    trim, _, verify, commit = (after - before for before, after in pairwise(times))
    seconds = (drafted.plan_seconds + trim, drafted.draft_seconds, score_seconds, verify, commit)
    record = _record(drafted, seconds, rows, num_rows=sum(len(job.tokens) for job in jobs))
    parts.planner.observe(states, record)
    for sequence, row in zip((turn.sequence for turn in turns), rows, strict=True):
        count(sequence.counts, record, row)
        if sequence.rounds is not None:
            sequence.rounds.append(without_distributions(row))
        if sequence.is_finished:
            sequence.counts.explain = parts.planner.explain_of(sequence.plan_state)
    for chunk in chunks:
        chunk.sequence.counts.prefill_seconds += record.total_seconds
    return record


def _record(
    drafted: DraftedTurns, seconds: Series[float], rows: tuple[SequenceRecord, ...], *, num_rows: int
) -> RoundRecord:
    plan, draft, score, verify, commit = seconds
    return RoundRecord(
        plan_seconds=plan,
        draft_seconds=draft,
        score_seconds=score,
        verify_seconds=verify,
        commit_seconds=commit,
        total_seconds=sum(seconds),
        num_rows=num_rows,
        sequences=rows,
        part_seconds=drafted.part_seconds,
        num_prompt_rows=num_rows - sum(1 + len(turn.tree) for turn in drafted.turns),
    )


def _read(parts: Parts, chunks: Series[Chunk]) -> None:
    """A pass of prompt chunks only."""
    start = parts.clock()
    result = parts.target.run(Pass([_chunk_job(chunk) for chunk in chunks], capture=parts.capture))
    _score_prompts(chunks, result, first=0)
    _commit(parts, (), chunks, result)
    seconds = parts.clock() - start
    for chunk in chunks:
        chunk.sequence.counts.prefill_seconds += seconds


def _chunk_job(chunk: Chunk) -> Extend:
    slot = slot_of(chunk.sequence)
    sequence = chunk.sequence
    tokens = sequence.history.since(slot.length)[: chunk.num_tokens]
    # a sequence that lost its slot reads tokens again whose rows are scored already
    first = max(0, len(sequence.prompt_logprobs) - 1 - slot.length) if sequence.scores_prompt else len(tokens)
    return Extend(slot, tokens, range(-1, len(tokens) - 1), logits_at=range(first, len(tokens)))


def _score_prompts(chunks: Series[Chunk], result: PassResult, *, first: int) -> None:
    """Note log-probabilities of prompt tokens where they are wanted; the chunks' jobs begin at `first`."""
    for job, chunk in enumerate(chunks, first):
        logits = result.of(job)
        if not logits.num_rows:
            continue
        try:
            with logits.computing():
                score_prompt(chunk.sequence, logits.tensor())
        except AssertionError:
            raise  # a mistake of ours, not the request's
        except Exception as error:
            chunk.sequence.fail(error)


def _trim(parts: Parts, turns: Series[Turn], states: Series[Any], draft_seconds: float) -> None:
    """Keep what the planner keeps of each tree; of draws from a distribution everything: one that was looked at must
    count.
    """
    trees = [turn.drafted for turn in turns]
    if not any(map(len, trees)) or any(tree.draw not in (Draw.FREE, Draw.POINT) for tree in trees):
        return
    for turn, nodes in zip(turns, parts.planner.trim(states, trees, draft_seconds=draft_seconds), strict=True):
        if nodes is not None:
            turn.nodes = NodeMap.keeping(turn.drafted.parents, nodes)
            turn.tree = turn.nodes.cut(turn.drafted)


def _job(turn: Turn) -> Extend:
    """The pending tokens as a chain, and the tree at its end, which is the root."""
    tree, root = turn.tree, len(turn.pending) - 1
    parents = [*range(-1, root), *(root + 1 + parent for parent in tree.parents)]
    tokens = [*turn.pending, *tree.tokens]
    return Extend(slot_of(turn.sequence), tokens, parents, logits_at=range(root, len(tokens)))


def _rows(turn: Turn) -> DistributionRows:
    return DistributionRows(turn.sequence.history, turn.sequence.controls, turn.tree.token_paths())


def _verify(parts: Parts, turns: Series[Turn], distributions: Distributions) -> None:
    chances = [NoiseSource(t.sequence.controls.noise, "verify", len(t.sequence.history)) for t in turns]
    each = [distributions.of(index) for index in range(len(distributions))]
    found = parts.verifier.verify_many([turn.tree for turn in turns], each, chances)
    if parts.traits.wants_picks:
        # computed once for the whole batch: by the rule if it walks along picks, else here
        found = [replace(verdict, picks=tuple(own.picks())) for verdict, own in zip(found, each, strict=True)]
    # rows that the walk did not visit do not count: plain decoding would never have seen them
    visited = [[0, *(node + 1 for node in verdict.path)] for verdict in found]
    finite = distributions.finite(visited)
    for turn, verdict, rows, is_finite, own in zip(turns, found, visited, finite, each, strict=True):
        if is_finite:
            turn.verdict = verdict
            if turn.sequence.rounds is not None or turn.sequence.records_picks:
                turn.picks = tuple(own.picks())
        else:
            turn.sequence.fail(no_token_error(turn.sequence, _rows(turn), rows, distributions.width))


def _write(turn: Turn, distributions: Distributions, index: int) -> SequenceRecord:
    sequence, tree, verdict = turn.sequence, turn.tree, turn.verdict
    prefix, room = len(sequence.history), sequence.room
    if verdict is not None:
        try:
            _write_tokens(sequence, tree, verdict, distributions, index)
        except Exception as error:
            # turning tokens into text is this sequence's own affair, and so is its failure
            sequence.fail(error)
    written = len(sequence.history) - prefix
    path = () if verdict is None else tuple(verdict.path)
    return SequenceRecord(
        sequence.request_id,
        prefix,
        len(tree),
        max(depths(tree.parents)) if len(tree) else 0,
        min(written, len(path)),
        written,
        len(path),
        () if verdict is None or not len(tree) else matches(tree, verdict),
        index=sequence.index,
        drafted=turn.drafted,
        tree=tree,
        path=path,
        bonus=None if verdict is None else verdict.bonus,
        room=room,
        picks=turn.picks,
    )


def _write_tokens(
    sequence: WritingSequence, tree: TokenTree, verdict: Verdict, distributions: Distributions, index: int
) -> None:
    tokens = [*(tree.tokens[node] for node in verdict.path), verdict.bonus]
    written = sequence.write(tokens, len(verdict.path))
    top = sequence.controls.params.logprobs
    if top is not None:
        rows = [0, *(node + 1 for node in verdict.path)][:written]
        sequence.logprobs.extend(token_logprobs(distributions.of(index).raw[rows], tokens[:written], top=top))


def _commit(parts: Parts, turns: Series[Turn], chunks: Series[Chunk], result: PassResult) -> None:
    gains = [
        Gain(turn.sequence, job, _committed(turn), len(turn.pending), turn.drafted, turn.verdict_on_drafted)
        for job, turn in enumerate(turns)
        if turn.verdict is not None
    ]
    gains += [Gain(c.sequence, job, range(c.num_tokens), c.num_tokens) for job, c in enumerate(chunks, len(turns))]
    record(parts, gains, result)
    gains = [gain for gain in gains if gain.verdict is None or not gain.sequence.is_finished]
    if gains:
        parts.target.apply([Commit(slot_of(gain.sequence), gain.nodes) for gain in gains])
        observe(parts, gains, result)


def _committed(turn: Turn) -> Series[int]:
    """The pending tokens and the accepted path, as nodes of the pass."""
    assert turn.verdict is not None, "failed sequences commit nothing"
    num_pending = len(turn.pending)
    return [*range(num_pending), *(num_pending + node for node in turn.verdict.path)]
