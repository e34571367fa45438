"""Probability table as a model: float64 logits that are a function of the preceding tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from draftree.core.errors import ConfigurationError
from draftree.core.tree import ROOT, depths, path
from draftree.models.base import (
    ALL_LAYERS,
    Close,
    Commit,
    Edit,
    EmbeddingFacts,
    Extend,
    Fork,
    LanguageModel,
    LayerSubset,
    Pass,
    PassResult,
    Slot,
    SlotIds,
    Truncate,
)
from draftree.sampling.logits import TensorLogits


class TableSlot(Slot):
    """Tokens and parents of one sequence. Mutated by its model only."""

    __slots__ = ("id", "parents", "partial", "prefix", "tokens")

    id: int

    def __init__(self, number: int, prefix: Sequence[int]) -> None:
        self.id = number
        self.prefix = list(prefix)
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.partial: TableSlot | None = None

    @property
    def length(self) -> int:
        return len(self.prefix)

    @property
    def num_tentative(self) -> int:
        return len(self.tokens)

    def context(self, node: int) -> list[int]:
        return self.prefix + [self.tokens[n] for n in path(self.parents, node)]

    def take(self, job: Extend) -> list[list[int]]:
        """Append the nodes of a job, and return the tokens before and at each."""
        first = self.num_tentative
        self.tokens.extend(map(int, job.tokens))
        self.parents.extend(map(int, job.parents))
        return [self.context(first + index) for index in range(len(job.tokens))]

    def keep(self, path: Sequence[int], kept: Sequence[int]) -> None:
        """Append the path to the prefix and make the kept nodes the tentative tree."""
        place = {path[-1] if path else ROOT: ROOT} | {node: new for new, node in enumerate(kept)}
        self.prefix += [self.tokens[node] for node in path]
        self.parents = [place[self.parents[node]] for node in kept]
        self.tokens = [self.tokens[node] for node in kept]
        self.partial = None


def check_commit(slot: TableSlot, edit: Commit) -> None:
    path, keep = list(edit.path), list(edit.keep)
    nodes = range(slot.num_tentative)
    for node, parent in zip(path, [ROOT, *path], strict=False):
        if node not in nodes or slot.parents[node] != parent:
            raise ValueError(f"commit of {path}: node {node} is no child of node {parent}")
    known = {path[-1] if path else ROOT, *keep}
    for node in keep:
        if node not in nodes or slot.parents[node] not in known:
            raise ValueError(f"commit of {path} keeps {keep}: node {node} does not exist, or its parent is not kept")
    if keep != sorted(set(keep)):
        raise ValueError(f"commit of {path} keeps {keep}: name each node once, ascending")


def check_prefix(edit: str, slot: TableSlot, length: int) -> None:
    if not 0 <= length <= slot.length:
        raise ValueError(f"{edit} to {length} tokens, but the prefix has {slot.length}: name 0 to {slot.length}")


Table = Callable[[tuple[int, ...]], Tensor]  # function from preceding tokens to logits: float64 of shape (vocab,)


def hashed(vocab_size: int, seed: int, *, scale: float = 1.0) -> Table:
    """Return a table of pseudorandom logits, a hash of all preceding tokens; the same on every machine."""

    def logits(context: tuple[int, ...]) -> Tensor:
        # independent of the requests' noise
        digest = hashlib.shake_128(repr((seed, *map(int, context))).encode()).digest(8 * vocab_size)
        uniform = (np.frombuffer(digest, dtype="<u8") >> np.uint64(12)).astype(np.float64) + 0.5
        return torch.from_numpy(-scale * np.log(-np.log(uniform * 2.0**-52)))

    return logits


def near(table: Table, seed: int, *, distance: float) -> Table:
    """Return a table for a drafter: the logits of `table` plus hashed noise times `distance`."""
    shift = hashed(len(table(())), seed, scale=distance)
    return lambda context: table(context) + shift(context)


def listed(distributions: Mapping[tuple[int, ...], Sequence[float]], otherwise: Sequence[float]) -> Table:
    """Return a table from distributions listed by context; probability 0 becomes logit -inf."""
    return lambda context: torch.tensor(distributions.get(context, otherwise), dtype=torch.float64).log()


@final
class TableLM(LanguageModel):
    """Language model with the logits of a table.

    Args:
        order: number of last tokens that the table depends on; None for all. With an order, rows are computed once and
            cached.
        supports_trees: whether trees may branch.
        partial: table of every subset of the layers; None if subsets are not supported.

    Example:
        >>> model = TableLM(hashed(8, seed=1), order=2)
        >>> slot = model.open()
        >>> model.run(Pass([Extend(slot, [3, 5], [-1, 0])])).logits.tensor().shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        table: Table,
        *,
        order: int | None = None,
        max_length: int = 4096,
        supports_trees: bool = True,
        partial: Table | None = None,
        num_features: int = 0,
    ) -> None:
        if order is not None and order < 0:
            raise ConfigurationError(f"order must be 0 or more, got {order}")
        self._table = table
        self._order = order
        self._partial = partial
        self._num_features = num_features
        self._ids = SlotIds()
        self._rows: dict[tuple[int, ...], Tensor] = {}
        self._slots: dict[Slot, TableSlot] = {}
        self._room: tuple[int, int] | None = None
        self.vocab_size = len(table(()))
        self.max_length = max_length
        self.supports_trees = supports_trees
        self.is_exact = True
        self.device = torch.device("cpu")
        self.dtype = torch.float64

    def logits(self, context: Sequence[int]) -> Tensor:
        """Return the logits after these tokens, shape (vocab,); read only."""
        if self._order is None:
            return self._table(tuple(context))
        last = tuple(context[max(0, len(context) - self._order) :])
        if last not in self._rows:
            self._rows[last] = self._table(last)
        return self._rows[last]

    def reserve(self, num_slots: int, length: int) -> None:
        held_slots, held_length = self._room or (0, 0)
        self._room = (max(num_slots, held_slots), max(length, held_length))

    def open(self) -> Slot:
        return self._open(())

    @property
    def num_open(self) -> int:
        return len(self._slots)

    def _open(self, prefix: Sequence[int]) -> TableSlot:
        if self._room is not None and len(self._slots) >= self._room[0]:
            raise ValueError(f"a slot beyond the {self._room[0]} reserved: reserve more, or close one first")
        slot = TableSlot(self._ids.take(), prefix)
        self._slots[slot] = slot
        return slot

    def run(self, pass_: Pass) -> PassResult:
        """Append nodes and compute rows; if an error is raised, no slot has changed."""
        self.require_capture(pass_.capture)
        slots = [self._checked(job.slot) for job in pass_.jobs]
        if len(set(map(id, slots))) != len(slots):
            raise ValueError("a slot occurs in two jobs of one pass: give it one job with all its tokens")
        row_of = self.logits
        if pass_.layers != ALL_LAYERS:
            self.require_part(pass_.layers)
            row_of, slots = self._partial_row, [self._partial_nodes(slot) for slot in slots]
        for job, slot in zip(pass_.jobs, slots, strict=True):
            self._check_job(job, slot)
        contexts = [slot.take(job) for job, slot in zip(pass_.jobs, slots, strict=True)]
        for slot in slots:
            slot.partial = None
        logits = [row_of(nodes[row]) for job, nodes in zip(pass_.jobs, contexts, strict=True) for row in job.rows]
        hidden = None
        if pass_.capture:
            rows = self._stacked([self.logits(context) for nodes in contexts for context in nodes])
            hidden = torch.stack([rows + layer for layer in pass_.capture], dim=1)
        return PassResult.of_jobs(pass_.jobs, TensorLogits(self._stacked(logits)), hidden)

    def _stacked(self, rows: Sequence[Tensor]) -> Tensor:
        return torch.stack(tuple(rows)) if rows else torch.empty((0, self.vocab_size), dtype=self.dtype)

    def _partial_row(self, context: Sequence[int]) -> Tensor:
        assert self._partial is not None, "there is a table for subsets"
        return self._partial(tuple(context))

    def _partial_nodes(self, slot: TableSlot) -> TableSlot:
        if slot.num_tentative:
            raise ValueError("a slot with a tentative tree takes no partial nodes: commit or truncate it first")
        slot.partial = slot.partial or TableSlot(slot.id, slot.prefix)
        return slot.partial

    def input_embedding(self) -> Tensor:
        """Return the identity if hidden states can be captured: a table has no embedding of its own."""
        return torch.eye(self.vocab_size, dtype=self.dtype) if self._num_features else super().input_embedding()

    def output_head(self) -> Tensor:
        """Return the identity if hidden states can be captured: those of layer 0 are the logits."""
        return torch.eye(self.vocab_size, dtype=self.dtype) if self._num_features else super().output_head()

    def embedding_facts(self) -> EmbeddingFacts:
        return EmbeddingFacts(1.0, 1.0) if self._num_features else super().embedding_facts()

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Return the hidden states less the number of layers, which are the logits, float32."""
        if not self._num_features:
            return super().final_norm(hidden)
        return (hidden - self.num_layers).float()

    def require_part(self, part: LayerSubset) -> None:
        if self._partial is None:
            super().require_part(part)

    def quantized_copy(self, quantization: str) -> LanguageModel:
        """Return this model: its passes through a subset of the layers use another table, as those of a copy would."""
        return super().quantized_copy(quantization) if self._partial is None else self

    def require_capture(self, layers: Sequence[int]) -> None:
        if any(layer >= self._num_features for layer in layers):
            super().require_capture(layers)

    def _check_job(self, job: Extend, slot: TableSlot) -> None:
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
        depth = max(depths(parents)[slot.num_tentative :])
        if slot.length + depth > self.max_length:
            raise ValueError(f"position {slot.length + depth} is beyond max_length={self.max_length}")
        if self._room is not None and slot.length + len(parents) > self._room[1]:
            raise ValueError(f"{slot.length + len(parents)} tokens in a slot of {self._room[1]}: reserve more")

    def apply(self, edits: Sequence[Edit]) -> list[Slot]:
        opened: list[Slot] = []
        for edit in edits:
            slot = self._checked(edit.slot)
            match edit:
                case Commit():
                    check_commit(slot, edit)
                    slot.keep(edit.path, edit.keep)
                case Truncate(_, length):
                    check_prefix("truncate", slot, length)
                    del slot.prefix[length:]
                    slot.keep((), ())
                case Fork(_, length):
                    check_prefix("fork", slot, length)
                    opened.append(self._open(slot.prefix[:length]))
                case Close():
                    del self._slots[slot]
                    self._ids.free(slot.id)
        return opened

    def _checked(self, slot: Slot) -> TableSlot:
        held = self._slots.get(slot)
        if held is None:
            raise ValueError("the slot was closed, or belongs to another model: open one here")
        return held
