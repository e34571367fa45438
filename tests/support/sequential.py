"""Sequence-based decoding: every leaf of a tree is a sequence of its own, in a batch row or a pass of its own.

The slow reference that tree scoring is compared with: the same logits, but what leaves share is computed once for
each of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftree.core.tree import ROOT, path
from draftree.models.base import (
    ALL_LAYERS,
    Close,
    Commit,
    Edit,
    Extend,
    Fork,
    LanguageModel,
    Pass,
    PassResult,
    Slot,
    SlotIds,
    Truncate,
)
from draftree.models.kv.slots import require_subtree
from draftree.sampling.logits import TensorLogits


class LeafSlot(Slot):
    """A base slot with the committed prefix, and the tentative tree as plain lists. Mutated by its model only."""

    __slots__ = ("_id", "base", "branches", "is_closed", "parents", "tokens")

    def __init__(self, number: int, base: Slot) -> None:
        self._id = number
        self.base = base
        self.is_closed = False
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.branches: list[tuple[list[int], Slot]] = []

    @property
    def id(self) -> int:
        """The number that the slot was given."""
        return self._id

    @property
    def length(self) -> int:
        """Tokens in the committed prefix."""
        return self.base.length

    @property
    def num_tentative(self) -> int:
        """Tokens in the tentative tree."""
        return len(self.tokens)


class SequentialModel(LanguageModel):
    """Scores trees leaf by leaf with a model that scores chains.

    Args:
        model: any model behind the seam.
        batched: one pass with a batch row for each leaf; False: one pass for each leaf.
    """

    def __init__(self, model: LanguageModel, *, batched: bool = True) -> None:
        self.base = model
        self._batched = batched
        self._ids = SlotIds()
        self.vocab_size, self.max_length = model.vocab_size, model.max_length
        self.supports_trees = True
        self.device, self.dtype = model.device, model.dtype

    def reserve(self, num_slots: int, length: int) -> None:
        """Room for the prefixes; branches take more as they come."""
        self.base.reserve(num_slots, length)

    def open(self) -> LeafSlot:
        """An empty slot."""
        return LeafSlot(self._ids.take(), self.base.open())

    def cut_length(self, slot: Slot, length: int) -> int:
        """That of the prefix."""
        return self.base.cut_length(_leaf_slot(slot).base, length)

    def run(self, pass_: Pass) -> PassResult:
        """Fork the prefix for every leaf and score each way down to it."""
        if pass_.layers != ALL_LAYERS:
            self.require_part(pass_.layers)
        self.require_capture(pass_.capture)
        jobs = pass_.jobs
        assert len({id(job.slot) for job in jobs}) == len(jobs), "a slot occurs in one job at most"
        rows: list[dict[int, torch.Tensor]] = []
        chains: list[tuple[int, list[int], Slot]] = []
        firsts: list[int] = []
        for number, job in enumerate(jobs):
            slot = _leaf_slot(job.slot)
            firsts.append(len(slot.tokens))
            slot.tokens.extend(job.tokens)
            slot.parents.extend(job.parents)
            assert all(ROOT <= p < n for n, p in enumerate(slot.parents)), "a parent must be an earlier tentative node"
            self._drop_branches(slot)
            for leaf in _leaves(slot.parents):
                way = path(slot.parents, leaf)
                fork = self.base.fork(slot.base)
                slot.branches.append((way, fork))
                chains.append((number, way, fork))
            rows.append({})
        for group in [chains] if self._batched else [[chain] for chain in chains]:
            self._score(group, jobs, rows)
        asked = [
            rows[number][firsts[number] + node]
            for number, job in enumerate(jobs)
            for node in (range(len(job.tokens)) if job.logits_at is None else job.logits_at)
        ]
        logits = torch.stack(asked) if asked else torch.empty(0, self.vocab_size)
        return PassResult.of_jobs(jobs, TensorLogits(logits))

    def _score(
        self,
        group: Sequence[tuple[int, list[int], Slot]],
        jobs: Sequence[Extend],
        rows: list[dict[int, torch.Tensor]],
    ) -> None:
        extends = []
        for number, way, fork in group:
            tokens = _leaf_slot(jobs[number].slot).tokens
            extends.append(Extend(fork, [tokens[node] for node in way], range(-1, len(way) - 1)))
        result = self.base.run(Pass(extends))
        for index, (number, way, _) in enumerate(group):
            rows[number].update(zip(way, result.of(index).tensor(), strict=True))

    def apply(self, edits: Sequence[Edit]) -> list[Slot]:
        """Apply edits to base slots and trees."""
        opened: list[Slot] = []
        for edit in edits:
            slot = _leaf_slot(edit.slot)
            match edit:
                case Commit():
                    self._commit(slot, edit)
                case Truncate(_, length):
                    self._drop_branches(slot)
                    self.base.truncate(slot.base, length)
                    slot.tokens, slot.parents = [], []
                case Fork(_, length):
                    opened.append(LeafSlot(self._ids.take(), self.base.fork(slot.base, length)))
                case Close():
                    self._drop_branches(slot)
                    self.base.close(slot.base)
                    slot.is_closed = True
                    self._ids.free(slot.id)
        return opened

    def _commit(self, slot: LeafSlot, edit: Commit) -> None:
        """Take over the branch that the path lies on; kept nodes are scored again with the next ones."""
        require_subtree(slot.parents, edit)
        nodes, keep = list(edit.path), edit.keep
        if nodes:
            found = next((i for i, (way, _) in enumerate(slot.branches) if way[: len(nodes)] == nodes), None)
            fork = self._read(slot, nodes) if found is None else slot.branches.pop(found)[1]
            self.base.commit(fork, range(len(nodes)))
            self.base.close(slot.base)
            slot.base = fork
        self._drop_branches(slot)
        place = {nodes[-1] if nodes else ROOT: ROOT} | {node: new for new, node in enumerate(keep)}
        slot.parents = [place[slot.parents[node]] for node in keep]
        slot.tokens = [slot.tokens[node] for node in keep]

    def _read(self, slot: LeafSlot, nodes: Sequence[int]) -> Slot:
        fork = self.base.fork(slot.base)
        tokens = [slot.tokens[node] for node in nodes]
        self.base.run(Pass([Extend(fork, tokens, range(-1, len(nodes) - 1), logits_at=())]))
        return fork

    def _drop_branches(self, slot: LeafSlot) -> None:
        for _, fork in slot.branches:
            self.base.close(fork)
        slot.branches.clear()


def _leaf_slot(slot: Slot) -> LeafSlot:
    assert isinstance(slot, LeafSlot), "a slot belongs to the model that opened it"
    assert not slot.is_closed, "a closed slot is not used again"
    return slot


def _leaves(parents: Sequence[int]) -> list[int]:
    inner = set(parents)
    return [node for node in range(len(parents)) if node not in inner]
