"""Exact distributions of what rules write: every outcome of drafting and verifying on small tables, with its
probability.

Not a test itself. A case is a pair of table models, the shape of the drafted tree (children a node, level by level)
and how children are drawn. `trees` enumerates drafts; `outcomes` replays a verification once for every way in which
its coins and draws can fall; `written` adds both up to the distribution of the next tokens.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftree.core.tree import ROOT, Draw, TokenTree
from draftree.core.types import Verdict
from draftree.sampling.distributions import NodeDistributions
from draftree.verifiers.base import RandomSource
from table_cases import Case, joint, node_distributions

Drafts = Iterable[tuple[TokenTree, float]]
Verify = Callable[[TokenTree, NodeDistributions, Any], Verdict]


def child_tuples(distribution: np.ndarray, count: int, draw: Draw) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every way to draw this many children from a distribution, in order, with its probability."""
    tokens = range(len(distribution))
    ways = (
        itertools.permutations(tokens, count)
        if draw is Draw.WITHOUT_REPLACEMENT
        else itertools.product(tokens, repeat=count)
    )
    for way in ways:
        probability, left = 1.0, 1.0
        for token in way:
            probability *= distribution[token] / left
            if draw is Draw.WITHOUT_REPLACEMENT:
                left -= distribution[token]
        if probability > 0:
            yield way, float(probability)


def trees(case: Case, shape: Sequence[int], draw: Draw) -> Iterator[tuple[TokenTree, float]]:
    """Every tree of a shape with its probability; each node carries the distribution that its siblings were drawn
    from."""

    def grow(tree: TokenTree, frontier: list[int], level: int, probability: float) -> Iterator[tuple[TokenTree, float]]:
        if level == len(shape):
            yield tree, probability
            return
        options = [
            list(child_tuples(case.draft_distribution([tree.tokens[n] for n in tree.path(node)]), shape[level], draw))
            for node in frontier
        ]
        for choice in itertools.product(*options):
            grown = with_children(case, tree, frontier, [tokens for tokens, _ in choice])
            weight = probability * float(np.prod([p for _, p in choice]))
            yield from grow(grown, list(range(len(tree), len(grown))), level + 1, weight)

    yield from grow(TokenTree((), (), draw=draw, distributions=torch.empty(0, case.vocab_size)), [ROOT], 0, 1.0)


def with_children(case: Case, tree: TokenTree, parents: Sequence[int], tokens: Sequence[Sequence[int]]) -> TokenTree:
    """The tree with new nodes, and for each the drafter's distribution at its parent."""
    rows = [] if tree.distributions is None else list(tree.distributions)
    new_tokens, new_parents = list(tree.tokens), list(tree.parents)
    for parent, siblings in zip(parents, tokens, strict=True):
        distribution = torch.from_numpy(case.draft_distribution([tree.tokens[n] for n in tree.path(parent)]))
        for token in siblings:
            new_tokens.append(token)
            new_parents.append(parent)
            rows.append(distribution)
    return TokenTree(
        tuple(new_tokens), tuple(new_parents), draw=tree.draw, distributions=torch.stack(rows) if rows else None
    )


class ScriptedChance(RandomSource):
    """Follows its script, then always takes the first outcome; keeps the probability of all outcomes.

    A draw ends a verification: it is the bonus, and nothing is decided after it. So it is not branched on; its
    distribution is kept, and the first token that it can give is returned.
    """

    def __init__(self, script: Sequence[int]) -> None:
        self.script = script
        self.trail: list[tuple[int, int]] = []
        self.probability = 1.0
        self.last_draw: list[tuple[int, float]] = []

    def _choose(self, weights: Sequence[float]) -> int:
        assert not self.last_draw, "a rule makes a decision after its draw"
        place = len(self.trail)
        choice = self.script[place] if place < len(self.script) else 0
        self.trail.append((choice, len(weights)))
        self.probability *= weights[choice]
        return choice

    def accepts(self, probability: float) -> bool:
        assert 0 <= probability <= 1, probability
        if probability in (0, 1):
            return probability == 1
        return self._choose([probability, 1 - probability]) == 0

    def pick(self, weights: Tensor) -> int:
        """A draw that others may follow."""
        possible = shares(weights)
        return possible[self._choose([share for _, share in possible])][0]

    def draw(self, weights: Tensor) -> int:
        assert not self.last_draw, "a rule draws twice"
        self.last_draw = shares(weights)
        return self.last_draw[0][0]


def shares(weights: Tensor) -> list[tuple[int, float]]:
    """Tokens that can be drawn, each with its probability."""
    listed = weights.tolist()
    assert min(listed) >= 0
    total = sum(listed)
    return [(token, weight / total) for token, weight in enumerate(listed) if weight > 0]


def outcomes(verify: Callable[[ScriptedChance], Verdict]) -> Iterator[tuple[Verdict, float]]:
    """Every verdict with its probability, by running the verification once for every way its chances fall."""
    script: list[int] = []
    while True:
        chance = ScriptedChance(script)
        verdict = verify(chance)
        if not chance.last_draw:
            yield verdict, chance.probability
        else:
            assert verdict.bonus == chance.last_draw[0][0]
            for token, share in chance.last_draw:
                yield Verdict(verdict.path, token), chance.probability * share
        trail = chance.trail
        while trail and trail[-1][0] == trail[-1][1] - 1:
            trail.pop()
        if not trail:
            return
        script = [choice for choice, _ in trail[:-1]] + [trail[-1][0] + 1]


class ChancePicks(NodeDistributions):
    """Distributions whose picks fall by chance, one for every path: the target's noise, if the drafter does not share
    it."""

    __slots__ = ("_case", "_chance", "_paths", "_picks")

    def __init__(self, case: Case, tree: TokenTree, chance: ScriptedChance) -> None:
        nodes = range(ROOT, len(tree))
        self._paths = [tuple(tree.tokens[n] for n in tree.path(node)) for node in nodes]
        self._chance = chance
        self._picks: dict[tuple[int, ...], int] = {}
        self._case = case

    def picks(self) -> list[int]:
        return self  # type: ignore[return-value]

    def probs(self, rows: Sequence[int] | slice = slice(None)) -> Tensor:
        return torch.from_numpy(np.stack([self._case.target_distribution(path) for path in self._paths]))[rows]

    def __getitem__(self, row: int) -> int:
        path = self._paths[row]
        if path not in self._picks:
            self._picks[path] = self._chance.pick(torch.from_numpy(self._case.target_distribution(path)))
        return self._picks[path]


@dataclass(frozen=True)
class Written:
    """What a rule writes: the distribution of the next tokens, and how many drafted ones are among them on average."""

    distribution: np.ndarray
    accepted: float


def written(case: Case, drafts: Drafts, verify: Verify, *, length: int) -> Written:
    """Adds up drafts and verdicts; the target samples the remaining tokens up to `length` itself.

    Tokens after them are ignored.
    """
    distribution = np.zeros((case.vocab_size,) * length)
    accepted = total = 0.0
    ends: dict[tuple[int, ...], float] = {}
    for tree, weight in drafts:
        distributions = node_distributions(case, tree)
        for verdict, probability in outcomes(functools.partial(verify, tree, distributions)):
            tokens = (*(tree.tokens[node] for node in verdict.path), verdict.bonus)[:length]
            ends[tokens] = ends.get(tokens, 0.0) + weight * probability
            accepted += weight * probability * len(verdict.path)
            total += weight * probability
    assert abs(total - 1) < 1e-12, total
    for tokens, probability in ends.items():
        distribution[tokens] += probability * joint(case, length - len(tokens), tokens)
    return Written(distribution, accepted)


Widths = Callable[[tuple[int, ...], int], int]
"""Children of a node, from the tokens at the root and which of them it is."""


def grown(cases: Case, draw: Draw, widths: Widths) -> Iterator[tuple[TokenTree, float]]:
    """Trees of two levels, two children at the root, whose second level depends on all that was drawn before."""
    for tree, probability in trees(cases, (2,), draw):
        options = []
        for node in range(2):
            width = widths(tree.tokens, node)
            options.append(list(child_tuples(cases.draft_distribution(tree.tokens[node : node + 1]), width, draw)))
        for first, p_first in options[0]:
            for second, p_second in options[1]:
                yield with_children(cases, tree, [0, 1], [first, second]), probability * p_first * p_second
