"""Value types of the seams: budgets, verdicts and records of rounds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from draftree.core.tree import EMPTY, TokenTree, depths


@dataclass(frozen=True, slots=True)
class DraftCondition:
    """Minimum gain of a draft beside earlier drafts of other drafters in the same round.

    A token of the draft gains nothing where an earlier draft has the accepted token of that level. The two are taken as
    independent, so level l gains gains[l] * (1 - trust * s[l]), where s[l] is the highest survival of the earlier nodes
    of the level by their own scores.
    """

    gains: tuple[float, ...]  # expected tokens of each level without other drafts
    least: float  # expected tokens that the draft must add
    trust: float = 1.0  # acceptance of the earlier drafts relative to their scores

    def is_met(self, trees: Iterable[TokenTree]) -> bool:
        """Return whether a draft is worth its cost beside these trees; trees without scores are ignored."""
        survivals = [0.0] * len(self.gains)
        for tree in trees:
            for level, score in zip(depths(tree.parents), tree.scores, strict=False):
                if level <= len(survivals):
                    survivals[level - 1] = max(survivals[level - 1], min(1.0, self.trust * math.exp(score)))
        return sum(gain * (1.0 - s) for gain, s in zip(self.gains, survivals, strict=True)) >= self.least


MAX_NODES = 1024  # upper limit of the nodes of a sequence's tree, for every planner


@dataclass(frozen=True, slots=True)
class Budget:
    """The drafting limits of a sequence in one round. Zero nodes is allowed: the round is then plain decoding."""

    num_nodes: int  # maximum number of nodes
    depth: int  # maximum number of levels
    # a drafter does not expand a node whose probability under its own distribution is below this; the node itself is
    # kept, since dropping it would bias verifiers that use the draft distribution
    min_confidence: float = 0.0
    # levels of each merged drafter, in their order, 0 to skip one; empty: `depth` for all
    part_depths: tuple[int, ...] = ()
    # nodes, and levels, up to which a tree may exceed these limits with tokens that are forced and so cost no draft;
    # set by the loop
    room: int = 0
    # a drafter with calibrated scores does not expand a node whose estimated survival is below this; the node itself is
    # kept
    min_survival: float = 0.0
    # for each merged drafter what its draft must add to those of drafters without a model, which draft before; None, or
    # an empty tuple, for drafts in any case
    conditions: tuple[DraftCondition | None, ...] = ()

    def within(self, num_nodes: int, depth: int) -> Budget:
        nodes, levels = max(0, min(self.num_nodes, num_nodes)), max(0, min(self.depth, depth))
        return replace(self, num_nodes=nodes, depth=levels)

    def in_room(self, room: int) -> Budget:
        """Return the budget for a sequence that has room for `room` drafted tokens."""
        nodes, depth = min(self.num_nodes, MAX_NODES), max(0, min(self.depth, room))
        return replace(self, num_nodes=nodes, depth=depth, room=min(room, MAX_NODES))

    def of_part(self, part: int) -> Budget:
        """Return the share of one of several merged drafters."""
        if not self.part_depths:
            return self
        depth = min(self.depth, self.part_depths[part])
        return replace(self, num_nodes=self.num_nodes if depth else 0, depth=depth, part_depths=(), conditions=())


@dataclass(frozen=True, slots=True)
class DraftPart:
    """One of the drafters that a planner budgets."""

    name: str  # name in the `sources` of trees; trees of a single drafter may omit it
    depth: int  # default number of levels
    nodes: int  # nodes of its tree at that depth
    runs_model: bool = True  # whether each level is a pass of a model; otherwise drafting is nearly free at any depth
    gives_confidence: bool = True  # whether it honours `Budget.min_confidence`
    is_calibrated: bool = False  # whether its scores are fitted probabilities, and it honours `Budget.min_survival`
    # acceptance of each level given that the level before was accepted, measured on greedy texts; empty if unknown
    greedy_rates: tuple[float, ...] = ()
    sampled_rates: tuple[float, ...] = ()  # the same for texts sampled with a temperature


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of verifying a tree."""

    path: tuple[int, ...]  # accepted nodes from the root down, as indices into the tree; may be empty
    bonus: int  # the token chosen at the end of the accepted path; it was not drafted
    # the target's own choice at every row, 0 the root's, 1 + i node i's; None at a node that was not scored. Filled in
    # by the loop, not by the verifier, for drafters with `Drafter.wants_picks`; otherwise empty.
    picks: tuple[int | None, ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceRecord:
    """Raw counts of one sequence in one round, from which readers derive rates.

    `num_accepted` counts drafted tokens that were written; tokens cut by a stop or a limit are not counted.
    """

    request_id: str
    prefix_length: int
    num_drafted: int
    draft_depth: int
    num_accepted: int
    num_written: int
    num_in_path: int
    """Drafted tokens that the verifier accepted, before any cut by a stop or a limit; the planners' statistic."""
    matches: tuple[tuple[int, int], ...] = ()
    """One pair for every node on the accepted path that has children, root first: the number of children, and the
    accepted one (1, 2, …, in draft order), 0 for none."""
    index: int = 0  # index among the request's n sequences
    drafted: TokenTree = EMPTY  # the tree as drafted
    tree: TokenTree = EMPTY  # the tree as scored; the planner may have pruned the draft
    path: tuple[int, ...] = ()  # nodes of `tree` that the verifier accepted, before any cut by a stop or a limit
    bonus: int | None = None  # the token chosen at the end of the accepted path; None if the sequence failed
    room: int = 0  # tokens that could still be written before the round
    picks: tuple[int, ...] = ()
    """The target's pick at every row of `tree`, 0 the root's, 1 + i node i's, if the request is traced; else empty."""


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One round of the loop: seconds per phase, and a record for every sequence in the batch."""

    plan_seconds: float
    draft_seconds: float
    score_seconds: float
    verify_seconds: float
    commit_seconds: float
    total_seconds: float
    num_rows: int  # tokens in the target's pass: roots, drafted nodes and prompt tokens
    sequences: tuple[SequenceRecord, ...] = field(default=())
    part_seconds: tuple[float, ...] = ()
    """The share of each merged drafter, and of each that requests can choose, in `draft_seconds`; 0 for a drafter that
    was skipped."""
    num_prompt_rows: int = 0
    """Rows that only prefill: chunks of sequences that do not decode yet, and the last chunks of those that decoded
    for the first time."""
