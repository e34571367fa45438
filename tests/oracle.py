"""Exact laws of what rules write: every outcome of drafting and verifying on small tables, with its probability.

Not a test itself. A case is a pair of table models, the shape of the drafted tree (children a node, level by level)
and how children are drawn. `trees` enumerates drafts; `outcomes` replays a verification once for every way in which
its coins and draws can fall; `written` adds both up to the law of the next tokens.
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

from draftree.core.noise import Noise
from draftree.core.tree import ROOT, Draw, TokenTree
from draftree.core.types import Verdict
from draftree.models.table import Table, TableLM
from draftree.sampling.controls import Controls, build_controls
from draftree.sampling.history import History
from draftree.sampling.laws import LawRows, Laws, NodeLaws
from draftree.sampling.params import SamplingParams
from draftree.verifiers.base import VERIFIERS, Verifier
from draftree.verifiers.chance import Chance

torch.set_num_threads(1)

Drafts = Iterable[tuple[TokenTree, float]]
Verify = Callable[[TokenTree, NodeLaws, Any], Verdict]
PROMPT = (0,)


@functools.cache
def rule(name: str, **options: object) -> Verifier:
    """A verifier by its name; found once, since finding reads the whole folder."""
    cls = VERIFIERS.find(name)
    return cls(cls.Config(**options))


@functools.cache
def controls(vocab_size: int, *, seed: int = 0, temperature: float = 1.0) -> Controls:
    return build_controls(SamplingParams(temperature=temperature), vocab_size=vocab_size, seed=seed)


@dataclass(frozen=True)
class Case:
    """A target and a drafter over one vocabulary."""

    target: TableLM
    drafter: TableLM
    prompt: tuple[int, ...] = PROMPT

    @classmethod
    def of(cls, target: Table, drafter: Table, *, order: int = 16) -> Case:
        return cls(TableLM(target, order=order), TableLM(drafter, order=order))

    @property
    def vocab_size(self) -> int:
        return self.target.vocab_size

    def target_law(self, path: Sequence[int]) -> np.ndarray:
        return law_of(self.target, (*self.prompt, *path)).numpy()

    def draft_law(self, path: Sequence[int]) -> np.ndarray:
        return law_of(self.drafter, (*self.prompt, *path)).numpy()


def law_of(model: TableLM, context: Sequence[int]) -> Tensor:
    return torch.softmax(model.logits(context), dim=-1)


def node_laws(case: Case, tree: TokenTree, chosen: Controls | None = None) -> NodeLaws:
    """The target's laws at the root and all nodes, through the code that serves real models."""
    chosen = chosen or controls(case.vocab_size)
    paths = [[tree.tokens[n] for n in tree.path(node)] for node in range(ROOT, len(tree))]
    logits = torch.stack([case.target.logits((*case.prompt, *path)) for path in paths])
    return RememberedLaws(Laws(logits, [LawRows(History(case.prompt), chosen, paths)]))


class RememberedLaws(NodeLaws):
    """Probabilities computed once, for the many replays of one tree."""

    __slots__ = ("_probs",)

    def __init__(self, laws: Laws) -> None:
        super().__init__(laws, 0)
        self._probs: Tensor | None = None

    def probs(self, rows: Sequence[int] | slice = slice(None)) -> Tensor:
        if self._probs is None:
            self._probs = super().probs()
        return self._probs[rows]


# drafting ------------------------------------------------------------------------------------------------------


def child_tuples(law: np.ndarray, count: int, draw: Draw) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every way to draw this many children from a law, in order, with its probability."""
    tokens = range(len(law))
    ways = (
        itertools.permutations(tokens, count)
        if draw is Draw.WITHOUT_REPLACEMENT
        else itertools.product(tokens, repeat=count)
    )
    for way in ways:
        probability, left = 1.0, 1.0
        for token in way:
            probability *= law[token] / left
            if draw is Draw.WITHOUT_REPLACEMENT:
                left -= law[token]
        if probability > 0:
            yield way, float(probability)


def trees(case: Case, shape: Sequence[int], draw: Draw) -> Iterator[tuple[TokenTree, float]]:
    """Every tree of a shape with its probability; each node carries the law that its siblings were drawn from."""

    def grow(tree: TokenTree, frontier: list[int], level: int, probability: float) -> Iterator[tuple[TokenTree, float]]:
        if level == len(shape):
            yield tree, probability
            return
        options = [
            list(child_tuples(case.draft_law([tree.tokens[n] for n in tree.path(node)]), shape[level], draw))
            for node in frontier
        ]
        for choice in itertools.product(*options):
            grown = with_children(case, tree, frontier, [tokens for tokens, _ in choice])
            weight = probability * float(np.prod([p for _, p in choice]))
            yield from grow(grown, list(range(len(tree), len(grown))), level + 1, weight)

    yield from grow(TokenTree((), (), draw=draw, laws=torch.empty(0, case.vocab_size)), [ROOT], 0, 1.0)


def with_children(case: Case, tree: TokenTree, parents: Sequence[int], tokens: Sequence[Sequence[int]]) -> TokenTree:
    """The tree with new nodes, and for each the drafter's law at its parent."""
    rows = [] if tree.laws is None else list(tree.laws)
    new_tokens, new_parents = list(tree.tokens), list(tree.parents)
    for parent, siblings in zip(parents, tokens, strict=True):
        law = torch.from_numpy(case.draft_law([tree.tokens[n] for n in tree.path(parent)]))
        for token in siblings:
            new_tokens.append(token)
            new_parents.append(parent)
            rows.append(law)
    return TokenTree(tuple(new_tokens), tuple(new_parents), draw=tree.draw, laws=torch.stack(rows) if rows else None)


# verifying -----------------------------------------------------------------------------------------------------


class ScriptedChance(Chance):
    """Falls as its script says, then always the first way; keeps the probability of all that fell.

    A draw ends a verification: it is the bonus, and nothing is decided behind it. So it is not branched on; its law
    is kept, and the first token that it can give is returned.
    """

    def __init__(self, script: Sequence[int]) -> None:
        self.script = script
        self.trail: list[tuple[int, int]] = []
        self.probability = 1.0
        self.last_draw: list[tuple[int, float]] = []

    def _choose(self, weights: Sequence[float]) -> int:
        assert not self.last_draw, "a rule decides behind its draw"
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


class ChancePicks(NodeLaws):
    """Laws whose picks fall by chance, one for every path: the target's noise, where the drafter does not know it."""

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
        return torch.from_numpy(np.stack([self._case.target_law(path) for path in self._paths]))[rows]

    def __getitem__(self, row: int) -> int:
        path = self._paths[row]
        if path not in self._picks:
            self._picks[path] = self._chance.pick(torch.from_numpy(self._case.target_law(path)))
        return self._picks[path]


@dataclass(frozen=True)
class Written:
    """What a rule writes: the law of the next tokens, and how many drafted ones are among them on average."""

    law: np.ndarray
    accepted: float


def joint(case: Case, length: int, path: tuple[int, ...] = ()) -> np.ndarray:
    """The target's law of the next `length` tokens behind a path, shape (vocab,) * length."""
    if length == 0:
        return np.ones(())
    law = case.target_law(path)
    rows = [law[token] * joint(case, length - 1, (*path, token)) for token in range(case.vocab_size)]
    return np.stack(rows)


def written(case: Case, drafts: Drafts, verify: Verify, *, length: int) -> Written:
    """Adds up drafts and verdicts; what a round leaves open to `length` tokens the target writes itself.

    What it writes behind them is not looked at.
    """
    law = np.zeros((case.vocab_size,) * length)
    accepted = total = 0.0
    ends: dict[tuple[int, ...], float] = {}
    for tree, weight in drafts:
        laws = node_laws(case, tree)
        for verdict, probability in outcomes(functools.partial(verify, tree, laws)):
            tokens = (*(tree.tokens[node] for node in verdict.path), verdict.bonus)[:length]
            ends[tokens] = ends.get(tokens, 0.0) + weight * probability
            accepted += weight * probability * len(verdict.path)
            total += weight * probability
    assert abs(total - 1) < 1e-12, total
    for tokens, probability in ends.items():
        law[tokens] += probability * joint(case, length - len(tokens), tokens)
    return Written(law, accepted)


def variation(one: np.ndarray, other: np.ndarray) -> float:
    """Total variation distance of two laws."""
    return float(np.abs(one - other).sum() / 2)


# sampling ------------------------------------------------------------------------------------------------------


def sampled_tree(case: Case, shape: Sequence[int], draw: Draw, noise: Noise, context: Sequence[int]) -> TokenTree:
    """A tree as a drafter draws it behind a context, from a stream of its own: the largest of log law + noise."""

    def scores(path: tuple[int, ...], logits: Tensor, index: int) -> Tensor:
        return logits + noise.stream(index, *path).gumbel(len(path), torch.arange(case.vocab_size))

    return _grown(case, shape, draw, context, scores)


def shared_noise_tree(case: Case, chosen: Controls, shape: Sequence[int], draw: Draw) -> TokenTree:
    """A tree ranked by the request's own noise: without replacement its k best at a node, iid its best k times."""

    def scores(path: tuple[int, ...], logits: Tensor, index: int) -> Tensor:
        return logits + chosen.noise.gumbel(len(case.prompt) + len(path), torch.arange(case.vocab_size))

    return _grown(case, shape, draw, case.prompt, scores)


def _grown(
    case: Case,
    shape: Sequence[int],
    draw: Draw,
    context: Sequence[int],
    scores: Callable[[tuple[int, ...], Tensor, int], Tensor],
) -> TokenTree:
    tokens: list[int] = []
    parents: list[int] = []
    rows: list[Tensor] = []
    frontier: list[tuple[int, tuple[int, ...]]] = [(ROOT, ())]
    for count in shape:
        level = []
        for node, path in frontier:
            logits = case.drafter.logits((*context, *path))
            if draw is Draw.WITHOUT_REPLACEMENT:
                children = scores(path, logits, 0).topk(count).indices.tolist()
            else:
                children = [int(scores(path, logits, index).argmax()) for index in range(count)]
            for child in children:
                level.append((len(tokens), (*path, child)))
                tokens.append(child)
                parents.append(node)
                rows.append(torch.softmax(logits, dim=-1))
        frontier = level
    return TokenTree(tuple(tokens), tuple(parents), draw=draw, laws=torch.stack(rows))


def plain_text(case: Case, chosen: Controls, length: int, start: tuple[int, ...] = ()) -> tuple[int, ...]:
    """What plain decoding writes behind the prompt and `start`, up to `length` tokens with `start`."""
    tokens = start
    while len(tokens) < length:
        logits = case.target.logits((*case.prompt, *tokens))[None]
        rows = LawRows(History((*case.prompt, *tokens)), chosen, [()])
        tokens = (*tokens, Laws(logits, [rows]).picks()[0])
    return tokens


def chi_square(counts: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Pearson's statistic and its p-value, over rows of counts that each have their own total.

    Args:
        counts: shape (rows, classes).
        expected: laws, shape (rows, classes); classes of law 0 must not occur.
    """
    aims = expected * counts.sum(axis=1, keepdims=True)
    used = aims > 0
    assert counts[~used].sum() == 0
    statistic = float((((counts - aims) ** 2)[used] / aims[used]).sum())
    degrees = int(used.sum() - (counts.sum(axis=1) > 0).sum())
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return statistic, float(torch.special.gammaincc(half[0], half[1]))
