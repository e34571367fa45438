"""Slots of `TableLM`: plain lists with strict checks."""

from __future__ import annotations

from collections.abc import Sequence

from draftree.core.tree import ROOT, path
from draftree.models.base import Commit, Extend, Slot


class TableSlot(Slot):
    """Tokens and parents of one sequence. Mutated by its model only."""

    __slots__ = ("_id", "parents", "partial", "prefix", "tokens")

    def __init__(self, number: int, prefix: Sequence[int]) -> None:
        self._id = number
        self.prefix = list(prefix)
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.partial: TableSlot | None = None

    @property
    def id(self) -> int:
        """Number assigned when the slot was opened."""
        return self._id

    @property
    def length(self) -> int:
        """Number of tokens in the committed prefix."""
        return len(self.prefix)

    @property
    def num_tentative(self) -> int:
        """Number of tokens in the tentative tree."""
        return len(self.tokens)

    def context(self, node: int) -> list[int]:
        """Return the tokens from the start up to a node."""
        return self.prefix + [self.tokens[n] for n in path(self.parents, node)]

    def take(self, job: Extend) -> list[list[int]]:
        """Append a job's nodes; return their contexts."""
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
    """Check that the nodes of a commit are connected.

    Raises:
        ValueError: the path is not a path of the tree, or the parent of a kept node is not kept.
    """
    path, keep = list(edit.path), list(edit.keep)
    for node, parent in zip(path, [ROOT, *path], strict=False):
        if not 0 <= node < slot.num_tentative or slot.parents[node] != parent:
            raise ValueError(f"commit of {path}: node {node} is no child of node {parent}")
    known = {path[-1] if path else ROOT, *keep}
    for node in keep:
        if not 0 <= node < slot.num_tentative or slot.parents[node] not in known:
            raise ValueError(f"commit of {path} keeps {keep}: node {node} does not exist, or its parent is not kept")
    if keep != sorted(set(keep)):
        raise ValueError(f"commit of {path} keeps {keep}: name each node once, ascending")


def check_prefix(edit: str, slot: TableSlot, length: int) -> None:
    """Check that a length is within the prefix.

    Raises:
        ValueError: it is not.
    """
    if not 0 <= length <= slot.length:
        raise ValueError(f"{edit} to {length} tokens, but the prefix has {slot.length}: name 0 to {slot.length}")
