"""Drafts under a grammar: what the grammar forbids goes, and what it forces comes for free.

A drafted token that the grammar does not allow cannot be accepted; where children are free, it is taken out before
the tree is scored. Where the grammar leaves one token, or tokens that spell one text, they need no drafter: they are
put after the root and after the likeliest leaf, beyond the budget if need be, and where they fill it the drafter is
not asked. Where children are drawn from distributions nothing is taken out, since a draw that is looked at must count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from draftree.core.node_map import NodeMap
from draftree.core.tree import EMPTY, ROOT, Draw, TokenTree, depths, first_children, path
from draftree.core.types import Verdict
from draftree.sampling.grammar.guide import Guide
from draftree.sampling.history import History

NAME = "grammar"  # source of forced tokens in statistics
LONGEST_RUN = 32  # maximum number of forced tokens after the root: each is a row of the pass
LONGEST_TAIL = 8  # maximum number of forced tokens after a leaf: they are of use only if the leaf is accepted
LEAST_TRUST = 0.4
"""Share of right guesses below which spellings are not guessed: a model may not cut text into the longest tokens."""
MEMORY = 0.7  # weight of older guesses in that share
RECOVERY = 0.02  # growth of the share in a round without a guess


@final
class ForcedTokens:
    """The grammar of one sequence, as its drafts see it. In every round: `begin`, `fit`, `verdict_on_draft`."""

    def __init__(self, guide: Guide, history: History) -> None:
        self._guide = guide
        self._history = history
        self._trust = 1.0  # how often the longest of several spellings was the model's, lately
        self._start()

    def _start(self) -> None:
        self.drafted = EMPTY  # the drafter's own tree
        self._run: list[int] = []
        self._nodes: NodeMap | None = None
        """Where the nodes of `drafted` are in the fitted tree; None before there is one."""
        self._guess: int | None = None  # the node after the root that is a guess of the spelling

    def begin(self, room: int) -> int:
        """Begin a round; returns the number of tokens, within `room`, that are forced after the root."""
        self._start()
        self._run = self._forced((), min(LONGEST_RUN, room))
        return len(self._run)

    def _forced(self, path: Sequence[int], most: int) -> list[int]:
        return self._guide.forced(self._history, path, most, certain=self._trust < LEAST_TRUST)

    def fit(self, tree: TokenTree, room: int, *, name: str, draw: Draw, may_branch: bool, vocab_size: int) -> TokenTree:
        """Return the drafter's tree without forbidden nodes and with forced ones.

        Args:
            tree: the tree; empty if the drafter was not asked.
            name: source of the tree's nodes if it names none.
            may_branch: whether a forced run may stand beside a drafted one.
        """
        self.drafted = tree
        nodes = NodeMap.identity(tree.parents)
        if draw in (Draw.FREE, Draw.POINT):
            allowed = self._guide.allowed(self._history, tree.token_paths()[1:])
            nodes = NodeMap.keeping(tree.parents, [node for node, after in enumerate(allowed) if after is not None])
            tree = nodes.cut(tree)
        growing = _Growing(tree, name)
        if (may_branch and draw is Draw.FREE) or not len(tree):
            growing.graft(ROOT, self._run)
        if self._run and not self._guide.forced(self._history, (), 1, certain=True):
            # others would spell the same text
            self._guess = growing.first.get((ROOT, self._run[0]))
        leaf = growing.likeliest_leaf()
        left = room - max(len(growing.tokens), growing.depth_of(leaf))
        growing.graft(leaf, [] if leaf == ROOT else self._forced(growing.path(leaf), min(LONGEST_TAIL, left)))
        self._nodes = nodes.widened(len(growing.tokens))
        return growing.tree(draw, vocab_size)

    def verdict_on_draft(self, verdict: Verdict) -> Verdict:
        """Return the verdict on the fitted tree as one on `drafted`."""
        if self._guess is None:
            self._trust = min(1.0, self._trust + RECOVERY)
        else:
            self._trust = MEMORY * self._trust + (1 - MEMORY) * (self._guess in verdict.path)
        return verdict if self._nodes is None else self._nodes.verdict_on_source(verdict)


class _Growing:
    """A tree to which certain tokens are added."""

    def __init__(self, tree: TokenTree, name: str) -> None:
        self._tree = tree
        self.tokens = list(tree.tokens)
        self.parents = list(tree.parents)
        self.scores = list(tree.scores)
        self.sources = list(tree.sources or [(name,)] * len(tree))
        self.first = first_children(tree)
        self._depths = depths(tree.parents)

    def depth_of(self, node: int) -> int:
        return 0 if node == ROOT else self._depths[node]

    def path(self, node: int) -> list[int]:
        return [self.tokens[n] for n in path(self.parents, node)]

    def graft(self, node: int, run: Sequence[int]) -> None:
        """Put a run of tokens below a node, along what is there already."""
        for token in run:
            child = self.first.get((node, token))
            if child is None:
                child = self.first[node, token] = len(self.tokens)
                # as likely as the node before it
                if self.scores or not self._tree.tokens:
                    self.scores.append(0.0 if node == ROOT else self.scores[node])
                self.tokens.append(token)
                self.parents.append(node)
                self.sources.append((NAME,))
                self._depths.append(self.depth_of(node) + 1)
            node = child

    def likeliest_leaf(self) -> int:
        """The leaf with the highest score, the first drafted of equals; without scores the first; ROOT of nothing."""
        inner = set(self.parents)
        leaves = [node for node in range(len(self.tokens)) if node not in inner]
        if not self.scores:
            return leaves[0] if leaves else ROOT
        return max(leaves, key=lambda node: self.scores[node], default=ROOT)

    def tree(self, draw: Draw, vocab_size: int) -> TokenTree:
        distributions = self._tree.distributions
        new = self.tokens[len(self._tree) :]
        if new and draw in (Draw.IID, Draw.WITHOUT_REPLACEMENT):
            certain = torch.zeros(len(new), vocab_size).scatter_(-1, torch.tensor(new)[:, None], 1.0)
            drawn = certain[:0] if distributions is None else distributions
            distributions = torch.cat((drawn, certain.to(drawn.device, drawn.dtype)))
        return TokenTree(
            tuple(self.tokens), tuple(self.parents), tuple(self.scores), draw, distributions, tuple(self.sources)
        )
