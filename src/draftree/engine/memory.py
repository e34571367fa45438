"""Memory per sequence, and the number of sequences that fit into the free memory.

A sequence holds the keys and values of its tokens, in the target's slots and in the drafter's, and during a round the
logits of its tree. Sequences may use half of the free memory: while slots are replaced by longer ones, old and new ones
exist together. The memory of captured graphs is subtracted first. `draftree doctor` reports it.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftree.core.types import MAX_NODES
from draftree.engine.parts import Parts
from draftree.models.memory import LOGIT_COPIES, NOTHING, free_memory

SHARE = 0.5
"""Share of the free memory that sequences may use."""
UNKNOWN = 1 << 32
"""Assumed free bytes if the system does not report them."""
DRAFT_ROOM = 64
"""Initial room for tentative tokens in a slot; more if the drafter's trees are larger."""


@dataclass(frozen=True, slots=True)
class SequenceMemory:
    """Bytes per sequence.

    Attributes:
        token: keys and values of one token, the drafter's included.
        round: logits and activations of one round.
        tree: number of tentative tokens that must fit in addition to the text.
    """

    token: int
    round: int
    tree: int

    def of(self, length: int) -> int:
        """Return the bytes of a sequence of `length` tokens."""
        return (length + self.tree) * self.token + self.round

    def num_slots(self, num_bytes: int, length: int) -> int:
        """Return how many sequences of `length` tokens fit into `num_bytes`."""
        return num_bytes // max(1, self.of(length))

    def longest(self, num_bytes: int) -> int | None:
        """Return the longest sequence in tokens that fits into `num_bytes`; None if tokens take no memory."""
        return max(0, (num_bytes - self.round) // self.token - self.tree) if self.token else None


def memory_of_sequence(parts: Parts) -> SequenceMemory:
    """Return the memory per sequence with these parts."""
    target = parts.target.footprint
    draft = NOTHING if parts.drafter is None else parts.drafter.footprint
    nodes = 0 if parts.drafter is None else min(parts.planner.default_nodes, MAX_NODES)
    return SequenceMemory(
        token=target.token + draft.token,
        round=(1 + nodes) * (LOGIT_COPIES * target.logits + target.row) + LOGIT_COPIES * draft.logits + draft.row,
        tree=max(DRAFT_ROOM, nodes),
    )


def memory_for_sequences(parts: Parts) -> int:
    """Return the bytes available to sequences; the weights of the parts must be loaded already."""
    return _given_out(free_memory(parts.target.device), _graph_bytes(parts))


def _given_out(free: int | None, graphs: int) -> int:
    return int(SHARE * max(0, (UNKNOWN if free is None else free) - graphs))


def _graph_bytes(parts: Parts) -> int:
    draft = NOTHING if parts.drafter is None else parts.drafter.footprint
    return parts.target.footprint.graphs + draft.graphs


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
    need, free, graphs = memory_of_sequence(parts), free_memory(parts.target.device), _graph_bytes(parts)
    memory = _given_out(free, graphs)
    return SlotEstimate(
        free_bytes=free,
        sequence_bytes=memory,
        graph_bytes=graphs,
        slot_bytes=need.of(length),
        num_slots=need.num_slots(memory, length),
    )
