"""One slot of a text's forest: its tentative tree, and the logits of its nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftree.core.transfer import to_device
from draftree.core.tree import ROOT
from draftree.models.base import Slot


class Row(NamedTuple):
    """The results of a pass for one node.

    Attributes:
        logits: logits of the pass, shape (rows, vocab).
        place: row of the node.
        attention: weights of the node's cross-attention, float32 of shape (source length,); None if not wanted.
    """

    logits: Tensor
    place: int
    attention: np.ndarray | None = None


def gathered(rows: Sequence[Row]) -> Tensor:
    """Return rows as one tensor, shape (rows, vocab); read only."""
    first = rows[0].logits
    places = [row.place for row in rows]
    if any(row.logits is not first for row in rows):
        return torch.stack([row.logits[row.place] for row in rows])
    return first if places == list(range(len(first))) else first[to_device(places, first.device)]


@dataclass(slots=True, eq=False)
class Trunk:
    """One slot and its tree; nodes from `num_stored` on are computed by the next pass.

    Attributes:
        slot: the slot.
        tokens: token of each node.
        parents: parent of each node.
        num_stored: number of nodes that are computed.
        children: node by parent and token.
        wanted: nodes whose logits the next pass returns.
        rows: logits of the nodes that are scored.
    """

    slot: Slot
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    num_stored: int = 0
    children: dict[tuple[int, int], int] = field(default_factory=dict)
    wanted: set[int] = field(default_factory=set)
    rows: dict[int, Row] = field(default_factory=dict)

    def child(self, parent: int, token: int, *, is_wanted: bool) -> int:
        """Return the node of a token after `parent`; a new one is computed by the next pass."""
        node = self.children.get((parent, token))
        if node is None:
            node = self.children[parent, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            if is_wanted:
                self.wanted.add(node)
        return node

    def grown(self, node: int, tokens: Sequence[int]) -> int:
        """Append a path after a node, of which only the last token's logits are wanted; returns its end."""
        for token in tokens:
            node = self.child(node, token, is_wanted=False)
        if node not in self.rows:
            self.wanted.add(node)
        return node

    def live(self, tips: Sequence[int]) -> list[int]:
        """Return the nodes of the paths to these tips, ascending."""
        found: set[int] = set()
        for tip in tips:
            node = tip
            while node != ROOT and node not in found:
                found.add(node)
                node = self.parents[node]
        return sorted(found)

    def scored_below(self, tips: Sequence[int]) -> list[int]:
        """Return the scored nodes after these tips, ascending."""
        below, found = set(tips), []
        for node in range(min(tips) + 1, self.num_stored):
            if self.parents[node] in below and node in self.rows and node not in below:
                below.add(node)
                found.append(node)
        return found

    def common(self, live: Sequence[int], tips: Sequence[int]) -> list[int]:
        """Return the path from the root that the paths to all tips share; stored nodes only, and no tip."""
        path: list[int] = []
        ends = set(tips)
        children: dict[int, list[int]] = {}
        for node in live:
            children.setdefault(self.parents[node], []).append(node)
        node = ROOT
        while len(below := children.get(node, [])) == 1:
            node = below[0]
            if node >= self.num_stored or node in ends:
                break
            path.append(node)
        return path

    def tail(self, node: int, depth: int) -> list[int]:
        """Return the tokens of the path to a node, without the first `depth`."""
        tokens = []
        while node != ROOT:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1][depth:]

    def keep(self, nodes: Sequence[int], end: int) -> Mapping[int, int]:
        """Drop all other nodes; `end` becomes the root. Returns the new number of each node.

        Args:
            nodes: ascending; the parents of each are among them, or `end`.
            end: last node that has been committed, or the root.
        """
        place = {end: ROOT} | {node: index for index, node in enumerate(nodes)}
        self.parents = [place[self.parents[node]] for node in nodes]
        self.tokens = [self.tokens[node] for node in nodes]
        self.num_stored = sum(node < self.num_stored for node in nodes)
        self.children = {pair: node for node, pair in enumerate(zip(self.parents, self.tokens, strict=True))}
        self.wanted = {place[node] for node in self.wanted if node in place and node != end}
        self.rows = {place[node]: row for node, row in self.rows.items() if node in place and node != end}
        return place

    def own_rows(self) -> None:
        """Copy the logits that are kept, so that those of whole passes are freed and may be overwritten."""
        if self.rows:
            nodes = list(self.rows)
            copied = torch.stack([row.logits[row.place] for row in self.rows.values()])
            self.rows = {node: Row(copied, index, self.rows[node].attention) for index, node in enumerate(nodes)}


@dataclass(slots=True)
class Tip:
    """End of a live beam: a node of a trunk."""

    trunk: Trunk
    node: int

    @property
    def row(self) -> Row | None:
        """Its logits; None if it is not scored."""
        return self.trunk.rows.get(self.node)
