"""Shared computations of verifiers that compare the target's distribution with the draft distribution.

All in float64 on the host: ratios and residuals of float32 distributions lose digits that decide rare tokens, and
float32 sums depend on the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftree.core.errors import ConfigurationError
from draftree.core.tree import ROOT, Draw, TokenTree, is_chain
from draftree.core.types import Verdict
from draftree.sampling.distributions import NodeDistributions
from draftree.verifiers.common.chance import Chance

WITH_DISTRIBUTIONS = frozenset({Draw.IID, Draw.POINT, Draw.WITHOUT_REPLACEMENT})
"""All draws with a known distribution."""


def require_chain(tree: TokenTree, rule: str) -> None:
    """Raise for a tree with branches.

    Raises:
        ConfigurationError: a node has two children.
    """
    if not is_chain(tree.parents):
        raise ConfigurationError(
            f"verifier '{rule}' accepts chains only, but got a tree with branches: "
            "draft a chain, or verify with coupled, multistep, recursive or traversal"
        )


def target_distribution(distributions: NodeDistributions, row: int) -> Tensor:
    """Return the target's distribution at a row (0 the root, 1 + i node i).

    Returns:
        Shape (vocab,), float64 on the CPU; sums to 1 up to the rounding of its logits.
    """
    return distributions.probs(slice(row, row + 1))[0].to("cpu", torch.float64)


def draft_distribution(tree: TokenTree, node: int, *, vocab_size: int, used: Sequence[int] = ()) -> Tensor:
    """Return the distribution that a node was drawn from after the tokens in `used` were removed.

    A token with probability 0 in its distribution (float32 may underflow) is treated as a point draw: a one-hot
    distribution, under which every rule is correct for any choice.

    Returns:
        Shape (vocab_size,), float64 on the CPU; sums to 1 as its row does.

    Raises:
        ConfigurationError: the tree's draw requires distributions, and the tree has none.
    """
    token = tree.tokens[node]
    if tree.draw is Draw.POINT:
        distribution = torch.zeros(vocab_size, dtype=torch.float64)
    elif tree.distributions is None:
        raise ConfigurationError(
            f"a tree of {tree.draw.value} draws has no draft distributions, which this verifier needs: "
            "use a drafter that supplies them, or verify with coupled or match"
        )
    else:
        distribution = tree.distributions[node].to("cpu", torch.float64, copy=bool(used))
        for gone in used:
            distribution[gone] = 0.0
        if distribution[token].item() > 0:
            return distribution.div_(distribution.sum()) if used else distribution
        distribution = torch.zeros_like(distribution)
    distribution[token] = 1.0
    return distribution


def used_before(tree: TokenTree, siblings: Sequence[int], index: int) -> list[int]:
    """Return the tokens that were removed from the draft distribution when the index-th sibling was drawn."""
    if tree.draw is not Draw.WITHOUT_REPLACEMENT:
        return []
    return [tree.tokens[node] for node in siblings[:index]]


def acceptance(target: Tensor, draft: Tensor, token: int, *, weight: float = 1.0) -> float:
    """Return min(1, weight * T(token) / D(token)) of distributions of shape (vocab,); D(token) is positive."""
    return min(1.0, weight * target[token].item() / draft[token].item())


def residual(target: Tensor, draft: Tensor, *, weight: float = 1.0) -> Tensor:
    """Return the residual of the target's distribution: (weight * T - D)+, shape (vocab,), not normalised."""
    return torch.mul(target, weight).sub_(draft).clamp_(min=0.0)


def normalised(weights: Tensor, *, otherwise: Tensor) -> Tensor:
    """Return weights of shape (vocab,) divided by their sum; `otherwise` if the sum is 0.

    The sum is 0 if the distribution equals the draft's: then the preceding rejection was a rounding error, and
    any distribution is equally correct.
    """
    total = weights.sum().item()
    return weights / total if total > 0 else otherwise


def walk_siblings(tree: TokenTree, distributions: NodeDistributions, chance: Chance) -> Verdict:
    """Try the children of a node in draw order, each against the residual after the rejected ones; descend if accepted.

    Child x_i, drawn from D_i, is accepted with probability min(1, T(x_i) / D_i(x_i)), else T becomes norm((T - D_i)+).
    For children drawn without replacement, D_i is the draft distribution without the earlier children.
    """
    children = tree.children()
    path: list[int] = []
    node = ROOT
    while True:
        target = target_distribution(distributions, node + 1)
        siblings = children[node + 1]
        for index, child in enumerate(siblings):
            draft = draft_distribution(tree, child, vocab_size=len(target), used=used_before(tree, siblings, index))
            if chance.accepts(acceptance(target, draft, tree.tokens[child])):
                path.append(child)
                node = child
                break
            target = normalised(residual(target, draft), otherwise=target)
        else:
            return Verdict(tuple(path), chance.draw(target))


def share_left(rest: Tensor, weight: float) -> float:
    """Return s / (s + 1 - weight), the probability to stop after all descendants were rejected; s: residual's sum."""
    total = rest.sum().item()
    # grouped so that a small sum is not lost beside 1 where the weight is 1
    rejected = total + (1.0 - weight)
    return total / rejected if rejected > 0 else 0.0
