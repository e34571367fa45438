"""Beams of a small model as drafts: it continues the live beams by an ordinary beam search of some levels.

A level holds more nodes than the search has beams, since all next beams must be drafted for a further step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

import torch

from draftree.beam.drafting.base import MAX_NODES, BeamDrafter, Draft
from draftree.beam.forest import Forest
from draftree.beam.scoring import SearchStats, run_pass
from draftree.beam.shaping import next_logprobs
from draftree.beam.trunk import Tip, gathered
from draftree.core.transfer import to_device, to_host
from draftree.core.tree import ROOT, TokenTree
from draftree.models.base import LanguageModel

if TYPE_CHECKING:
    from draftree.beam.group import Beam
    from draftree.beam.state import TextSearch


@dataclass(slots=True)
class _Growing:
    """Tree after a live beam."""

    beam: Beam
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Node:
    """A live beam, or a node of the tree after it."""

    tree: _Growing
    index: int
    tip: Tip
    score: float


@final
class ModelBeams(BeamDrafter):
    """Drafts by a model with the same vocabulary.

    Args:
        model: the draft model; it must accept trees.
    """

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self._forests: dict[TextSearch, Forest] = {}

    def start(self, text: TextSearch, *, capacity: int, length: int) -> None:
        """Open a slot."""
        forest = self._forests[text] = Forest(self.model, text.opening, capacity=capacity, length=length)
        for beam in text.live:
            beam.draft_tips = [forest.root]

    def forests(self, text: TextSearch) -> Sequence[Forest]:
        """Return the tree of the draft model."""
        return (self._forests[text],)

    def finish(self, text: TextSearch) -> None:
        """Close the slots."""
        forest = self._forests.pop(text, None)
        if forest is not None:
            forest.close()

    def propose(self, depths: Mapping[TextSearch, int], stats: SearchStats) -> list[list[Draft]]:
        """Return trees of the best continuations, one pass for each level."""
        trees = {text: [_Growing(beam) for beam in text.live] for text in depths}
        nodes = {
            text: [_Node(tree, ROOT, tree.beam.draft_tips[0], tree.beam.score) for tree in own]
            for text, own in trees.items()
        }
        widths = {text: _width(text.params.beam_width) for text in depths}
        levels = {text: max(1, min(depth, MAX_NODES // widths[text])) for text, depth in depths.items()}
        for level in range(max(levels.values())):
            live = {text: nodes[text] for text in depths if level < levels[text] and nodes[text]}
            if not live:
                break
            self._score([self._forests[text] for text in live], stats)
            nodes |= {
                text: self._grow(text, own, widths[text], is_last=level + 1 == levels[text])
                for text, own in live.items()
            }
        return [
            [(tree.beam, TokenTree(tuple(tree.tokens), tuple(tree.parents))) for tree in own if tree.tokens]
            for own in trees.values()
        ]

    def _score(self, forests: Sequence[Forest], stats: SearchStats) -> None:
        while unread := [forest for forest in forests if not forest.is_complete]:
            run_pass(self.model, unread)
            stats.num_draft_passes += 1

    def _grow(self, text: TextSearch, nodes: Sequence[_Node], count: int, *, is_last: bool) -> list[_Node]:
        """Append the best continuations of all nodes; only nodes that a next level needs are put into the forest."""
        rows = [row for node in nodes if (row := node.tip.row) is not None]
        logprobs = next_logprobs(gathered(rows), [text.params.temperature] * len(rows))
        if text.ends:
            logprobs[:, text.end_ids.to(logprobs.device)] = -math.inf
        totals = logprobs + to_device([node.score for node in nodes], logprobs.device, dtype=logprobs.dtype)[:, None]
        best = totals.reshape(-1).topk(min(count, totals.numel()))
        read = to_host(torch.stack((best.values.double(), best.indices.double())))
        forest, found = self._forests[text], []
        for score, flat in zip(*read, strict=True):
            if score == -math.inf or math.isnan(score):
                continue
            parent, token = nodes[int(flat) // totals.shape[1]], int(flat) % totals.shape[1]
            parent.tree.tokens.append(token)
            parent.tree.parents.append(parent.index)
            if not is_last:
                tip = forest.grow(parent.tip, token)
                found.append(_Node(parent.tree, len(parent.tree.tokens) - 1, tip, score))
        return found


def _width(beam_width: int) -> int:
    """Nodes of a level for a search of this width."""
    return beam_width + max(2, beam_width // 2)
