"""Memory per sequence, and the number of sequences that fit into the free memory.

A sequence holds the keys and values of its tokens, in the target's slots and in the drafter's, and during a round the
logits of its tree. Sequences may use half of the free memory: while slots are replaced by longer ones, old and new ones
exist together. The memory of captured graphs is subtracted first. `draftree doctor` reports it.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftree.core.errors import ConfigurationError
from draftree.core.types import MAX_NODES
from draftree.engine.parts import Parts
from draftree.models.memory import LOGIT_COPIES, NOTHING, free_memory

SHARE = 0.5
"""Share of the free memory that sequences may use."""
UNKNOWN = 1 << 32
"""Assumed free bytes if the system does not report them."""
SHORT_TEXT = 64
"""Tokens of a text that must fit into the memory that a user sets."""
DRAFT_ROOM = 64
"""Initial room for tentative tokens in a slot; more if the drafter's trees are larger."""


@dataclass(frozen=True, slots=True)
class SlotBudget:
    """Memory for sequences and its division into slots: the one place where slots are counted.

    Attributes:
        free_bytes: of the device; None where the system does not say.
        graph_bytes: what captured graphs keep at most.
        sequence_bytes: what sequences may take.
        token_bytes: keys and values of one token, the drafter's included.
        round_bytes: logits and activations of one round of one sequence.
        tree_size: tentative tokens that have to fit beside the text.
    """

    free_bytes: int | None
    graph_bytes: int
    sequence_bytes: int
    token_bytes: int
    round_bytes: int
    tree_size: int

    def slot_bytes(self, length: int) -> int:
        """Bytes of one sequence of `length` tokens, prompt and text."""
        return (length + self.tree_size) * self.token_bytes + self.round_bytes

    def num_slots(self, length: int) -> int:
        """How many sequences of `length` tokens fit; 0 if not even one does."""
        return self.sequence_bytes // max(1, self.slot_bytes(length))

    @property
    def longest(self) -> int | None:
        """Tokens that one sequence can have; None if tokens take no memory."""
        if not self.token_bytes:
            return None
        return max(0, (self.sequence_bytes - self.round_bytes) // self.token_bytes - self.tree_size)


def slot_budget(parts: Parts, sequence_bytes: int | None = None) -> SlotBudget:
    """The budget of an engine of these parts, whose weights lie in memory already.

    Args:
        parts: loaded.
        sequence_bytes: what sequences may take; None for half of what is free now.

    Raises:
        ConfigurationError: not even one short text fits into `sequence_bytes`.
    """
    target = parts.target.footprint
    draft = NOTHING if parts.drafter is None else parts.drafter.footprint
    nodes = 0 if parts.drafter is None else min(parts.planner.default_nodes, MAX_NODES)
    is_given = sequence_bytes is not None
    free, graphs = free_memory(parts.target.device), target.graphs + draft.graphs
    if sequence_bytes is None:
        sequence_bytes = int(SHARE * max(0, (UNKNOWN if free is None else free) - graphs))
    budget = SlotBudget(
        free_bytes=free,
        graph_bytes=graphs,
        sequence_bytes=sequence_bytes,
        token_bytes=target.token + draft.token,
        round_bytes=(1 + nodes) * (LOGIT_COPIES * target.logits + target.row) + LOGIT_COPIES * draft.logits + draft.row,
        tree_size=max(DRAFT_ROOM, nodes),
    )
    if is_given:
        _require_room(budget, min(SHORT_TEXT, parts.target.max_length))
    return budget


def _require_room(budget: SlotBudget, length: int) -> None:
    if not budget.num_slots(length):
        raise ConfigurationError(
            f"sequence_memory is {budget.sequence_bytes} bytes, but a text of {length} tokens, the prompt included, "
            f"takes {budget.slot_bytes(length)}: increase it, or omit it to use half of the free memory"
        )


@dataclass(frozen=True, slots=True)
class SlotEstimate:
    """The number of slots of one length that an engine has room for.

    Attributes:
        free_bytes: free memory of the device; None if the system does not report it.
        sequence_bytes: bytes of it that sequences may use.
        graph_bytes: upper bound of the memory of captured graphs.
        slot_bytes: bytes per slot, including its drafts.
        num_slots: number of slots that fit; 0 if none does.
    """

    free_bytes: int | None
    sequence_bytes: int
    graph_bytes: int
    slot_bytes: int
    num_slots: int


def estimate_slots(parts: Parts, length: int) -> SlotEstimate:
    """Estimate the room of an engine with these parts, created now.

    Args:
        parts: the loaded parts.
        length: tokens per slot, prompt and text.
    """
    budget = slot_budget(parts)
    return SlotEstimate(
        free_bytes=budget.free_bytes,
        sequence_bytes=budget.sequence_bytes,
        graph_bytes=budget.graph_bytes,
        slot_bytes=budget.slot_bytes(length),
        num_slots=budget.num_slots(length),
    )
