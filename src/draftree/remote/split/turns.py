"""What a pass of a split sends: states of all nodes, after the first layers ran over those of no draft pass."""

from __future__ import annotations

from collections.abc import Sequence

from draftree.core.tree import ROOT
from draftree.models.base import Extend, LanguageModel, Pass
from draftree.remote.split.exchange import Turn
from draftree.remote.split.results import rows_of
from draftree.remote.split.slots import SplitSlot, split_slot
from draftree.remote.split.states import StateFormat

__all__ = ["make_turns"]


def make_turns(
    local: LanguageModel, form: StateFormat, jobs: Sequence[Extend], *, wants_all: bool
) -> list[tuple[Turn, list[int]]]:
    """Return for each job what is sent, and its nodes in the local slot.

    Args:
        local: the first layers.
        form: format of states.
        jobs: of a whole pass, on slots of the split.
        wants_all: whether all nodes have results; else those from the first with logits on.
    """
    found: list[tuple[SplitSlot, Extend, list[int]]] = []
    late: list[tuple[SplitSlot, Extend]] = []
    for job in jobs:
        slot = split_slot(job.slot)
        nodes, missing = slot.find(job.tokens, job.parents)
        found.append((slot, job, nodes))
        if missing:
            known = [*slot.nodes, *nodes]
            above = [ROOT if job.parents[place] == ROOT else known[job.parents[place]] for place in missing]
            late.append((slot, Extend(slot.local, [job.tokens[place] for place in missing], above, logits_at=())))
    if late:
        result = local.run(Pass([extend for _, extend in late], capture=(local.num_layers,)))
        for index, (slot, extend) in enumerate(late):
            slot.note_local(extend.tokens, extend.parents, result.hidden_of(index)[:, 0])
    turns = []
    for slot, job, nodes in found:
        wanted = len(nodes) if wants_all else len(nodes) - min(rows_of(job), default=len(nodes))
        turns.append((Turn(slot, tuple(job.parents), form.pack(slot.states_of(nodes)), wanted), nodes))
    return turns
