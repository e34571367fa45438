"""The verifier interface: a pure function of a tree, the target's distributions and random decisions.

A verifier has no access to a model, cache, tokenizer or clock. Its random decisions come from a `RandomSource`, which
the exact tests replace by every outcome with its probability. Rules that compare the target's distribution with the
draft distribution share the functions at the end. These compute in float64 on the host: ratios and residuals of float32
distributions lose digits that decide rare tokens, and float32 sums depend on the device.
"""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from draftree.core.errors import ConfigurationError
from draftree.core.noise import Noise
from draftree.core.registry import NoOptions
from draftree.core.tree import ROOT, Draw, TokenTree, is_chain
from draftree.core.types import Verdict
from draftree.sampling.distributions import NodeDistributions


class RandomSource(ABC):
    """Independent decisions, one after another."""

    @abstractmethod
    def accepts(self, probability: float) -> bool:
        """Toss a coin with this probability of True; always True at 1 and more, never at 0."""

    @abstractmethod
    def draw(self, weights: Tensor) -> int:
        """Draw an index with probability proportional to its weight.

        Args:
            weights: shape (n,); nonnegative with a positive sum.
        """


class NoiseSource(RandomSource):
    """Decisions from a noise stream, numbered from 0. Mutable: one instance serves one verification.

    Args:
        noise: a stream for this round only, independent of the draft's and of the request's own.
        salts: name of that stream within `noise`; if given, it is derived at the first decision.
    """

    __slots__ = ("_noise", "_salts", "_taken")

    def __init__(self, noise: Noise, *salts: int | str) -> None:
        self._noise = noise
        self._salts = salts
        self._taken = 0

    def _uniform(self) -> float:
        if self._salts:
            self._noise, self._salts = self._noise.stream(*self._salts), ()
        value = self._noise.uniform(self._taken)
        self._taken += 1
        return value

    def accepts(self, probability: float) -> bool:
        """Toss a coin: the next uniform is below the probability."""
        return self._uniform() < probability

    def draw(self, weights: Tensor) -> int:
        """Invert the cumulative weights in float64, with 52 bits of the next uniform."""
        cumulated = torch.cumsum(weights.to(torch.float64), dim=0)
        total = cumulated[-1].item()
        # a product that rounds up to the total would give an index after the last weight
        aim = min(total * self._uniform(), math.nextafter(total, 0.0))
        return int(torch.searchsorted(cumulated, aim, right=True))


class Guarantee(enum.StrEnum):
    """The relation of a text to the texts of plain decoding."""

    SAME_TEXT = "same text"
    """Equal to the text of plain decoding with the same seed, token for token."""
    SAME_DISTRIBUTION = "same distribution"
    """Possibly another text for a given seed, with the distribution of plain decoding."""
    LOSSY = "lossy"
    """Another distribution."""


class Verifier(ABC):
    """Selects the accepted part of a tree. Constructed as `cls(config)`."""

    Config: ClassVar[type] = NoOptions
    accepts: ClassVar[frozenset[Draw]]
    """The draws under which the rule is correct."""
    chains_only: ClassVar[bool] = False
    """Whether every node may have at most one child."""
    lossless: ClassVar[bool] = True
    shares_noise: ClassVar[bool] = False
    """Whether the drafter may rank with the request's own noise. Verifiers that use the draft distribution must not
    share it: given the verifier's noise, such a draw would be determined."""
    needs_distributions: ClassVar[bool] = False
    """Whether trees must carry the distributions that their nodes were drawn from (point draws need none)."""
    follows_picks: ClassVar[bool] = False
    """Whether the verdict follows from the picks on the accepted path alone."""
    wants_distributions: ClassVar[bool] = False
    """Whether the rule, though it takes all draws, performs better with distributions, which the drafter then supplies
    if it can."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @classmethod
    def promise(cls, temperature: float) -> Guarantee:
        """Return the promise for texts at this temperature."""
        if temperature == 0:
            return Guarantee.SAME_TEXT  # the target's distribution is one-hot, and every rule accepts only that token
        if not cls.lossless:
            return Guarantee.LOSSY
        # a lossless rule without draft distributions follows the target's own picks
        return Guarantee.SAME_DISTRIBUTION if cls.needs_distributions else Guarantee.SAME_TEXT

    @abstractmethod
    def verify(self, tree: TokenTree, distributions: NodeDistributions, random: RandomSource) -> Verdict:
        """Verify a tree.

        Args:
            tree: the drafted tree, possibly empty.
            distributions: the target's distributions; row 0 at the root, row 1 + i at node i.
            random: random decisions of this round, independent of the draft.
        """

    def verify_many(
        self, trees: Sequence[TokenTree], distributions: Sequence[NodeDistributions], randoms: Sequence[RandomSource]
    ) -> list[Verdict]:
        """Verify the trees of a round; a rule may process them together."""
        return [self.verify(*arguments) for arguments in zip(trees, distributions, randoms, strict=True)]


def deepest_path(tree: TokenTree, is_kept: Callable[[int], bool]) -> list[int]:
    """Return the longest path from the root over accepted nodes; the first drafted among equals.

    Args:
        tree: the drafted tree.
        is_kept: called once for every node whose parent is accepted, or is the root.
    """
    depth_of = {ROOT: 0}
    deepest = ROOT
    for node, parent in enumerate(tree.parents):
        if parent in depth_of and is_kept(node):
            depth_of[node] = depth_of[parent] + 1
            if depth_of[node] > depth_of[deepest]:
                deepest = node
    return tree.path(deepest)


def verdict_at_deepest(tree: TokenTree, picks: Sequence[int], is_kept: Callable[[int], bool]) -> Verdict:
    """Accept the `deepest_path`, and write the target's pick at its end."""
    path = deepest_path(tree, is_kept)
    return Verdict(tuple(path), picks[path[-1] + 1 if path else 0])


def follow_picks(tree: TokenTree, distributions: NodeDistributions) -> Verdict:
    """Descend while the target's pick is a child, and write the pick at the end.

    Twins (equal tokens under one parent) are both followed; the deeper one is kept.
    """
    picks = distributions.picks()
    return verdict_at_deepest(tree, picks, lambda node: picks[tree.parents[node] + 1] == tree.tokens[node])


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
    return distributions.probs(slice(row, row + 1))[0].cpu().double()


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
        distribution = tree.distributions[node].to("cpu", copy=bool(used)).double()
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


def walk_siblings(tree: TokenTree, distributions: NodeDistributions, random: RandomSource) -> Verdict:
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
            if random.accepts(acceptance(target, draft, tree.tokens[child])):
                path.append(child)
                node = child
                break
            target = normalised(residual(target, draft), otherwise=target)
        else:
            return Verdict(tuple(path), random.draw(target))


def share_left(rest: Tensor, weight: float) -> float:
    """Return s / (s + 1 - weight), the probability to stop after all descendants were rejected; s: residual's sum."""
    total = rest.sum().item()
    # grouped so that a small sum is not lost beside 1 where the weight is 1
    rejected = total + (1.0 - weight)
    return total / rejected if rejected > 0 else 0.0
