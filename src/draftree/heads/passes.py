"""Passes of a head that drafts level by level, over rows in slots: in torch, or in C beside the target's own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftree.heads.base import FeatureHead
from draftree.models.kv.pool import Leftovers
from draftree.models.kv.slots import KVMemory, KVSlot
from draftree.sampling.logits import Logits
from draftree.sampling.subset_logits import TokenSubset
from draftree.sampling.tree_search import FoundTree, TreeSearch, TreeWidths

STATES = -1
"""Key of the states before the rows in the memory of the slots, beside the layers."""


@dataclass(frozen=True, slots=True)
class RowJob:
    """New rows of one sequence.

    Attributes:
        slot: the slot.
        tokens: token ids of the target.
        positions: positions of the tokens in the text.
        parents: for each row the tentative row that it follows, or -1 for the end of the prefix.
        before: states before the tokens, shape (rows, hidden), or hidden states of the target that are projected to
            them, shape (rows, layers, target hidden); of one kind in all jobs of a pass.
        logits_at: rows whose logits are computed, ascending.
    """

    slot: KVSlot
    tokens: Sequence[int]
    positions: Sequence[int]
    parents: Sequence[int]
    before: Tensor
    logits_at: Sequence[int] = ()

    @property
    def is_projected(self) -> bool:
        """Whether the states before the tokens are made from hidden states of the target."""
        return self.before.dim() == 3


@dataclass(frozen=True, slots=True, eq=False)
class RowResult:
    """Result of a pass, rows in the order of the jobs.

    Attributes:
        before: states before the tokens, shape (rows, hidden).
        states: states of the rows, shape (rows, hidden).
        requested: rows whose logits were requested, counted over all jobs.
        logits: logits of these rows, as wide as the target's vocabulary.
    """

    before: Tensor
    states: Tensor
    requested: Sequence[int]
    logits: Logits


class HeadPasses(ABC):
    """Passes of a head. Methods run without gradients.

    Args:
        head: the head, bound to its target.
        device: device of its weights.
        leftovers: what passes read at positions whose keys and values are not kept.

    Attributes:
        head: as above.
        device: as above.
        dtype: dtype of keys, values and stored states.
        leftovers: as above.
        tokens: the draft vocabulary as columns of the logits; None if it has all tokens.
    """

    def __init__(self, head: FeatureHead, device: torch.device, leftovers: Leftovers) -> None:
        self.head = head
        self.device = device
        self.dtype = next(head.parameters()).dtype
        self.leftovers = leftovers

        vocabulary = head.vocabulary
        self.tokens = None if vocabulary.is_full else TokenSubset(vocabulary.ids, vocabulary.vocab_size)

    @property
    def parameter_bytes(self) -> int:
        """Size of the parameters of the head's module in bytes."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.head.state_dict().values())

    @property
    @abstractmethod
    def kernels(self) -> str:
        """What computes the passes: "native" with the instructions in brackets, or "torch"."""

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Size of all weights of its own in bytes."""

    @abstractmethod
    def project(self, features: Tensor) -> Tensor:
        """Return the states before the tokens that follow, shape (rows, hidden), from hidden states of the target."""

    @abstractmethod
    def recycle(self, states: Tensor) -> Tensor:
        """Return the states before the children of rows, from the states of the rows."""

    @abstractmethod
    def logits(self, states: Tensor) -> Logits:
        """Return logits of states, as wide as the target's vocabulary."""

    @abstractmethod
    def run(
        self, memory: KVMemory, slots: Sequence[KVSlot], nodes: Sequence[Sequence[int]], jobs: Sequence[RowJob]
    ) -> RowResult:
        """Run a pass over new rows; their keys and values are stored.

        Args:
            memory: keys and values of the slots.
            slots: slot of each job, with the rows appended.
            nodes: for each job the tentative rows that are read.
            jobs: the rows, at least one.
        """

    @property
    def most_children(self) -> int:
        """Maximum number of children of a node in `trees`; 0 if there is no `trees`."""
        return 0

    def trees(
        self,
        memory: KVMemory,
        slots: Sequence[KVSlot],
        nodes: Sequence[Sequence[int]],
        jobs: Sequence[RowJob],
        shape: TreeWidths,
        searches: Sequence[TreeSearch],
    ) -> list[FoundTree]:
        """Run a pass over new rows, and grow a tree after the last row of each job.

        Keys, values and states before the rows are stored. The memory has room for the nodes that are read
        (`TreeWidths.sizes`) after the rows of each slot.

        Args:
            memory: as for `run`.
            slots: as for `run`.
            nodes: as for `run`.
            jobs: the rows, with logits at the last one only.
            shape: shape of the trees.
            searches: of each tree.

        Returns:
            The trees; a node whose share is NaN or minus infinity is left out.
        """
        raise NotImplementedError("trees grow level by level")


def requested_rows(jobs: Sequence[RowJob]) -> list[int]:
    """Return the rows whose logits are requested, counted over all jobs."""
    found, first = [], 0
    for job in jobs:
        found += [first + row for row in job.logits_at]
        first += len(job.tokens)
    return found


def joined_before(jobs: Sequence[RowJob]) -> Tensor:
    """Return what is before the rows of all jobs."""
    assert len({job.is_projected for job in jobs}) == 1, "the jobs of a pass are of one kind"
    return jobs[0].before if len(jobs) == 1 else torch.cat([job.before for job in jobs])
