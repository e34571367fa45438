"""A model that is a probability table: float64 logits that depend on the tokens before, and on nothing else.

The oracle of the exact tests and the quickest model there is. It has real slots and tentative trees, computes each
row from the tokens on its own path, and refuses every misuse of the model seam that a real model might not notice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from draftree.core.errors import ConfigurationError
from draftree.core.node_map import NodeMap
from draftree.core.tree import ROOT, depths, path
from draftree.models.base import Extend, LanguageModel, LayerSubset, Scores, Slot, starts_of

Table = Callable[[tuple[int, ...]], Tensor]
"""Tokens before a position to logits there: float64 of shape (vocab,)."""


def hashed(vocab_size: int, seed: int, *, scale: float = 1.0) -> Table:
    """Logits that are a hash of all the tokens given: as good as random, the same everywhere and always.

    Args:
        vocab_size: tokens.
        seed: another seed is another table.
        scale: logits are standard Gumbel noise times this; at 0 the distribution is uniform.
    """

    def logits(context: tuple[int, ...]) -> Tensor:
        # not the requests' own noise: a model that knew it would be no model
        digest = hashlib.shake_128(repr((seed, *map(int, context))).encode()).digest(8 * vocab_size)
        uniform = (np.frombuffer(digest, dtype="<u8") >> np.uint64(12)).astype(np.float64) + 0.5
        return torch.from_numpy(-scale * np.log(-np.log(uniform * 2.0**-52)))

    return logits


def near(table: Table, seed: int, *, distance: float) -> Table:
    """A drafter's table: another's logits plus hashed noise times `distance`; at 0 they are the same."""
    shift = hashed(len(table(())), seed, scale=distance)

    def logits(context: tuple[int, ...]) -> Tensor:
        return table(context) + shift(context)

    return logits


def listed(distributions: Mapping[tuple[int, ...], Sequence[float]], otherwise: Sequence[float]) -> Table:
    """Logits from distributions written out by context; a distribution of 0 is a logit of -inf."""
    rows = {
        context: torch.tensor(distribution, dtype=torch.float64).log()
        for context, distribution in distributions.items()
    }
    default = torch.tensor(otherwise, dtype=torch.float64).log()
    return lambda context: rows.get(context, default)


class _TableSlot(Slot):
    __slots__ = ("parents", "prefix", "sketch", "tokens")

    def __init__(self, prefix: Sequence[int]) -> None:
        self.prefix = list(prefix)
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.sketch: _TableSlot | None = None

    @property
    def length(self) -> int:
        return len(self.prefix)

    @property
    def num_tentative(self) -> int:
        return len(self.tokens)

    def context(self, node: int) -> list[int]:
        return self.prefix + [self.tokens[n] for n in path(self.parents, node)]

    def take(self, job: Extend) -> list[list[int]]:
        """Append a job's nodes; the contexts of those whose rows are asked for."""
        first = self.num_tentative
        self.tokens.extend(map(int, job.tokens))
        self.parents.extend(map(int, job.parents))
        wanted = range(len(job.tokens)) if job.logits_at is None else job.logits_at
        return [self.context(first + index) for index in wanted]


@final
class TableLM(LanguageModel):
    """A language model out of a table.

    Args:
        table: logits by the tokens before.
        order: how many of the last tokens the table is shown; None for all of them. With an order, rows are kept
            and computed once.
        max_length: longest prefix plus tree depth.
        supports_trees: False refuses everything but chains.
        sketched: the table of any part of its layers; None if it has no parts.

    Example:
        >>> model = TableLM(hashed(8, seed=1), order=2)
        >>> slot = model.open()
        >>> model.extend([Extend(slot, [3, 5], [-1, 0])]).logits.shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        table: Table,
        *,
        order: int | None = None,
        max_length: int = 4096,
        supports_trees: bool = True,
        sketched: Table | None = None,
    ) -> None:
        if order is not None and order < 0:
            raise ConfigurationError(f"order must be 0 or more, got {order}")
        self._table = table
        self._order = order
        self._sketched = sketched
        self._rows: dict[tuple[int, ...], Tensor] = {}
        self._slots: dict[Slot, _TableSlot] = {}
        self._room: tuple[int, int] | None = None
        self.vocab_size = len(table(()))
        self.max_length = max_length
        self.supports_trees = supports_trees
        self.is_exact = True
        self.device = torch.device("cpu")
        self.dtype = torch.float64

    def logits(self, context: Sequence[int]) -> Tensor:
        """Logits behind these tokens, shape (vocab,); not to be written to."""
        if self._order is None:
            return self._table(tuple(context))
        shown = tuple(context[max(0, len(context) - self._order) :])
        if shown not in self._rows:
            self._rows[shown] = self._table(shown)
        return self._rows[shown]

    def reserve(self, num_slots: int, length: int) -> None:
        """Make room. Once called, more slots or longer ones are refused; until then there is no limit."""
        held_slots, held_length = self._room or (0, 0)
        self._room = (max(num_slots, held_slots), max(length, held_length))

    def open(self) -> Slot:
        """An empty slot."""
        return self._open(())

    def fork(self, slot: Slot, length: int | None = None) -> Slot:
        """A new slot with the same prefix, or the beginning of it, and an empty tree."""
        prefix = self._checked(slot).prefix
        if length is not None and not 0 <= length <= len(prefix):
            raise ValueError(f"a fork of {length} tokens, but the prefix has {len(prefix)}: name 0 to {len(prefix)}")
        return self._open(prefix[:length])

    @property
    def num_open(self) -> int:
        """Open slots."""
        return len(self._slots)

    def _open(self, prefix: Sequence[int]) -> _TableSlot:
        if self._room is not None and len(self._slots) >= self._room[0]:
            raise ValueError(f"a slot beyond the {self._room[0]} reserved: reserve more, or close one first")
        slot = _TableSlot(prefix)
        self._slots[slot] = slot
        return slot

    def close(self, slot: Slot) -> None:
        """Give the slot back."""
        del self._slots[self._checked(slot)]

    def extend(self, jobs: Sequence[Extend]) -> Scores:
        """Append tentative nodes and compute the asked rows; on a refusal no slot has changed."""
        slots = [self._checked(job.slot) for job in jobs]
        if len(set(map(id, slots))) != len(slots):
            raise ValueError("a slot occurs in two jobs of one pass: give it one job with all its tokens")
        for job, slot in zip(jobs, slots, strict=True):
            self._check_job(job, slot)
        self.erase(slots)
        rows = []
        for job, slot in zip(jobs, slots, strict=True):
            rows += [self.logits(context) for context in slot.take(job)]
        return self._scores(rows, jobs)

    def _scores(self, rows: list[Tensor], jobs: Sequence[Extend]) -> Scores:
        logits = torch.stack(rows) if rows else torch.empty((0, self.vocab_size), dtype=self.dtype)
        return Scores(logits, starts_of(jobs))

    def require_part(self, part: LayerSubset) -> None:
        """Any part will do, if there is a table for parts."""
        if self._sketched is None:
            super().require_part(part)

    def sketch(self, jobs: Sequence[Extend], part: LayerSubset) -> Scores:
        """Rows of the table for parts."""
        assert self._sketched is not None, "a part is asked for by require_part first"
        rows = []
        for job in jobs:
            slot = self._checked(job.slot)
            if slot.num_tentative:
                raise ValueError("a slot with a tentative tree is not sketched in: commit or prune it first")
            slot.sketch = slot.sketch or _TableSlot(slot.prefix)
            self._check_job(job, slot.sketch)
            rows += [self._sketched(tuple(context)) for context in slot.sketch.take(job)]
        return self._scores(rows, jobs)

    def erase(self, slots: Sequence[Slot]) -> None:
        """Forget sketches."""
        for slot in slots:
            self._checked(slot).sketch = None

    def _check_job(self, job: Extend, slot: _TableSlot) -> None:
        if not 0 < len(job.tokens) == len(job.parents):
            raise ValueError(f"a job of {len(job.tokens)} tokens has {len(job.parents)} parents: give one a token")
        parents = slot.parents + list(job.parents)
        for node in range(slot.num_tentative, len(parents)):
            if not ROOT <= parents[node] < node:
                raise ValueError(f"parent of tentative node {node} is {parents[node]}: name an earlier node, or -1")
            if not self.supports_trees and parents[node] != node - 1:
                raise ValueError(f"parent of tentative node {node} is {parents[node]}: this model takes chains only")
        for token in job.tokens:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"token {token} is not in the vocabulary of {self.vocab_size}")
        if job.logits_at is not None:
            wanted = list(job.logits_at)
            if wanted != sorted(set(wanted)) or any(not 0 <= index < len(job.tokens) for index in wanted):
                raise ValueError(
                    f"logits_at={wanted} must ascend and name tokens of the job, 0 to {len(job.tokens) - 1}"
                )
        self._check_length(slot, parents)

    def _check_length(self, slot: _TableSlot, parents: Sequence[int]) -> None:
        depth = max(depths(parents)[slot.num_tentative :])
        if slot.length + depth > self.max_length:
            raise ValueError(f"position {slot.length + depth} is beyond max_length={self.max_length}")
        if self._room is not None and slot.length + len(parents) > self._room[1]:
            raise ValueError(f"{slot.length + len(parents)} tokens in a slot of {self._room[1]}: reserve more")

    def commit(self, slot: Slot, path: Sequence[int]) -> None:
        """These nodes, each the parent of the next and the first a child of the prefix, become prefix."""
        held = self._checked(slot)
        for node, parent in zip(path, [ROOT, *path], strict=False):
            if not 0 <= node < held.num_tentative or held.parents[node] != parent:
                raise ValueError(f"commit of {list(path)}: node {node} is no child of node {parent}")
        held.prefix += [held.tokens[node] for node in path]
        held.tokens.clear()
        held.parents.clear()
        held.sketch = None

    def prune(self, slot: Slot, keep: Sequence[int]) -> None:
        """Keep these nodes, in their old order."""
        held = self._checked(slot)
        try:
            nodes = NodeMap.keeping(held.parents, keep)
        except ValueError as error:
            raise ValueError(f"prune to {list(keep)}: {error}") from error
        held.parents = nodes.derived_parents
        held.tokens = [held.tokens[node] for node in nodes.kept]

    def truncate(self, slot: Slot, length: int) -> None:
        """Keep the first tokens of the prefix, and no tree."""
        held = self._checked(slot)
        if not 0 <= length <= held.length:
            raise ValueError(f"truncate to {length} tokens, but the prefix has {held.length}: name 0 to {held.length}")
        del held.prefix[length:]
        held.tokens.clear()
        held.parents.clear()
        held.sketch = None

    def _checked(self, slot: Slot) -> _TableSlot:
        held = self._slots.get(slot)
        if held is None:
            raise ValueError("the slot was closed, or belongs to another model: open one here")
        return held
