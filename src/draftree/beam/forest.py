"""The token trees of a sequence's live beams: what is stored, what is committed, and when a tree is split.

The tree of a sequence is in one slot. The common prefix of the live beams is committed, and nodes of no live beam are
dropped, when that pays. If the live nodes exceed the capacity, or the model accepts chains only, some beams move to a
fork of the slot, where their own nodes are computed again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftree.core.errors import InvalidRequestError
from draftree.core.tensors import to_device
from draftree.core.tree import ROOT, TokenTree
from draftree.engine.sequence import DecoderInput
from draftree.models.base import Close, Commit, Extend, Fork, LanguageModel, Slot
from draftree.models.source import EncoderDecoder, FeatureSource, HiddenSource


def require_source(model: LanguageModel, prompt: DecoderInput, name: str) -> None:
    """Check that a model reads the prompt's source, or needs none; `name` is the parameter that gave the model."""
    if isinstance(model, EncoderDecoder) != (prompt.source is not None):
        difference = "reads a source, and the prompt has none"
        if prompt.source is not None:
            difference = "reads no source, and the prompt has one"
        raise InvalidRequestError(
            f"{name}: {type(model).__name__} {difference}; encoder-decoder models and causal models are searched "
            "separately",
            param=name,
        )
    if isinstance(model, EncoderDecoder) and prompt.source is not None and not isinstance(prompt.source, HiddenSource):
        wanted = model.feature_shape
        shape = prompt.source.features.shape if isinstance(prompt.source, FeatureSource) else None
        if wanted != shape:
            wanted_kind, kind = (
                "token ids" if feature_shape is None else f"features of shape {feature_shape}"
                for feature_shape in (wanted, shape)
            )
            raise InvalidRequestError(f"{name}: the model reads {wanted_kind}, and the source is {kind}", param=name)


class Row(NamedTuple):
    """Results of a pass for one node: a row of `logits` (rows, vocab), and its cross-attention (source length,)."""

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

    `children` maps a parent and a token to a node, `wanted` holds nodes whose logits the next pass returns, and `rows`
    the logits of scored nodes. The first `num_settled` nodes are the beginning of the next commit.
    """

    slot: Slot
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    num_stored: int = 0
    num_settled: int = 0
    children: dict[tuple[int, int], int] = field(default_factory=dict)
    wanted: set[int] = field(default_factory=set)
    rows: dict[int, Row] = field(default_factory=dict)

    def child(self, parent: int, token: int, *, is_wanted: bool = True) -> int:
        """Return the node of a token after `parent`; a new one is computed by the next pass."""
        node = self.children.get((parent, token))
        if node is None:
            node = self.children[parent, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            if is_wanted:
                self.wanted.add(node)
        return node

    def grown(self, tokens: Sequence[int]) -> int:
        """Append a path after the root, of which only the last token's logits are wanted; returns its end."""
        node = ROOT
        for token in tokens:
            node = self.child(node, token, is_wanted=False)
        if node not in self.rows:
            self.wanted.add(node)
        return node

    def note(self, job: Extend, logits: Tensor, first: int, attention: np.ndarray | None) -> int:
        """Record a job that has been run; its rows of `logits` start at `first`. Returns the row after the last."""
        for row, place in enumerate(job.logits_at or (), first):
            weights = None if attention is None else attention[place]
            self.rows[self.num_stored + place] = Row(logits, row, weights)
            self.wanted.discard(self.num_stored + place)
        self.num_stored += len(job.tokens)
        return first + len(job.logits_at or ())

    def live(self, tips: Iterable[int]) -> list[int]:
        """Return the nodes of the paths to these tips, ascending."""
        live: set[int] = set()
        for node in tips:
            while node != ROOT and node not in live:
                live.add(node)
                node = self.parents[node]
        return sorted(live)

    def scored_below(self, tips: Sequence[int]) -> list[int]:
        """Return the scored nodes after these tips, ascending."""
        below = set(tips)
        for node in range(min(tips) + 1, self.num_stored):
            if self.parents[node] in below and node in self.rows:
                below.add(node)
        return sorted(below.difference(tips))

    def fork_of(self, live: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the only path from the root of a tree of live nodes, and the nodes in which it divides."""
        children: dict[int, list[int]] = {}
        for node in live:
            children.setdefault(self.parents[node], []).append(node)
        path: list[int] = []
        while len(below := children.get(path[-1] if path else ROOT, [])) == 1:
            path += below
        return path, below

    def common(self, live: Sequence[int], tips: Iterable[int]) -> list[int]:
        """Return the path from the root that the paths to all tips share; stored nodes only, and no tip."""
        ends = set(tips)
        path, _ = self.fork_of(live)
        return list(itertools.takewhile(lambda node: node < self.num_stored and node not in ends, path))

    def tail(self, node: int, depth: int) -> list[int]:
        """Return the tokens of the path to a node, without the first `depth`."""
        return [self.tokens[node] for node in self.live([node])][depth:]

    def keep(self, nodes: Sequence[int], end: int) -> Mapping[int, int]:
        """Drop all other nodes; `end`, the last committed one, becomes the root. Returns the new number of each node.

        `nodes` ascend, and the parents of each are among them, or `end`.
        """
        place = {end: ROOT} | {node: index for index, node in enumerate(nodes)}
        self.parents = [place[self.parents[node]] for node in nodes]
        self.tokens = [self.tokens[node] for node in nodes]
        self.num_stored = sum(node < self.num_stored for node in nodes)
        self.num_settled = 0
        self.children = {pair: node for node, pair in enumerate(zip(self.parents, self.tokens, strict=True))}
        self.wanted = {place[node] for node in self.wanted if node in place and node != end}
        self.rows = {place[node]: row for node, row in self.rows.items() if node in place and node != end}
        return place

    def own_rows(self) -> None:
        """Copy the logits that are kept, so that those of whole passes are freed and may be overwritten."""
        if self.rows:
            copied = torch.stack([row.logits[row.place] for row in self.rows.values()])
            self.rows = {node: Row(copied, index, row.attention) for index, (node, row) in enumerate(self.rows.items())}


@dataclass(slots=True)
class Tip:
    """End of a live beam: a node of a trunk."""

    trunk: Trunk
    node: int

    @property
    def row(self) -> Row | None:
        """Its logits; None if it is not scored."""
        return self.trunk.rows.get(self.node)

    def child(self, token: int) -> Tip:
        """Return the end after a token, which the next pass scores if it is new."""
        return Tip(self.trunk, self.trunk.child(self.node, token))


CHUNK = 512  # maximum number of tokens of a sequence that one pass computes: longer prompts take several passes
DEAD_SHARE = 0.5
"""Nodes of no live beam are dropped when there are more than this share of the live ones, and more than `FEW`."""
FEW = 16
LONG_PATH = 32  # a common prefix is committed when it has this many nodes, or when nodes are dropped
NODES_PER_BEAM = 48
MAX_CAPACITY = 1024


def capacity_for(width: int) -> int:
    """Return the default number of live nodes in one slot for a search of this width."""
    return min(MAX_CAPACITY, NODES_PER_BEAM * width)


class Forest:
    """The trunks of one sequence. Its prompt's source is encoded once, since further trunks are forks.

    `capacity` is the maximum number of live nodes in one slot (one beam may have more), `length` the expected maximum
    number of tokens in a slot.
    """

    def __init__(self, model: LanguageModel, prompt: DecoderInput, *, capacity: int, length: int) -> None:
        self.model = model
        self._capacity = capacity if model.supports_trees else 1
        self._length = length
        self.is_read = False  # whether the jobs so far contain the whole prompt
        self.num_reused = 0
        model.reserve(model.num_open + 1, length)
        if prompt.source is None:
            trunk = Trunk(model.open())
        else:
            assert isinstance(model, EncoderDecoder), "only encoder-decoder models are searched with a source"
            trunk = Trunk(model.open_on(prompt.source))
        self.trunks = [trunk]
        self.root = Tip(trunk, trunk.grown(prompt.tokens))

    def jobs(self, chunk: int = CHUNK) -> list[tuple[Trunk, Extend]]:
        """Return the jobs of the next pass: a chunk of the prompt, or all nodes that are not stored.

        Rows of logits are requested for wanted nodes, and not before the end of the prompt.
        """
        is_prompt = not self.is_read
        self.is_read = self.is_read or self.root.node - self.trunks[0].num_stored < chunk
        jobs = []
        for trunk in self.trunks:
            first = trunk.num_stored
            end = len(trunk.tokens) if self.is_read else first + chunk
            if first == end:
                continue
            wanted = sorted(node - first for node in trunk.wanted) if self.is_read else ()
            if is_prompt and not first:
                # all beams grow from the prompt's last token: what is before it is committed by `settle`
                trunk.num_settled = min(end, self.root.node)
            held = end + trunk.slot.length
            if held > self._length:
                self._length = max(held, self._length * 3 // 2)
                self.model.reserve(self.model.num_open, self._length)
            settled = 0 if first else trunk.num_settled
            job = Extend(trunk.slot, trunk.tokens[first:end], trunk.parents[first:end], wanted, settled)
            jobs.append((trunk, job))
        return jobs

    @property
    def is_complete(self) -> bool:
        return all(trunk.num_stored == len(trunk.tokens) for trunk in self.trunks)

    def extend(self, continuations: Sequence[tuple[Tip, int]]) -> list[Tip]:
        """Append a token to each of these beams and return the new ends; equal continuations share a node."""
        tips = [tip.child(token) for tip, token in continuations]
        self.num_reused += len({(id(tip.trunk), tip.node) for tip in tips if tip.row is not None})
        return tips

    @staticmethod
    def graft(tip: Tip, tree: TokenTree, max_nodes: int, ends: Sequence[int] = ()) -> int:
        """Append a drafted tree after a beam, at most `max_nodes` new nodes; returns their number.

        No beam contains a token of `ends`: they and what follows them are left out.
        """
        trunk = tip.trunk
        nodes: list[int | None] = []
        before = len(trunk.tokens)
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            above = tip.node if parent == ROOT else nodes[parent]
            fits = (above, token) in trunk.children or len(trunk.tokens) - before < max_nodes
            nodes.append(trunk.child(above, token) if above is not None and token not in ends and fits else None)
        return len(trunk.tokens) - before

    def settle(self, tips: Sequence[Tip]) -> None:
        """Close trunks without beams, split trunks that are too large, commit and drop nodes where that pays.

        Scored nodes after the tips are kept, all other nodes of no live beam are dropped at some time.
        """
        by_trunk: dict[int, list[Tip]] = {}
        for tip in tips:
            by_trunk.setdefault(id(tip.trunk), []).append(tip)
        self.model.apply([Close(trunk.slot) for trunk in self.trunks if id(trunk) not in by_trunk])
        kept: list[Trunk] = []
        for trunk in self.trunks:
            if id(trunk) in by_trunk:
                kept += [trunk, *self._settle(trunk, by_trunk[id(trunk)])]
                trunk.own_rows()
        self.trunks = kept

    def _settle(self, trunk: Trunk, tips: Sequence[Tip]) -> list[Trunk]:
        nodes = [tip.node for tip in tips]
        live = trunk.live(nodes)
        path = trunk.common(live, nodes)
        if self.is_read and len(live) - len(path) > self._capacity and len(set(nodes)) > 1:
            return self._split(trunk, tips, path)
        below = trunk.scored_below(nodes)
        fits = len(live) + len(below) - len(path) <= self._capacity
        if fits:
            live = sorted({*live, *below})
        trunk.rows = {node: trunk.rows[node] for node in live if node in trunk.rows}
        stored = sum(node < trunk.num_stored for node in live)
        dead = trunk.num_stored - stored
        is_due = not fits or len(path) >= LONG_PATH or trunk.num_settled
        if is_due or dead > max(FEW, DEAD_SHARE * stored) or not self.model.supports_trees:
            self._compact(trunk, tips, live, path)
        elif len(live) - stored < len(trunk.tokens) - trunk.num_stored:
            self._compact(trunk, tips, [*range(trunk.num_stored), *live[stored:]], ())
        return []

    def _compact(self, trunk: Trunk, tips: Sequence[Tip], live: Sequence[int], path: Sequence[int]) -> None:
        """Commit a path, and keep the other live nodes only."""
        kept = sorted(set(live).difference(path))
        stored = [node for node in kept if node < trunk.num_stored]
        if path or len(stored) < trunk.num_stored:
            self.model.apply([Commit(trunk.slot, list(path), stored)])
        place = trunk.keep(kept, path[-1] if path else ROOT)
        for tip in tips:
            tip.node = place[tip.node]

    def _split(self, trunk: Trunk, tips: Sequence[Tip], path: Sequence[int]) -> list[Trunk]:
        """Move beams to forks until each trunk is within the capacity; returns the new trunks."""
        groups = self._groups(trunk, tips)
        stay, *moved = sorted(groups, key=lambda group: -len(trunk.live(tip.node for tip in group)))
        tails = [[(trunk.tail(tip.node, len(path)), tip.row) for tip in group] for group in moved]
        live = trunk.live(tip.node for tip in stay)
        trunk.rows = {tip.node: tip.row for tip in stay if tip.row is not None}
        self._compact(trunk, stay, live, path)
        forks = []
        for group, ends in zip(moved, tails, strict=True):
            self.model.reserve(self.model.num_open + 1, self._length)
            fork = Trunk(self.model.apply([Fork(trunk.slot, trunk.slot.length)])[0])
            for tip, (tail, row) in zip(group, ends, strict=True):
                tip.trunk = fork
                tip.node = fork.grown(tail)
                if row is not None:
                    fork.rows[tip.node] = row
                    fork.wanted.discard(tip.node)
            fork.own_rows()
            forks.append(fork)
        return forks

    def _groups(self, trunk: Trunk, tips: Sequence[Tip]) -> list[list[Tip]]:
        """Divide beams where their paths part, until each group is within the capacity or is one node."""
        live = trunk.live(tip.node for tip in tips)
        path, heads = trunk.fork_of(live)
        if len(live) - len(path) <= self._capacity or len({tip.node for tip in tips}) == 1:
            return [list(tips)]
        part = {head: index for index, head in enumerate(heads)}
        for node in live:  # ascending: a parent comes before its children
            if trunk.parents[node] in part:
                part.setdefault(node, part[trunk.parents[node]])
        parts: list[list[Tip]] = [[] for _ in heads]
        for tip in tips:
            parts[part[tip.node]].append(tip)
        return [group for members in parts for group in self._groups(trunk, members)]

    def close(self) -> None:
        self.model.apply([Close(trunk.slot) for trunk in self.trunks])
        self.trunks = []
