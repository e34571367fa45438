"""Live beams as nodes of tentative trees: what is stored, what is committed, and when a tree is split.

The tree of a text is in one slot. The common prefix of the live beams is committed, and nodes of no live beam are
dropped, when that pays. If the live nodes exceed the capacity, or the model accepts chains only, some beams move to a
fork of the slot, where their own nodes are computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draftree.beam.opening import BeamPrompt, beam_prompt, open_slot
from draftree.core.tree import ROOT
from draftree.models.base import Close, Commit, Edit, Extend, Fork, LanguageModel, Slot

CHUNK = 512
"""Maximum number of tokens of a text that one pass computes: longer prompts take several passes."""
DEAD_SHARE = 0.5
"""Nodes of no live beam are dropped when there are more than this share of the live ones, and more than `FEW`."""
FEW = 16
LONG_PATH = 32
"""A common prefix is committed when it has this many nodes, or when nodes are dropped."""
NODES_PER_BEAM = 48
MAX_CAPACITY = 1024


def capacity_for(width: int) -> int:
    """Return the default number of live nodes in one slot for a search of this width."""
    return min(MAX_CAPACITY, NODES_PER_BEAM * width)


@dataclass(slots=True, eq=False)
class Trunk:
    """One slot and its tree; nodes from `num_stored` on are computed by the next pass."""

    slot: Slot
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    num_stored: int = 0

    def add(self, parent: int, token: int) -> int:
        """Append a node that is computed by the next pass."""
        self.tokens.append(token)
        self.parents.append(parent)
        return len(self.tokens) - 1

    def live(self, tips: Sequence[int]) -> list[int]:
        """Return the nodes of the paths to these tips, ascending."""
        found: set[int] = set()
        for tip in tips:
            node = tip
            while node != ROOT and node not in found:
                found.add(node)
                node = self.parents[node]
        return sorted(found)

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


@dataclass(slots=True)
class Tip:
    """End of a live beam: a node of a trunk."""

    trunk: Trunk
    node: int


class Forest:
    """The trunks of one text. Closes them when the text is finished.

    Args:
        model: the model.
        prompt: the prompt; further trunks of the text are forks, so its source is encoded once.
        capacity: maximum number of live nodes in one slot; one beam may have more.
        length: expected maximum number of tokens in a slot.
    """

    def __init__(self, model: LanguageModel, prompt: Sequence[int] | BeamPrompt, *, capacity: int, length: int) -> None:
        self.model = model
        self._capacity = capacity if model.supports_trees else 1
        self._length = length
        self._is_started = False
        model.reserve(model.num_open + 1, length)
        self.trunks = [Trunk(open_slot(model, beam_prompt(prompt)))]
        self.root = self._grown(self.trunks[0], beam_prompt(prompt).tokens)

    @staticmethod
    def _grown(trunk: Trunk, tokens: Sequence[int]) -> Tip:
        node = ROOT
        for token in tokens:
            node = trunk.add(node, token)
        return Tip(trunk, node)

    def jobs(self, chunk: int = CHUNK) -> list[tuple[Trunk, Extend]]:
        """Return the jobs of the next pass: a chunk of the prompt, or all nodes that are not stored.

        Rows of logits are requested for all tips, and not before the end of the prompt.

        Args:
            chunk: maximum number of prompt tokens.
        """
        whole = self._is_started or self.root.node - self.trunks[0].num_stored < chunk
        jobs = []
        for trunk in self.trunks:
            first = trunk.num_stored
            end = len(trunk.tokens) if whole else first + chunk
            if first == end:
                continue
            is_parent = set(trunk.parents)
            tips = [node - first for node in range(first, end) if node not in is_parent]
            held = end + trunk.slot.length
            if held > self._length:
                self._length = max(held, self._length * 3 // 2)
                self.model.reserve(self.model.num_open, self._length)
            job = Extend(trunk.slot, trunk.tokens[first:end], trunk.parents[first:end], tips if whole else ())
            jobs.append((trunk, job))
        return jobs

    @staticmethod
    def note(jobs: Sequence[tuple[Trunk, Extend]]) -> None:
        """Record that the jobs have been run."""
        for trunk, job in jobs:
            trunk.num_stored += len(job.tokens)

    @property
    def is_complete(self) -> bool:
        """Whether every node is stored."""
        return all(trunk.num_stored == len(trunk.tokens) for trunk in self.trunks)

    def advance(self, continuations: Sequence[tuple[Tip, int]]) -> list[Tip]:
        """Append a token to each of these beams; equal continuations share a node. Other beams end.

        Returns:
            The new ends, in the order of the continuations.
        """
        self._is_started = True
        known: dict[tuple[int, int, int], int] = {}
        tips = []
        for tip, token in continuations:
            key = (id(tip.trunk), tip.node, token)
            if key not in known:
                known[key] = tip.trunk.add(tip.node, token)
            tips.append(Tip(tip.trunk, known[key]))
        self.settle(tips)
        return tips

    def settle(self, tips: Sequence[Tip]) -> None:
        """Close trunks without beams, split trunks that are too large, commit and drop nodes where that pays."""
        by_trunk: dict[int, list[Tip]] = {}
        for tip in tips:
            by_trunk.setdefault(id(tip.trunk), []).append(tip)
        edits: list[Edit] = []
        kept: list[Trunk] = []
        for trunk in list(self.trunks):
            own = by_trunk.get(id(trunk))
            if own is None:
                edits.append(Close(trunk.slot))
            else:
                kept.append(trunk)
                kept += self._settle(trunk, own)
        self.model.apply(edits)
        self.trunks = kept

    def _settle(self, trunk: Trunk, tips: Sequence[Tip]) -> list[Trunk]:
        nodes = [tip.node for tip in tips]
        live = trunk.live(nodes)
        path = trunk.common(live, nodes)
        if len(live) - len(path) > self._capacity and len(set(nodes)) > 1:
            return self._split(trunk, tips, path)
        stored = sum(node < trunk.num_stored for node in live)
        dead = trunk.num_stored - stored
        if len(path) >= LONG_PATH or dead > max(FEW, DEAD_SHARE * stored) or not self.model.supports_trees:
            self._compact(trunk, tips, live, path)
        return []

    def _compact(self, trunk: Trunk, tips: Sequence[Tip], live: Sequence[int], path: Sequence[int]) -> None:
        """Commit a path, and keep the other live nodes only."""
        end = path[-1] if path else ROOT
        on_path = set(path)
        kept = [node for node in live if node not in on_path]
        stored = [node for node in kept if node < trunk.num_stored]
        if path or len(stored) < trunk.num_stored:
            self.model.apply([Commit(trunk.slot, list(path), stored)])
        place = {end: ROOT} | {node: index for index, node in enumerate(kept)}
        trunk.parents = [place[trunk.parents[node]] for node in kept]
        trunk.tokens = [trunk.tokens[node] for node in kept]
        trunk.num_stored = len(stored)
        for tip in tips:
            tip.node = place[tip.node]

    def _split(self, trunk: Trunk, tips: Sequence[Tip], path: Sequence[int]) -> list[Trunk]:
        """Move beams to forks until each trunk is within the capacity; returns the new trunks."""
        groups = sorted(self._groups(trunk, tips), key=lambda group: -len(trunk.live([tip.node for tip in group])))
        stay, moved = groups[0], groups[1:]
        depth = len(path)
        tails = [[self._tail(trunk, tip.node, depth) for tip in group] for group in moved]
        live = trunk.live([tip.node for tip in stay])
        self._compact(trunk, stay, live, path)
        new = []
        for group, tokens in zip(moved, tails, strict=True):
            self.model.reserve(self.model.num_open + 1, self._length)
            twin = Trunk(self.model.apply([Fork(trunk.slot, trunk.slot.length)])[0])
            known: dict[tuple[int, int], int] = {}
            for tip, tail in zip(group, tokens, strict=True):
                node = ROOT
                for token in tail:
                    key = (node, token)
                    if key not in known:
                        known[key] = twin.add(node, token)
                    node = known[key]
                tip.trunk, tip.node = twin, node
            new.append(twin)
        return new

    @staticmethod
    def _tail(trunk: Trunk, node: int, depth: int) -> list[int]:
        tokens = []
        while node != ROOT:
            tokens.append(trunk.tokens[node])
            node = trunk.parents[node]
        return tokens[::-1][depth:]

    def _groups(self, trunk: Trunk, tips: Sequence[Tip]) -> list[list[Tip]]:
        """Divide beams where their paths part, until each group is within the capacity or is one node."""
        nodes = [tip.node for tip in tips]
        live = trunk.live(nodes)
        children: dict[int, list[int]] = {}
        for node in live:
            children.setdefault(trunk.parents[node], []).append(node)
        node, depth = ROOT, 0
        while len(below := children.get(node, [])) == 1:
            node, depth = below[0], depth + 1
        if len(live) - depth <= self._capacity or len(set(nodes)) == 1:
            return [list(tips)]
        own: dict[int, int] = {}
        for index, child in enumerate(children[node]):
            own[child] = index
        for descendant in live:  # ascending: a parent comes before its children
            if descendant not in own and trunk.parents[descendant] in own:
                own[descendant] = own[trunk.parents[descendant]]
        parts: list[list[Tip]] = [[] for _ in children[node]]
        for tip in tips:
            parts[own[tip.node]].append(tip)
        return [group for part in parts for group in self._groups(trunk, part)]

    @property
    def num_live(self) -> int:
        """Number of nodes that the trees hold or will hold with the next pass."""
        return sum(len(trunk.tokens) for trunk in self.trunks)

    def close(self) -> None:
        """Close all slots."""
        self.model.apply([Close(trunk.slot) for trunk in self.trunks])
        self.trunks = []
