"""Small values that pass through the seams: budgets, verdicts and the record of a round."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from draftree.core.tree import EMPTY, TokenTree

MAX_NODES = 256
"""Nodes of a sequence's tree at most, whatever a planner says."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What a sequence may draft in one round. Zero nodes is allowed: the round is then plain decoding.

    Attributes:
        num_nodes: nodes at most.
        depth: levels at most.
        min_confidence: a drafter stops below a node whose probability under its own distribution is under this;
            the node itself is kept, since dropping it would bias rules that look at the draft distribution.
        part_depths: for merged drafters the levels of each, in their order, 0 to leave one out; empty: `depth` for all.
        room: nodes, and levels, up to which a tree may be larger than that, by tokens that must follow and so cost no
            guess; the loop sets it.
    """

    num_nodes: int
    depth: int
    min_confidence: float = 0.0
    part_depths: tuple[int, ...] = ()
    room: int = 0

    def within(self, num_nodes: int, depth: int) -> Budget:
        """The same budget, held to these limits."""
        nodes, levels = max(0, min(self.num_nodes, num_nodes)), max(0, min(self.depth, depth))
        return Budget(nodes, levels, self.min_confidence, self.part_depths, self.room)

    def in_room(self, room: int) -> Budget:
        """The same budget, for a text that has room for so many drafted tokens."""
        nodes, depth = min(self.num_nodes, MAX_NODES), max(0, min(self.depth, room))
        return Budget(nodes, depth, self.min_confidence, self.part_depths, min(room, MAX_NODES))

    def of_part(self, part: int) -> Budget:
        """What one of merged drafters may do of it."""
        if not self.part_depths:
            return self
        depth = min(self.depth, self.part_depths[part])
        return replace(self, num_nodes=self.num_nodes if depth else 0, depth=depth, part_depths=())


@dataclass(frozen=True, slots=True)
class DraftPart:
    """One of the drafters that a planner plans for.

    Attributes:
        name: as trees name it in `sources`; trees of a lone drafter need not name it.
        depth: levels that it guesses where the planner does not say.
        nodes: nodes of its tree at that depth.
        runs_model: whether its levels are passes of a model; else it answers at once, however deep.
        gives_confidence: whether it stops below `Budget.min_confidence`.
    """

    name: str
    depth: int
    nodes: int
    runs_model: bool = True
    gives_confidence: bool = True


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verifier keeps of a tree.

    Attributes:
        path: accepted nodes from the root down, as indices into the tree; may be empty.
        bonus: the token chosen where the walk ends; it was not drafted.
        picks: the target's own choice at every row, 0 the root's, 1 + i node i's; None at a node that was not scored.
            For drafters that ask (`Drafter.wants_picks`): the loop fills it in, not the rule; otherwise empty.
    """

    path: tuple[int, ...]
    bonus: int
    picks: tuple[int | None, ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceRecord:
    """What one sequence did in one round; raw counts, from which readers derive rates.

    `num_accepted` counts drafted tokens that were written: tokens cut by a stop or a limit are not in it.
    """

    request_id: str
    prefix_length: int
    num_drafted: int
    draft_depth: int
    num_accepted: int
    num_written: int
    num_in_path: int
    """Drafted tokens the verifier accepted, before any cut by a stop or a limit: what planners learn from."""
    matches: tuple[tuple[int, int], ...] = ()
    """For every node that the walk came to, root first: how many children it had, and which of them (1, 2, …, in
    draft order) was accepted; 0 for none. Nodes without children are left out."""
    index: int = 0
    """Which of the request's n."""
    drafted: TokenTree = EMPTY
    """As it was drafted."""
    tree: TokenTree = EMPTY
    """What of it was scored; the planner may have cut it."""
    path: tuple[int, ...] = ()
    """Nodes of `tree` that the verifier accepted, before any cut by a stop or a limit."""
    bonus: int | None = None
    """The token that was picked where the walk ended; None where the sequence failed."""
    room: int = 0
    """Tokens that could still be written before the round."""


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One pass of the loop: seconds by phase, and a row for every sequence in the batch."""

    plan_seconds: float
    draft_seconds: float
    score_seconds: float
    verify_seconds: float
    commit_seconds: float
    total_seconds: float
    num_rows: int
    """Tokens in the target's pass: roots, drafted nodes, and what was read of prompts."""
    sequences: tuple[SequenceRecord, ...] = field(default=())
    part_seconds: tuple[float, ...] = ()
    """Of `draft_seconds`, where drafters are merged, each one's; a drafter that was not asked took none."""
    num_prompt_rows: int = 0
    """Those of the rows that only read prompts: chunks of sequences that do not write yet, and the last chunks of those
    that wrote for the first time."""
