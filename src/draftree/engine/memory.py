"""How much memory a sequence takes, and how many fit into what is free.

A sequence holds the keys and values of its tokens, in the target's slots and in the drafter's, and for the length of a
round the logits of its tree. Half of what is free is given out: while slots are exchanged for longer ones, old and
new ones stand side by side. What captured graphs will keep is taken off before. `draftree doctor` reports it.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftree.core.types import MAX_NODES
from draftree.engine.parts import Parts
from draftree.models.memory import LOGIT_COPIES, NOTHING, free_memory

SHARE = 0.5
"""Of the free memory, how much sequences may take."""
UNKNOWN = 1 << 32
"""Bytes that are taken to be free where the system does not say."""
DRAFT_ROOM = 64
"""Tentative tokens for which slots have room from the start; more if the drafter's trees are larger."""


@dataclass(frozen=True, slots=True)
class SequenceMemory:
    """Bytes that one sequence takes.

    Attributes:
        token: keys and values of one token, the drafter's included.
        round: logits and activations of one round.
        tree: tentative tokens that have to fit beside the text.
    """

    token: int
    round: int
    tree: int

    def of(self, length: int) -> int:
        """A sequence of so many tokens."""
        return (length + self.tree) * self.token + self.round

    def num_slots(self, num_bytes: int, length: int) -> int:
        """How many sequences of so many tokens fit into so many bytes."""
        return num_bytes // max(1, self.of(length))

    def longest(self, num_bytes: int) -> int | None:
        """Tokens that one sequence can have in so many bytes; None if tokens take none."""
        return max(0, (num_bytes - self.round) // self.token - self.tree) if self.token else None


def memory_of_sequence(parts: Parts) -> SequenceMemory:
    """What sequences take with these parts."""
    target = parts.target.footprint
    draft = NOTHING if parts.drafter is None else parts.drafter.footprint
    nodes = 0 if parts.drafter is None else min(parts.planner.default_nodes, MAX_NODES)
    return SequenceMemory(
        token=target.token + draft.token,
        round=(1 + nodes) * (LOGIT_COPIES * target.logits + target.row) + LOGIT_COPIES * draft.logits + draft.row,
        tree=max(DRAFT_ROOM, nodes),
    )


def memory_for_sequences(parts: Parts) -> int:
    """Bytes that sequences may take beside these parts, whose weights lie in memory already."""
    return _given_out(free_memory(parts.target.device), _graph_bytes(parts))


def _given_out(free: int | None, graphs: int) -> int:
    return int(SHARE * max(0, (UNKNOWN if free is None else free) - graphs))


def _graph_bytes(parts: Parts) -> int:
    draft = NOTHING if parts.drafter is None else parts.drafter.footprint
    return parts.target.footprint.graphs + draft.graphs


@dataclass(frozen=True, slots=True)
class SlotEstimate:
    """How many slots of one length an engine has room for.

    Attributes:
        free_bytes: of the device; None where the system does not say.
        sequence_bytes: those of them that sequences may take.
        graph_bytes: what captured graphs keep at most.
        slot_bytes: of one slot, with what is drafted for it.
        num_slots: that fit; 0 if not even one does.
    """

    free_bytes: int | None
    sequence_bytes: int
    graph_bytes: int
    slot_bytes: int
    num_slots: int


def estimate_slots(parts: Parts, length: int) -> SlotEstimate:
    """What an engine of these parts would have room for, made now.

    Args:
        parts: loaded.
        length: tokens of a slot, prompt and text.
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
