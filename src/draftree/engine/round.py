"""The loop: plan, draft, score, verify, commit, learn. Plain decoding is the same with an empty tree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import torch
from torch import Tensor

from draftree.core.errors import NonFiniteLogitsError, UnsatisfiableError
from draftree.core.node_map import NodeMap
from draftree.core.tensors import layers_of, rows_of, to_device, to_host, widened
from draftree.core.tree import EMPTY, ROOT, Draw, TokenTree, depths, is_chain
from draftree.core.types import MAX_NODES, Budget, RoundRecord, SequenceRecord, Verdict
from draftree.drafters.base import Observation
from draftree.engine.parts import EngineParts, StateRows
from draftree.engine.sequence import DraftChoice, SequenceCounts, TokenLogprob, WritingSequence, slot_of
from draftree.models.base import Commit, Extend, Pass, PassResult
from draftree.sampling.distributions import DistributionRows, Distributions, NodeDistributions
from draftree.sampling.logits import TensorLogits
from draftree.sampling.params import SamplingParams
from draftree.verifiers.base import NoiseSource

NO_BUDGET = Budget(0, 0)


@dataclass(slots=True)
class SequenceRound:
    """One sequence in a round. Each phase fills in its part."""

    sequence: WritingSequence
    pending: list[int]
    """Written tokens that the target's slot does not hold yet; the last is the root."""
    budget: Budget = NO_BUDGET
    drafted: TokenTree = EMPTY
    """As it was drafted."""
    tree: TokenTree = EMPTY
    """The part of it that is scored."""
    nodes: NodeMap | None = None
    """Where the nodes of `drafted` are in `tree`; None if the trees are one."""
    verdict: Verdict | None = None
    """None until there is one, and where the sequence failed."""
    picks: tuple[int, ...] = ()
    """The target's pick at every row of `tree`, if the request is traced."""

    def outcome(self) -> tuple[TokenTree, Verdict]:
        """Return the drafter's own tree, and the verdict with its nodes."""
        assert self.verdict is not None, "failed sequences have no verdict"
        verdict = self.verdict if self.nodes is None else self.nodes.verdict_on_source(self.verdict)
        forced = self.sequence.forced
        state = self.sequence.draft_state
        if verdict.picks and state is not None and not state.choice.traits.wants_picks:
            verdict = replace(verdict, picks=())
        if forced is None or state is None or self.sequence.client_drafts is not None:
            return self.drafted, verdict
        return forced.drafted, forced.verdict_on_draft(verdict)


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next tokens of a prompt that a sequence reads without writing yet."""

    sequence: WritingSequence
    num_tokens: int


def run_round(
    parts: EngineParts,
    sequences: Sequence[WritingSequence],
    chunks: Sequence[Chunk] = (),
    *,
    max_nodes: int = MAX_NODES,
) -> list[RoundRecord]:
    """Write at least one token of every sequence, and read chunks of other prompts in the same pass.

    A sequence that fails is marked and fails alone. What a part raises is raised; the tokens that were written until
    then are verified and stay.

    Args:
        sequences: those that write, each with a slot; their unread tokens are read before their root.
        max_nodes: drafted tokens of a sequence for which there is memory.

    Returns:
        The record of the round, or of several rounds without drafts whose passes ran in one call; none if no sequence
        decoded.
    """
    start = parts.clock()
    turns = [SequenceRound(s, s.history.since(slot_of(s).length)) for s in sequences]
    groups = _by_drafter(turns)
    for choice, group in groups:
        _plan(choice, group, others=len(turns) - len(group), max_nodes=max_nodes)
    planned = parts.clock()
    capture = _captured(parts, turns, chunks)
    tokens = [] if chunks or capture else _decode(parts, turns, groups, max_nodes=max_nodes)
    if tokens:
        records = _write_rounds(parts, turns, tokens, start, planned)
        _tell(parts, turns, groups, records)
        return records
    part_seconds = _draft(parts, turns, groups)
    drafted = parts.clock()
    for choice, group in groups:
        _trim(choice, group, drafted - planned)
    trimmed = parts.clock()
    jobs = [*map(_job, turns), *map(_chunk_job, chunks)]
    result = parts.target.run(Pass(jobs, capture=capture))
    scored = parts.clock()
    with Distributions(result.first(len(turns)), [_rows(turn) for turn in turns]) as distributions:
        _verify(parts, turns, distributions)
        verified = parts.clock()
        rows = tuple([_write(turn, distributions.of(index)) for index, turn in enumerate(turns)])
    _score_prompts(chunks, result, first=len(turns))
    _commit(parts, turns, chunks, result)
    committed = parts.clock()
    num_rows = sum(len(job.tokens) for job in jobs)
    record = RoundRecord(
        plan_seconds=(planned - start) + (trimmed - drafted),
        draft_seconds=drafted - planned,
        score_seconds=scored - trimmed,
        verify_seconds=verified - scored,
        commit_seconds=committed - verified,
        total_seconds=committed - start,
        num_rows=num_rows,
        sequences=rows,
        part_seconds=part_seconds,
        num_prompt_rows=num_rows - sum(1 + len(turn.tree) for turn in turns),
    )
    _tell(parts, turns, groups, [record])
    for chunk in chunks:
        chunk.sequence.counts.prefill_seconds += record.total_seconds
    return [record] if turns else []


MAX_PASSES = 16
MAX_SECONDS = 0.05
"""Largest number of passes in one call, and the time after which none begins: other threads and Ctrl-C wait for it."""


def _decode(
    parts: EngineParts,
    turns: Sequence[SequenceRound],
    groups: Sequence[tuple[DraftChoice, Sequence[SequenceRound]]],
    *,
    max_nodes: int,
) -> list[list[int]]:
    """Return the tokens of several rounds without drafts, if no caller or control needs them one at a time."""
    idle = [1 + choice.planner.idle_rounds() for choice, _ in groups]
    count = min(MAX_PASSES, 1 + max_nodes, *idle, *(turn.sequence.room for turn in turns))
    if count < 2 or not parts.verifier.follows_picks or not all(map(_is_plain, turns)):
        return []
    controls = [turn.sequence.controls for turn in turns]
    ends = [(len(turn.sequence.history), own) for turn, own in zip(turns, controls, strict=True)]
    noise = [
        [(own.noise.keys(end + step), own.temperature) if own.temperature else None for end, own in ends]
        for step in range(count)
    ]
    stop_ids = frozenset().union(*(own.stop_ids for own in controls))
    return parts.target.decode([_job(turn) for turn in turns], noise, stop_ids, seconds=MAX_SECONDS)


def _is_plain(turn: SequenceRound) -> bool:
    """Return whether logits, temperature and noise alone decide the next tokens of a sequence."""
    sequence = turn.sequence
    controls, params = sequence.controls, sequence.controls.params
    is_drafted = turn.budget.num_nodes or sequence.client_drafts is not None
    is_traced = sequence.rounds is not None or sequence.records_picks or params.logprobs is not None
    is_controlled = controls.processors or controls.filters or params.stop_strings
    return sequence.is_collected and len(turn.pending) == 1 and not (is_drafted or is_traced or is_controlled)


def _write_rounds(
    parts: EngineParts, turns: Sequence[SequenceRound], tokens: Sequence[Sequence[int]], start: float, planned: float
) -> list[RoundRecord]:
    """Write the tokens of several rounds and commit them; return records with equal shares of the seconds."""
    scored = parts.clock()
    rows = []
    for chosen in tokens:
        for turn, token in zip(turns, chosen, strict=True):
            turn.pending += [] if turn.verdict is None else [turn.verdict.bonus]
            turn.verdict = Verdict((), token)
        rows.append(tuple([_write(turn) for turn in turns]))
        if any(turn.sequence.is_finished for turn in turns):  # by an error where others go on
            break
    _commit(parts, turns, (), None)
    times = (start, planned, scored, parts.clock())
    plan, score, commit = ((end - begin) / len(rows) for begin, end in pairwise(times))
    return [RoundRecord(plan, 0.0, score, 0.0, commit, plan + score + commit, len(turns), row) for row in rows]


def _tell(
    parts: EngineParts,
    turns: Sequence[SequenceRound],
    groups: Sequence[tuple[DraftChoice, Sequence[SequenceRound]]],
    records: Sequence[RoundRecord],
) -> None:
    """Report rounds to the planners and in the counts of the sequences."""
    for number, record in enumerate(records):
        for choice, group in groups:
            if number:
                budgets = choice.planner.budgets([turn.sequence.plan_state for turn in group])
                assert not any(budget.num_nodes for budget in budgets), "a planner drafts nothing in idle rounds"
            _observe_plan(parts, choice, group, turns, record)
        for turn, row in zip(turns, record.sequences, strict=True):
            sequence = turn.sequence
            count_round(sequence.counts, record, row)
            if sequence.rounds is not None:
                sequence.rounds.append(without_distributions(row))
            if sequence.is_finished and sequence.draft_state is not None:
                sequence.counts.explain = sequence.draft_state.choice.planner.explain()


def _by_drafter(turns: Sequence[SequenceRound]) -> list[tuple[DraftChoice, list[SequenceRound]]]:
    """Group the sequences by their drafter; plain decoding has no group."""
    groups: dict[DraftChoice, list[SequenceRound]] = {}
    for turn in turns:
        if turn.sequence.draft_state is not None:
            groups.setdefault(turn.sequence.draft_state.choice, []).append(turn)
    return list(groups.items())


def _captured(parts: EngineParts, turns: Sequence[SequenceRound], chunks: Sequence[Chunk]) -> tuple[int, ...]:
    """Return the layers whose hidden states someone will read; those of prompts are kept for a later draft."""
    is_prompt = bool(chunks) or any(len(turn.pending) > 1 for turn in turns)
    is_needed = is_prompt or parts.sink is not None or any(choice.planner.needs_states() for choice in parts.drafters)
    return parts.capture if is_needed else ()


def _plan(choice: DraftChoice, turns: Sequence[SequenceRound], *, others: int, max_nodes: int) -> None:
    choice.planner.note_others(others, others)
    budgets = choice.planner.budgets([turn.sequence.plan_state for turn in turns])
    for turn, budget in zip(turns, budgets, strict=True):
        if budget.num_nodes or turn.sequence.forced is not None:
            # a round writes one token more than it drafts: the bonus needs room as well
            turn.budget = budget.within(max_nodes, budget.depth).in_room(turn.sequence.room - 1)


def _draft(
    parts: EngineParts, turns: Sequence[SequenceRound], groups: Sequence[tuple[DraftChoice, Sequence[SequenceRound]]]
) -> tuple[float, ...]:
    """Draft the trees; returns the share of each drafter, merged ones apart, in the time; empty for a single one."""
    for turn in turns:
        if turn.sequence.client_drafts is not None:
            turn.drafted = turn.tree = turn.sequence.client_drafts.take()
    seconds = {choice: (0.0,) * len(choice.planner.parts) for choice in parts.drafters}
    has_drafted = False
    for choice, group in groups:
        start = parts.clock() if len(seconds) > 1 else 0.0
        drafting = [turn for turn in group if turn.sequence.client_drafts is None]
        if not _draft_by(choice, drafting, parts):
            continue
        has_drafted = has_drafted or any(len(turn.drafted) for turn in drafting)
        whole = (parts.clock() - start, *seconds[choice][1:]) if len(seconds) > 1 else ()
        seconds[choice] = choice.drafter.part_seconds or whole
    return tuple(chain.from_iterable(seconds.values())) if has_drafted else ()


def _draft_by(choice: DraftChoice, turns: Sequence[SequenceRound], parts: EngineParts) -> bool:
    """Draft the trees of the sequences of one drafter; returns whether it was asked for any."""
    drafting = []
    for turn in turns:
        most = min(turn.budget.num_nodes, turn.budget.depth)
        forced = turn.sequence.forced
        # what a grammar forces needs no budget
        if most > (0 if forced is None else forced.begin(turn.budget.room)):
            drafting.append(turn)
    states = [turn.sequence.draft_state.own for turn in drafting if turn.sequence.draft_state is not None]
    trees = choice.drafter.draft(states, [turn.budget for turn in drafting]) if drafting else []
    for turn, tree in zip(drafting, trees, strict=True):
        turn.drafted = turn.tree = tree
    for turn in turns:
        if turn.sequence.forced is not None and turn.budget.room > 0:
            turn.drafted = turn.tree = turn.sequence.forced.fit(
                turn.drafted,
                turn.budget.room,
                name=choice.name,
                draw=choice.draw,
                may_branch=parts.target.supports_trees and not parts.verifier.chains_only,
                vocab_size=parts.target.vocab_size,
            )
        if not parts.target.supports_trees and not is_chain(turn.tree.parents):
            raise AssertionError("a target that scores chains only was given a tree")
    return bool(drafting)


def _observe_plan(
    parts: EngineParts,
    choice: DraftChoice,
    turns: Sequence[SequenceRound],
    everyone: Sequence[SequenceRound],
    record: RoundRecord,
) -> None:
    """Tell a planner the outcome for its sequences, with its drafter's share of the time."""
    states = [turn.sequence.plan_state for turn in turns]
    if len(turns) < len(everyone):
        drafters = {id(turn) for turn in turns}
        rows = tuple([row for turn, row in zip(everyone, record.sequences, strict=True) if id(turn) in drafters])
        others = len(everyone) - len(turns)
        choice.planner.note_others(
            others, others + sum(len(turn.tree) for turn in everyone if id(turn) not in drafters)
        )
    else:
        rows = record.sequences
    if len(parts.drafters) > 1:
        place = parts.drafters.index(choice)
        start = sum(len(previous.planner.parts) for previous in parts.drafters[:place])
        shares = record.part_seconds[start : start + len(choice.planner.parts)]
        share = sum(shares) if record.part_seconds else len(rows) / len(record.sequences) * record.draft_seconds
        record = replace(
            record,
            draft_seconds=share,
            total_seconds=record.total_seconds - record.draft_seconds + share,
            part_seconds=shares if len(shares) > 1 else (),
        )
    choice.planner.observe(states, record if rows is record.sequences else replace(record, sequences=rows))


FORBIDDING = ("allowed_token_ids", "bad_words", "no_repeat_ngram_size", "min_tokens", "json_schema", "regex", "grammar")
"""Parameters that can forbid tokens, besides `logit_bias`."""


def no_token_error(
    sequence: WritingSequence, rows: DistributionRows, visited: Sequence[int], vocab_size: int
) -> NonFiniteLogitsError | UnsatisfiableError:
    """Return the error for a sequence whose distributions have a row without a token, or with NaN.

    Args:
        visited: the rows that count (0 the root's, 1 + i node i's).
    """
    equal = TensorLogits(torch.zeros(len(rows.paths), vocab_size))
    place = f"request {sequence.request_id}: at position {len(sequence.history)}"
    # if no token is left of equal logits either, the model's are not the reason
    if all(Distributions(equal, [rows]).finite([visited])):
        return NonFiniteLogitsError(
            f"{place} the model's logits are NaN or infinite for all tokens that the sampling controls allow: check "
            "weights and dtype (float16 overflows where bfloat16 does not)"
        )
    names = forbidding(sequence.controls.params)
    return UnsatisfiableError(
        f"{place} the sampling controls left no token: no token agrees with {' and '.join(names)}; "
        f"change {'one of them' if len(names) > 1 else 'it'}",
        param=names[0] if names else None,
    )


def forbidding(params: SamplingParams) -> list[str]:
    """Return the names of the parameters of a request that can forbid tokens."""
    names = [name for name in FORBIDDING if getattr(params, name) not in (None, 0, ())]
    if params.logit_bias and -math.inf in params.logit_bias.values():
        names.append("logit_bias")
    return names


EVERY_TOKEN = -1
PROMPT_LOGIT_BYTES = 32 * 2**20
"""Maximum size of prompt logits in one pass; their log-probabilities take as much again."""


def scored_rows(vocab_size: int) -> int:
    """Return the maximum number of prompt rows whose logits one pass computes."""
    return max(1, PROMPT_LOGIT_BYTES // (4 * vocab_size))


def score_prompt(sequence: WritingSequence, logits: Tensor) -> None:
    """Record log-probabilities of the next prompt tokens.

    Args:
        logits: logits that predict its next tokens without an entry, shape (tokens, vocab).
    """
    top = sequence.controls.params.prompt_logprobs
    assert top is not None, "the request wants log-probabilities of its prompt"
    first = len(sequence.prompt_logprobs)
    tokens = sequence.history.since(first)[: len(logits)]
    entries = token_logprobs(logits, tokens, top=top)
    for position, entry in enumerate(entries, first):
        if math.isnan(entry.logprob):
            raise NonFiniteLogitsError(
                f"request {sequence.request_id}: the log-probability of the prompt's token at position {position} is "
                "NaN: check weights and dtype (float16 overflows where bfloat16 does not)"
            )
    sequence.prompt_logprobs.extend(entries)


def token_logprobs(logits: Tensor, tokens: Sequence[int], *, top: int) -> list[TokenLogprob]:
    """Return one entry per token.

    Args:
        logits: the model's logits at each token's position, shape (tokens, vocab).
        top: how many of the most likely tokens to list; -1 lists all.
    """
    top = logits.shape[-1] if top == EVERY_TOKEN else top
    log_probs = torch.log_softmax(logits, dim=-1)
    chosen = log_probs.gather(-1, to_device(tokens, logits.device).unsqueeze(-1))
    ranks = (log_probs > chosen).sum(-1, keepdim=True) + 1
    best = log_probs.topk(top, dim=-1)
    # one transfer
    rows = to_host(torch.cat([widened(part) for part in (chosen, ranks, best.indices, best.values)], dim=1))
    return [
        TokenLogprob(token, logprob, tuple(zip(map(int, numbers[:top]), numbers[top:], strict=True)), int(rank))
        for token, (logprob, rank, *numbers) in zip(tokens, rows, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class PassOutcome:
    """The nodes that a pass adds to the prefix of one sequence's slot.

    Attributes:
        sequence: whose slot it is.
        job: of the pass.
        nodes: of the job, those that become prefix.
        tokens_read: how many of them are text that was written before.
        drafted: the drafter's tree; empty for a prompt chunk.
        verdict: on that tree; None for a prompt chunk.
    """

    sequence: WritingSequence
    job: int
    nodes: Sequence[int]
    tokens_read: int
    drafted: TokenTree = EMPTY
    verdict: Verdict | None = None


def record_states(parts: EngineParts, gains: Sequence[PassOutcome], result: PassResult | None) -> None:
    """Pass hidden states of the tokens that a pass read to the sink, before they are committed.

    Args:
        parts: with the sink; nothing is done without one.
        gains: of all sequences of the pass, those that ended included.
    """
    if parts.sink is None or result is None or result.hidden is None:
        return
    texts = []
    for gain in gains:
        sequence = gain.sequence
        if sequence.error is None:
            assert sequence.slot is not None, "a sequence in a pass has a slot"
            start, first = sequence.slot.length, result.row_starts[gain.job]
            # a text may end before the end of the accepted path
            rows = [first + node for node in gain.nodes[: len(sequence.history) - 1 - start]]
            texts.append(StateRows(sequence, start, rows))
    columns = [parts.capture.index(layer) for layer in parts.sink.layers]
    is_all = columns == list(range(len(parts.capture)))
    parts.sink.take(result.hidden if is_all else result.hidden[:, columns], texts)


def observe(parts: EngineParts, gains: Sequence[PassOutcome], result: PassResult | None) -> None:
    """Report a committed pass to the drafters of the sequences that go on.

    Args:
        result: result of the pass, which captured the layers of `EngineParts.capture`; None for nothing captured.
    """
    starts, states = ((), None) if result is None else (result.row_starts, result.hidden)
    captured = parts.capture
    for choice in parts.drafters:
        columns = [captured.index(layer) for layer in parts.feature_layers(choice.traits)]
        hidden = layers_of(states, columns) if columns and states is not None else None
        observations = []
        for gain in gains:
            state = gain.sequence.draft_state
            if state is None or state.choice is not choice or gain.sequence.is_finished:
                continue
            rows = None if hidden is None else rows_of(hidden, [starts[gain.job] + node for node in gain.nodes])
            observations.append(Observation(state.own, gain.tokens_read, gain.drafted, gain.verdict, rows))
        if observations:
            choice.drafter.observe(observations)


def accepted_children(tree: TokenTree, verdict: Verdict) -> tuple[tuple[int, int], ...]:
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


def count_round(counts: SequenceCounts, record: RoundRecord, row: SequenceRecord) -> None:
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


def _chunk_job(chunk: Chunk) -> Extend:
    slot = slot_of(chunk.sequence)
    sequence = chunk.sequence
    tokens = sequence.history.since(slot.length)[: chunk.num_tokens]
    # a sequence that lost its slot reads tokens again whose rows are scored already
    first = max(0, len(sequence.prompt_logprobs) - 1 - slot.length) if sequence.scores_prompt else len(tokens)
    count = len(tokens)
    return Extend(slot, tokens, range(-1, count - 1), logits_at=range(first, count), settled=count)


def _score_prompts(chunks: Sequence[Chunk], result: PassResult, *, first: int) -> None:
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


def _trim(choice: DraftChoice, turns: Sequence[SequenceRound], draft_seconds: float) -> None:
    """Keep what the planner keeps of each tree; of draws from a distribution everything: one that was looked at must
    count.
    """
    trees = [turn.drafted for turn in turns]
    if not any(map(len, trees)) or any(tree.draw not in (Draw.FREE, Draw.POINT) for tree in trees):
        return
    states = [turn.sequence.plan_state for turn in turns]
    for turn, nodes in zip(turns, choice.planner.trim(states, trees, draft_seconds=draft_seconds), strict=True):
        if nodes is not None:
            turn.nodes = NodeMap.keeping(turn.drafted.parents, nodes)
            turn.tree = turn.nodes.cut(turn.drafted)


def _job(turn: SequenceRound) -> Extend:
    """The pending tokens as a chain, and the tree at its end, which is the root."""
    tree, root = turn.tree, len(turn.pending) - 1
    parents = [*range(-1, root), *(root + 1 + parent for parent in tree.parents)]
    tokens = [*turn.pending, *tree.tokens]
    settled = len(turn.pending)
    return Extend(slot_of(turn.sequence), tokens, parents, logits_at=range(root, len(tokens)), settled=settled)


def _rows(turn: SequenceRound) -> DistributionRows:
    return DistributionRows(turn.sequence.history, turn.sequence.controls, turn.tree.token_paths())


def _verify(parts: EngineParts, turns: Sequence[SequenceRound], distributions: Distributions) -> None:
    chances = [NoiseSource(t.sequence.controls.noise, "verify", len(t.sequence.history)) for t in turns]
    each = [distributions.of(index) for index in range(len(distributions))]
    verdicts = parts.verifier.verify_many([turn.tree for turn in turns], each, chances)
    if any(choice.traits.wants_picks for choice in parts.drafters):
        # computed once for the whole batch: by the rule if it walks along picks, else here
        verdicts = [
            replace(verdict, picks=tuple(distribution.picks()))
            for verdict, distribution in zip(verdicts, each, strict=True)
        ]
    # rows that the walk did not visit do not count: plain decoding would never have seen them
    visited = [[0, *(node + 1 for node in verdict.path)] for verdict in verdicts]
    finite = distributions.finite(visited)
    for turn, verdict, rows, is_finite, distribution in zip(turns, verdicts, visited, finite, each, strict=True):
        if is_finite:
            turn.verdict = verdict
            if turn.sequence.rounds is not None or turn.sequence.records_picks:
                turn.picks = tuple(distribution.picks())
        else:
            turn.sequence.fail(no_token_error(turn.sequence, _rows(turn), rows, distributions.width))


def _write(turn: SequenceRound, distributions: NodeDistributions | None = None) -> SequenceRecord:
    sequence, tree, verdict = turn.sequence, turn.tree, turn.verdict
    prefix, room = len(sequence.history), sequence.room
    if verdict is not None:
        try:
            _write_tokens(sequence, tree, verdict, distributions)
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
        () if verdict is None or not len(tree) else accepted_children(tree, verdict),
        index=sequence.index,
        drafted=turn.drafted,
        tree=tree,
        path=path,
        bonus=None if verdict is None else verdict.bonus,
        room=room,
        picks=turn.picks,
    )


def _write_tokens(
    sequence: WritingSequence, tree: TokenTree, verdict: Verdict, distributions: NodeDistributions | None
) -> None:
    tokens = [*(tree.tokens[node] for node in verdict.path), verdict.bonus]
    written = sequence.write(tokens, len(verdict.path))
    top = sequence.controls.params.logprobs
    if top is not None and distributions is not None:
        rows = [0, *(node + 1 for node in verdict.path)][:written]
        sequence.logprobs.extend(token_logprobs(rows_of(distributions.raw, rows), tokens[:written], top=top))


def _commit(
    parts: EngineParts, turns: Sequence[SequenceRound], chunks: Sequence[Chunk], result: PassResult | None
) -> None:
    gains = [
        PassOutcome(turn.sequence, job, _committed(turn), len(turn.pending), *turn.outcome())
        for job, turn in enumerate(turns)
        if turn.verdict is not None
    ]
    gains += [
        PassOutcome(c.sequence, job, range(c.num_tokens), c.num_tokens) for job, c in enumerate(chunks, len(turns))
    ]
    record_states(parts, gains, result)
    commits = [_commit_of(gain) for gain in gains if gain.verdict is None or gain.sequence.error is None]
    if commits:
        parts.target.apply(commits)
        observe(parts, gains, result)


def _commit_of(gain: PassOutcome) -> Commit:
    """Of a finished sequence only what was settled: a prefix that ends before the last tokens is of use to others."""
    is_last = gain.verdict is not None and gain.sequence.is_finished
    return Commit(slot_of(gain.sequence), gain.nodes[: gain.tokens_read] if is_last else gain.nodes)


def _committed(turn: SequenceRound) -> Sequence[int]:
    """The pending tokens and the accepted path, as nodes of the pass."""
    assert turn.verdict is not None, "failed sequences commit nothing"
    num_pending = len(turn.pending)
    return [*range(num_pending), *(num_pending + node for node in turn.verdict.path)]
