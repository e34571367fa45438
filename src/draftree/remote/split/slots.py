"""Slots of a target split by layers: keys and values of the first layers here, those of the others on the server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from draftree.core.tree import ROOT
from draftree.models.base import Slot, SlotRequest
from draftree.remote.split.messages import RowsEdit

__all__ = ["SplitSlot", "split_slot"]


@final
class SplitSlot(Slot):
    """One text. Mutated by `SplitModel` only.

    Args:
        local: slot of the first layers.
        row_bytes: bytes of a packed state.
        request: what the server needs to pick; None if the device picks.

    Attributes:
        text: number of the text on the server; 0 if it is not there.
        was_open: whether it has been there.
        used: number of the last pass with it.
        limit: tokens for which the server has room.
        sent: packed states of the committed tokens.
        parents: of the tentative nodes.
        nodes: for each tentative node its node in the local slot.
        packed: packed states of the tentative nodes.
        edit: of the server's slot, not sent yet; None for none.
        num_read: nodes of the last pass before its root, until they are committed; None after a pass of a prompt only.
    """

    def __init__(self, local: Slot, row_bytes: int, request: SlotRequest | None) -> None:
        self.local, self.request, self._row_bytes = local, request, row_bytes
        self.text, self.was_open, self.used, self.limit = 0, False, 0, 0
        self.sent = bytearray()
        self.parents: list[int] = []
        self.nodes: list[int] = []
        self.packed: list[bytes] = []
        self.edit: RowsEdit | None = None
        self.num_read: int | None = None
        self._places: dict[tuple[int, int], int] = {}
        self._states: list[Tensor] = []

    @property
    def id(self) -> int:
        """Lowest free number when the slot was opened."""
        return self.local.id

    @property
    def length(self) -> int:
        """Tokens in the committed prefix."""
        return len(self.sent) // self._row_bytes

    @property
    def num_tentative(self) -> int:
        """Tokens in the tentative tree."""
        return len(self.parents)

    @property
    def num_local(self) -> int:
        """Nodes in the local slot, those of drafts included."""
        return len(self._states)

    def note_local(self, tokens: Sequence[int], parents: Sequence[int], states: Tensor) -> None:
        """Add nodes of the local slot, with the output of the first layers, shape (nodes, hidden)."""
        for token, parent, state in zip(tokens, parents, states, strict=True):
            self._places.setdefault((parent, int(token)), len(self._states))
            self._states.append(state)

    def find(
        self, tokens: Sequence[int], parents: Sequence[int], *, is_new: bool = False
    ) -> tuple[list[int], list[int]]:
        """Return for each new tentative node its node in the local slot, and which are not there yet.

        Nodes that are not there are numbered as if they were appended in order; with `is_new` none is.
        """
        used, found = set(self.nodes), list(self.nodes)
        missing: list[int] = []
        for place, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            above = ROOT if parent == ROOT else found[parent]
            node = self._places.get((above, int(token)))
            if is_new or node is None or node in used:
                node = self.num_local + len(missing)
                missing.append(place)
            used.add(node)
            found.append(node)
        return found[len(self.nodes) :], missing

    def states_of(self, nodes: Sequence[int]) -> Tensor:
        """Return the states of nodes of the local slot, shape (nodes, hidden)."""
        return torch.stack([self._states[node] for node in nodes])

    def append(self, parents: Sequence[int], nodes: Sequence[int], packed: np.ndarray) -> None:
        """Add tentative nodes, with their nodes in the local slot and their packed states."""
        self.parents += parents
        self.nodes += nodes
        self.packed += [row.tobytes() for row in packed]

    def drop_local(self) -> None:
        """Forget all nodes of the local slot."""
        self._places.clear()
        self._states.clear()

    def commit(self, path: Sequence[int], keep: Sequence[int]) -> tuple[list[int], list[int]]:
        """Move a path into the prefix; returns path and kept nodes, ascending, of the local slot."""
        local_path, local_keep = [self.nodes[node] for node in path], [self.nodes[node] for node in keep]
        self._note_edit(tuple(path), tuple(keep))
        for node in path:
            self.sent += self.packed[node]
        order = sorted(local_keep)
        last = path[-1] if path else ROOT
        places = {node: place for place, node in enumerate(keep)} | {last: ROOT}
        self.parents = [places[self.parents[node]] for node in keep]
        self.packed = [self.packed[node] for node in keep]
        self.nodes = [order.index(node) for node in local_keep]
        states = [self._states[node] for node in order]
        self.drop_local()
        self._states = states
        return local_path, order

    def _note_edit(self, path: tuple[int, ...], keep: tuple[int, ...]) -> None:
        """Join an edit with those that the server does not have yet."""
        before = self.edit
        if before is None:
            self.edit = RowsEdit(path, keep)
        else:
            self.edit = RowsEdit(
                before.path + tuple(before.keep[node] for node in path), tuple(before.keep[node] for node in keep)
            )

    def truncate(self, length: int) -> None:
        """Keep only the first tokens, and no tree."""
        if self.parents or length < self.length:
            self._note_edit((), ())
        del self.sent[length * self._row_bytes :]
        self.parents, self.nodes, self.packed = [], [], []
        self.drop_local()

    def rows(self, start: int, stop: int) -> bytes:
        """Return the packed states of committed tokens."""
        return bytes(self.sent[start * self._row_bytes : stop * self._row_bytes])


def split_slot(slot: Slot) -> SplitSlot:
    """Return a slot as `SplitSlot`."""
    assert isinstance(slot, SplitSlot), "a split target has slots of its own"
    return slot
