"""Merge of trees whose nodes are draws, for verifiers that compare draft distributions.

Two facts preserve the target distribution. A child is a draw from the distribution that it carries, given its path and
its earlier siblings. A verifier that rejects a child subtracts that whole distribution, whatever the token, so the
order of later children may depend on the token: a later child with the same token has no residual mass and is never
accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftree.core.tree import ROOT, Draw, TokenTree


def join(trees: Sequence[TokenTree], names: Sequence[str], *, vocab_size: int) -> TokenTree:
    """Merge trees into one that holds every draw with the distribution that it was drawn from.

    Draws from a distribution precede point draws, which add acceptance where the former are rejected. A child with the
    token of an earlier sibling is never accepted itself, so its descendants are attached to that sibling. A point draw
    is merged into such a sibling; a draw from a distribution is kept, because dropping it would condition on its value.

    Args:
        trees: trees of point or independent draws.
        names: one name per tree; a node lists the names of all trees that proposed it.
        vocab_size: width of the distributions; a point draw gets a one-hot distribution.
    """
    joined = _Joined([], [], [], [], [], {})
    pairs = list(zip(trees, names, strict=True))
    for tree, name in sorted(pairs, key=lambda pair: pair[0].distributions is None):
        joined.add(tree, name, vocab_size)
    distributions = torch.stack(joined.distributions) if joined.distributions else None
    return TokenTree(
        tuple(joined.tokens),
        tuple(joined.parents),
        tuple(joined.scores),
        Draw.IID,
        distributions,
        tuple(joined.sources),
    )


@dataclass(slots=True)
class _Joined:
    """A joined tree under construction, with the first child of each token at each node. Mutated by `add`."""

    tokens: list[int]
    parents: list[int]
    scores: list[float]
    sources: list[tuple[str, ...]]
    distributions: list[Tensor]
    first: dict[tuple[int, int], int]

    def add(self, tree: TokenTree, name: str, vocab_size: int) -> None:
        """Add the nodes of one tree; see `join`."""
        distributions = (
            _point_distributions(tree, vocab_size) if tree.distributions is None else tree.distributions.cpu()
        )
        place = {ROOT: ROOT}
        for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
            at = place[parent]
            own = tuple(f"{name}/{source}" for source in tree.sources[node]) if tree.sources else (name,)
            twin = self.first.get((at, token))
            if twin is not None and tree.distributions is None:
                self.sources[twin] = tuple(dict.fromkeys((*self.sources[twin], *own)))
            else:
                gain = tree.scores[node] - (0.0 if parent == ROOT else tree.scores[parent]) if tree.scores else 0.0
                self.tokens.append(token)
                self.parents.append(at)
                self.scores.append(gain + (0.0 if at == ROOT else self.scores[at]))
                self.sources.append(own)
                self.distributions.append(distributions[node])
            place[node] = self.first.setdefault((at, token), len(self.tokens) - 1)


def _point_distributions(tree: TokenTree, vocab_size: int) -> Tensor:
    chosen = torch.tensor(tree.tokens, dtype=torch.long).unsqueeze(-1)
    return torch.zeros(len(tree), vocab_size).scatter_(-1, chosen, 1.0)
