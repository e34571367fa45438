"""Sequence-based decoding: every leaf of a tree is a sequence of its own, in a batch row or a pass of its own.

The slow reference that tree scoring is compared with: the same logits, but what leaves share is computed once for
each of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftree.core.tree import ROOT, is_path, is_rooted, path
from draftree.models.base import Extend, LanguageModel, Scores, Slot, starts_of


class LeafSlot(Slot):
    """A base slot with the committed prefix, and the tentative tree as plain lists. Mutated by its model only."""

    __slots__ = ("base", "branches", "is_closed", "parents", "tokens")

    def __init__(self, base: Slot) -> None:
        self.base = base
        self.is_closed = False
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.branches: list[tuple[list[int], Slot]] = []

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
        self.vocab_size, self.max_length = model.vocab_size, model.max_length
        self.supports_trees = True
        self.device, self.dtype = model.device, model.dtype

    def reserve(self, num_slots: int, length: int) -> None:
        """Room for the prefixes; branches take more as they come."""
        self.base.reserve(num_slots, length)

    def open(self) -> LeafSlot:
        """An empty slot."""
        return LeafSlot(self.base.open())

    def extend(self, jobs: Sequence[Extend]) -> Scores:
        """Fork the prefix for every leaf and score each way down to it."""
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
        return Scores(logits, starts_of(jobs))

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
        scores = self.base.extend(extends)
        for index, (number, way, _) in enumerate(group):
            rows[number].update(zip(way, scores.of(index), strict=True))

    def commit(self, slot: Slot, path: Sequence[int]) -> None:
        """Take over the branch that the path lies on."""
        kept = _leaf_slot(slot)
        nodes = list(path)
        assert is_path(kept.parents, nodes), "a path goes down the tree"
        if nodes:
            place = next((i for i, (way, _) in enumerate(kept.branches) if way[: len(nodes)] == nodes), None)
            fork = self._read(kept, nodes) if place is None else kept.branches.pop(place)[1]
            self.base.commit(fork, range(len(nodes)))
            self.base.close(kept.base)
            kept.base = fork
        self._drop_branches(kept)
        kept.tokens.clear()
        kept.parents.clear()

    def _read(self, slot: LeafSlot, nodes: Sequence[int]) -> Slot:
        fork = self.base.fork(slot.base)
        tokens = [slot.tokens[node] for node in nodes]
        self.base.extend([Extend(fork, tokens, range(-1, len(nodes) - 1), logits_at=())])
        return fork

    def prune(self, slot: Slot, keep: Sequence[int]) -> None:
        """Forget all nodes but these; branches are forked anew by the next pass."""
        pruned = _leaf_slot(slot)
        assert is_rooted(pruned.parents, keep), "a kept node needs its parent kept, and keeps its order"
        place = {node: new for new, node in enumerate(keep)} | {ROOT: ROOT}
        pruned.parents = [place[pruned.parents[node]] for node in keep]
        pruned.tokens = [pruned.tokens[node] for node in keep]
        self._drop_branches(pruned)

    def truncate(self, slot: Slot, length: int) -> None:
        """Cut the base slot; branches and tree are forgotten."""
        cut = _leaf_slot(slot)
        self._drop_branches(cut)
        self.base.truncate(cut.base, length)
        cut.tokens.clear()
        cut.parents.clear()

    def fork(self, slot: Slot, length: int | None = None) -> LeafSlot:
        """A new slot with the same prefix, or the beginning of it."""
        return LeafSlot(self.base.fork(_leaf_slot(slot).base, length))

    def close(self, slot: Slot) -> None:
        """Give the slot and its branches back."""
        closed = _leaf_slot(slot)
        self._drop_branches(closed)
        self.base.close(closed.base)
        closed.is_closed = True

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
