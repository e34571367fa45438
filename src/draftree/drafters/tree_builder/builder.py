"""Trees grown level by level from the distributions of a model: shapes, the stepper interface, and the builder.

All frontier nodes of all sequences are in one pass. Candidates are ranked with the request's noise if the verifier
allows it; drawn children use random streams of their round and node.

Shapes:

* `chain`: one child per node.
* `1-1-3-1`: at step i every node gets its k_i best children (the expansion of SpecInfer, arXiv 2305.09781).
* `best-n`: the n nodes of highest survival, the product of the drafter's probabilities along the path, within the
  maximum number of levels (as in OPT-Tree, arXiv 2406.17276). `best-n-m` extends at most the m best nodes of a level
  (as in EAGLE-2, arXiv 2406.16858): passes of the drafter are shorter, and few of the other nodes have kept children.
* `iid-…`, `wor-…`: an expansion with children drawn independently or without replacement, for verifiers that need draft
  distributions.
"""

from __future__ import annotations

import heapq
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from draftree.core.errors import ConfigurationError
from draftree.core.node_map import NodeMap
from draftree.core.noise import Noise
from draftree.core.tree import ROOT, Draw, TokenTree
from draftree.core.types import MAX_NODES, Budget, Verdict
from draftree.drafters.base import DraftContext, Drafter, DraftTraits, Observation, SequenceView
from draftree.drafters.learning.corrections import HeadCorrections
from draftree.drafters.tree_builder.corrected_logits import LogitCorrector, Stepped
from draftree.heads.calibration import Calibration, with_confidence
from draftree.heads.vocabulary import DraftVocabulary
from draftree.sampling.distributions import DistributionRows, Distributions
from draftree.sampling.logits import Logits, argmax, leading, log_total
from draftree.sampling.tree_search import UNFILTERED, FoundTree, Kept, TreeSearch, TreeWidths

CHAIN_DEPTH = 5
BEST_DEPTH = 6
EXAMPLES = "chain, 1-1-3-1-1, best-32, best-64-8, iid-2-2-1 or wor-2-2-1"


@dataclass(frozen=True, slots=True)
class Shape:
    """Number of children of nodes by level.

    Attributes:
        widths: number of children of a node by level; its length is the depth.
        draws: supported draws; the verifier chooses one.
        num_best: number of best nodes to keep; None keeps all.
        num_extended: maximum number of nodes of a level that get children; None for all.
    """

    widths: tuple[int, ...]
    draws: frozenset[Draw]
    num_best: int | None = None
    num_extended: int | None = None

    @property
    def depth(self) -> int:
        """Maximum number of levels."""
        return len(self.widths)

    @property
    def is_chain(self) -> bool:
        """Whether every node has at most one child."""
        return max(self.widths) == 1

    @property
    def num_nodes(self) -> int:
        total = sum(accumulate(self.widths, operator.mul))
        return total if self.num_best is None else min(total, self.num_best)

    @property
    def num_fed(self) -> int:
        """Maximum number of nodes that the model reads while the tree grows: all levels except the last."""
        total, level = 0, 1
        for width in self.widths[:-1]:
            level = level * width if self.num_best is None else min(level * width, self.num_extended or self.num_best)
            total += level
        return total


def parse_shape(text: str, k: int | None) -> Shape:
    """Parse the options `tree` and `k` of a draft spec; k limits the levels."""
    if k is not None and not 1 <= k <= MAX_NODES:
        raise ConfigurationError(f"option k is {k}: it must be from 1 to {MAX_NODES}, or drafter none be used")
    shape = _parsed(text, k)
    if shape.num_nodes > MAX_NODES:
        raise ConfigurationError(
            f"tree shape '{text}' has {shape.num_nodes} nodes: {MAX_NODES} fit in a pass, choose less"
        )
    return shape


def _parsed(text: str, k: int | None) -> Shape:
    if text == "chain":
        return Shape((1,) * (k or CHAIN_DEPTH), frozenset({Draw.FREE, Draw.IID}))
    head, _, rest = text.partition("-")
    if head == "best":
        numbers = rest.split("-")
        count, *extended = _numbers(text, numbers, min(2, len(numbers)))
        return Shape((count,) * (k or BEST_DEPTH), frozenset({Draw.FREE}), count, extended[0] if extended else None)
    draws = {"iid": Draw.IID, "wor": Draw.WITHOUT_REPLACEMENT}
    widths = _numbers(text, (rest if head in draws else text).split("-"), None)[:k]
    return Shape(widths, frozenset({draws.get(head, Draw.FREE)}))


def _numbers(text: str, parts: list[str], count: int | None) -> tuple[int, ...]:
    if (count is not None and len(parts) != count) or not all(
        p.isdecimal() and 1 <= int(p) <= MAX_NODES for p in parts
    ):
        raise ConfigurationError(
            f"tree shape '{text}' is not known: write {EXAMPLES}, with numbers from 1 to {MAX_NODES}"
        )
    return tuple(int(part) for part in parts)


class TreeOptions:
    """Base of configurations with `k`, the maximum number of levels, and `tree`, the shape."""

    __slots__ = ()
    k: int | None
    tree: str

    def __post_init__(self) -> None:
        parse_shape(self.tree, self.k)

    @property
    def shape(self) -> Shape:
        """Shape given by `tree` and `k`."""
        return parse_shape(self.tree, self.k)


IntRows = Sequence[Sequence[int]]
"""Nodes or tokens of each sequence of a batch."""
StateT = TypeVar("StateT", bound=Stepped)


class Stepper(ABC, Generic[StateT]):
    """Interface of a model that reads texts and trees after them."""

    max_length: int
    """Maximum number of tokens of a text that it keeps, tree included."""
    max_depth: int
    """Number of levels that always fit."""
    answered: Tensor | None = None
    """States from which the last logits were computed, shape (rows, hidden), of steppers whose logits are corrected."""

    @abstractmethod
    def reserve(self, num_sequences: int, length: int) -> None:
        """Make room for `num_sequences` sequences of `length` tokens, tentative ones included."""

    @abstractmethod
    def open(self, view: SequenceView) -> StateT:
        """Return the state of a new sequence."""

    @abstractmethod
    def close(self, state: StateT) -> None:
        """Free the resources of a sequence."""

    def fork(self, state: StateT, view: SequenceView) -> StateT:
        """Return the state of a new sequence with the common prefix of an open one."""
        return self.open(view)

    def detach(self, state: StateT) -> StateT | None:
        """Return the state to keep of a finished sequence; None if it was closed."""
        self.close(state)
        return None

    def attach(self, state: StateT, view: SequenceView) -> StateT:
        """Do as `fork`, and consume the detached state."""
        forked = self.fork(state, view)
        self.close(state)
        return forked

    def check_integrity(self, states: Sequence[StateT]) -> None:
        """Raise AssertionError if the slots of all open states contradict them."""

    def read(self, states: Sequence[StateT], counts: Sequence[int]) -> None:
        """Prefill prompts along with the target, which has just read `counts` tokens of each."""

    def is_ready(self, state: StateT) -> bool:
        """Return whether few enough tokens are unread for a tree to pay off."""
        return True

    @abstractmethod
    def catch_up(self, states: Sequence[StateT], ahead: Sequence[int]) -> Logits:
        """Read the unread tokens of every sequence; return the logits after them, one row per sequence.

        Args:
            ahead: for each the maximum number of positions of a tree after its last token.
        """

    @abstractmethod
    def feed(self, states: Sequence[StateT], tokens: IntRows, parents: IntRows) -> Logits:
        """Run a pass over new nodes of trees; return their logits, one row per node.

        Args:
            tokens: for each the new nodes' tokens, in the tree's vocabulary.
            parents: for each their parents, counted as they were fed; or -1 for the text's last token.
        """

    def trees(
        self, states: Sequence[StateT], ahead: Sequence[int], shape: TreeWidths, searches: Sequence[TreeSearch]
    ) -> list[FoundTree] | None:
        """Do as `catch_up`, and grow a tree after every text, with the choices of `catch_up` and `feed`.

        Args:
            ahead: as in `catch_up`.
            shape: shape of the trees.
            searches: how the nodes of each tree are chosen.

        Returns:
            The trees, of which a node whose share is NaN or minus infinity is left out; None if they have to grow level
            by level.
        """
        return None

    def confidence(self) -> Sequence[float] | None:
        """Return own estimates for the rows of the last logits: the probability that the first child is the pick.

        Returns:
            None for steppers without such estimates.
        """
        return None

    @abstractmethod
    def keep(self, states: Sequence[StateT], paths: IntRows) -> None:
        """Keep the accepted nodes of those that were read; histories already contain the written tokens.

        Args:
            paths: for each the accepted nodes, in order from the root down.
        """


@dataclass(slots=True)
class GrowingTree:
    """Growing tree of one sequence. Scores are cumulative log-probabilities, the drafter's estimate of survival."""

    state: Stepped
    budget: Budget
    noise: Noise
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    distributions: list[Tensor] = field(default_factory=list)
    ways: list[tuple[int, ...]] = field(default_factory=lambda: [()])
    """Tokens on the path from the root to each node, for the root and every node."""
    frontier: list[int] = field(default_factory=lambda: [ROOT])
    unsure: set[int] = field(default_factory=set)
    leaders: list[float] = field(default_factory=list)
    """Heap of the highest scores so far, as many as the budget has nodes."""

    def add(
        self, parent: int, token: int, score: float, *, confidence: float = 1.0, distribution: Tensor | None = None
    ) -> None:
        """Add a node with the logarithm of the probability that it is picked, given that its parent is."""
        if confidence < self.budget.min_confidence:
            # kept, because dropping a draw would bias the distribution, but without children
            self.unsure.add(len(self.tokens))
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(score + self.score_of(parent))
        self.ways.append((*self.ways[parent + 1], token))
        if distribution is not None:
            self.distributions.append(distribution)
        if len(self.leaders) < self.budget.num_nodes:
            heapq.heappush(self.leaders, self.scores[-1])
        else:
            heapq.heappushpop(self.leaders, self.scores[-1])

    @property
    def is_forbidden(self) -> bool:
        """Whether a grammar forbids all children of the root."""
        guide, history = self.state.view.controls.guide, self.state.view.history
        firsts = [[token] for token, parent in zip(self.tokens, self.parents, strict=True) if parent == ROOT]
        return guide is not None and all(after is None for after in guide.allowed(history, firsts))

    def score_of(self, node: int) -> float:
        """Return the cumulative score; 0 for the root."""
        return 0.0 if node == ROOT else self.scores[node]

    def may_lead(self, score: float) -> bool:
        """Return whether a new node with this score would be among the best; older ones win ties."""
        return len(self.leaders) < self.budget.num_nodes or score > self.leaders[0]

    def best(self, count: int) -> list[int]:
        """Return the nodes with the highest scores, which include their parents."""
        order = sorted(range(len(self.tokens)), key=lambda node: (-self.scores[node], node))
        return sorted(order[:count])


class TreeBuilder:
    """Builds trees with a stepper, such as a draft model, with one batched pass per level.

    Args:
        stepper: reads texts and trees; its logits have the target's vocabulary.
        draw: how children are drawn, one of the shape's draws.
        shares_noise: whether to rank with the request's noise; otherwise with a stream of the round.
        place: index of the drafter among merged ones, whose draws must be independent.
        corrector: corrects logits of the stepper, and learns from verified tokens; None to leave them as they are.
        calibration: map from scores under the request's noise to probabilities, which are not used for other draws;
            None for the stepper's own estimates, or for the scores as they are if it has none.
    """

    def __init__(
        self,
        stepper: Stepper[Any],
        *,
        shape: Shape,
        draw: Draw,
        shares_noise: bool,
        place: int = 0,
        corrector: LogitCorrector | None = None,
        calibration: Calibration | None = None,
        sharpness: float = 1.0,
    ) -> None:
        self.stepper = stepper
        self._shape = shape
        self._draw = draw
        self._salts = (place,) if place else ()
        self._shares_noise = shares_noise and draw is Draw.FREE
        self._corrector = corrector
        # without the request's noise, scores are those of another choice
        self._calibration = calibration if self._shares_noise else None
        self._sharpness = sharpness

    def reserve(self, num_sequences: int, length: int) -> None:
        """Make room in the stepper's slots, at most for its context length."""
        readable = min(length, self.stepper.max_length)
        self.stepper.reserve(num_sequences, readable + self._shape.num_fed)

    def observe(self, states: Sequence[Stepped], verdicts: Sequence[Verdict]) -> None:
        """Keep the accepted nodes of those that were read."""
        paths = [verdict.path for verdict in verdicts]
        if self._corrector is not None:
            self._corrector.learn(states, paths)
        self.stepper.keep(states, paths)

    def grow(self, states: Sequence[Stepped], budgets: Sequence[Budget]) -> list[TokenTree]:
        """Return a tree for every sequence, within its budget and the shape."""
        depth = min(self._shape.depth, self.stepper.max_depth)
        growing = [
            GrowingTree(state, budget.within(self._shape.num_nodes, depth), self._noise(state))
            for state, budget in zip(states, budgets, strict=True)
        ]
        active = [g for g in growing if g.budget.num_nodes and g.budget.depth and self.stepper.is_ready(g.state)]
        trees = None
        if active and self._is_one_call(active):
            widths = TreeWidths(self._shape.widths, self._shape.num_best is not None)
            ahead = [g.budget.depth for g in active]
            trees = self.stepper.trees([g.state for g in active], ahead, widths, [self._search_of(g) for g in active])
        if trees is not None:
            for g, tree in zip(active, trees, strict=True):
                g.tokens, g.parents, g.scores = tree.tokens, tree.parents, tree.scores
                g.state.fed = {node: place for node, place in enumerate(tree.read) if place >= 0}
            active = [g for g in active if g.is_forbidden]
            for g in active:
                g.tokens, g.parents, g.scores, g.state.fed = [], [], [], {}
        with torch.inference_mode():
            for level, width in enumerate(self._shape.widths):
                if not (active := [g for g in active if g.frontier and level < g.budget.depth]):
                    break
                self._choose(active, self._feed(active, level), width)
        return [self._tree(g) for g in growing]

    def _noise(self, state: Stepped) -> Noise:
        noise = state.view.controls.noise
        return noise if self._shares_noise else noise.stream("draft", len(state.view.history), *self._salts)

    def _is_one_call(self, active: Sequence[GrowingTree]) -> bool:
        """Return whether the stepper may grow all levels itself: children depend on no token before them.

        A grammar is ignored then, and what it forbids is cut later; where that is all, the levels grow again with it.
        """
        return (
            self._draw is Draw.FREE
            and self._shape.num_extended is None
            and self._corrector is None
            and (self._calibration is not None or not self._asks_confidence(active))
            and all(len(c.processors) == (c.guide is not None) for c in (g.state.view.controls for g in active))
        )

    def _search_of(self, g: GrowingTree) -> TreeSearch:
        """Return how the nodes of a tree are chosen."""
        start, budget = len(g.state.view.history), g.budget
        temperature = g.state.view.controls.sharpened(self._sharpness).temperature
        levels = range(min(budget.depth, budget.num_nodes))
        sampling = g.state.view.controls.params.sampling
        kept = Kept(sampling.min_p, sampling.top_k, sampling.top_p) if g.state.view.controls.filters else UNFILTERED
        noise = [(g.noise.keys(start + level), temperature) if temperature else None for level in levels]
        if self._calibration is None:
            return TreeSearch(budget.num_nodes, noise, (), 0.0, -math.inf, kept)
        maps = [self._calibration.map_of(level, is_sampled=temperature > 0) for level in levels]
        least_score = math.log(budget.min_survival) if budget.min_survival else -math.inf
        return TreeSearch(budget.num_nodes, noise, maps, budget.min_confidence, least_score, kept)

    def _feed(self, active: Sequence[GrowingTree], level: int) -> Logits:
        """Run a pass over all frontiers; the first one also reads the unread tokens of the texts."""
        states = [g.state for g in active]
        corrector = self._corrector
        if level == 0:
            logits = self.stepper.catch_up(states, [g.budget.depth for g in active])
            if corrector is not None:
                assert self.stepper.answered is not None, "logits have states"
                corrector.begin(states, logits, self.stepper.answered)
            return logits
        parents = []
        for g in active:
            fed = g.state.fed
            parents.append([fed[g.parents[n]] if g.parents[n] != ROOT else ROOT for n in g.frontier])
            for node in g.frontier:
                fed[node] = len(fed)
        tokens = [[g.tokens[n] for n in g.frontier] for g in active]
        logits = self.stepper.feed(states, tokens, parents)
        if corrector is not None:
            assert self.stepper.answered is not None, "logits have states"
            corrector.note(states, tokens, logits, self.stepper.answered)
        return logits

    def _choose(self, active: Sequence[GrowingTree], logits: Logits, width: int) -> None:
        """Add children of every frontier node; rows of logits are in the order of the frontiers."""
        rows = [
            DistributionRows(
                g.state.view.history,
                g.state.view.controls.sharpened(self._sharpness),
                [g.ways[n + 1] for n in g.frontier],
            )
            for g in active
        ]
        num_best = self._shape.num_best
        has_draws = self._draw in (Draw.IID, Draw.WITHOUT_REPLACEMENT)
        with Distributions(logits, rows, overwrites=True) as distributions:
            tokens, values = self._candidates(active, distributions, width)
            values, confidence = self._judged(active, distributions, tokens, values)
            for index, g in enumerate(active):
                place = distributions.span(index).start
                first = len(g.tokens)
                draws = distributions.of(index).probs() if has_draws else None
                for row, node in enumerate(g.frontier):
                    candidates = zip(tokens[place + row], values[place + row], confidence[place + row], strict=True)
                    for token, value, sure in candidates:
                        # children are cut by number, never by value: a draw that is inspected must count
                        if num_best is None and len(g.tokens) == g.budget.num_nodes:
                            break
                        if num_best is not None and not g.may_lead(value + g.score_of(node)):
                            break
                        if value > float("-inf"):  # nor NaN: such scores yield no children
                            distribution = None if draws is None else draws[row]
                            g.add(node, token, value, confidence=sure, distribution=distribution)
                self._advance(g, first)

    def _candidates(
        self, active: Sequence[GrowingTree], distributions: Distributions, width: int
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Return tokens and log-probabilities of the children, `width` for each row."""
        width = min(width, distributions.width)
        if self._draw is Draw.FREE:
            return distributions.ranked([g.noise for g in active], width, in_place=not self._asks_confidence(active))
        streams = [g.noise.stream(node) for g in active for node in g.frontier]
        if self._draw is Draw.WITHOUT_REPLACEMENT:
            chosen, _ = leading(distributions.perturbed_rows(streams), width)
        else:
            draws = [argmax(distributions.perturbed_rows([s.stream(child) for s in streams])) for child in range(width)]
            chosen = torch.tensor(draws, device=distributions.logits.device).T
        return chosen.tolist(), _log_probs(distributions.logits, chosen).tolist()

    def _judged(
        self,
        active: Sequence[GrowingTree],
        distributions: Distributions,
        tokens: list[list[int]],
        values: list[list[float]],
    ) -> tuple[list[list[float]], list[list[float]]]:
        """Return log-probabilities that children are picked after their parents, and the drafter's confidence in them.

        Without a map or estimates of the stepper these are `values`, and probabilities if a budget has a minimum.
        """
        if self._calibration is not None:
            places = [(g, len(g.ways[node + 1])) for g in active for node in g.frontier]
            mapped = [
                self._calibration.log_probabilities(row, level, is_sampled=g.state.view.controls.temperature > 0)
                for (g, level), row in zip(places, values, strict=True)
            ]
        elif self._shares_noise and (sure := self.stepper.confidence()) is not None:
            mapped = [with_confidence(row, confidences) for row, confidences in zip(values, sure, strict=True)]
        elif self._asks_confidence(active):
            chosen = torch.tensor(tokens, device=distributions.logits.device)
            return values, _log_probs(distributions.logits, chosen).exp().tolist()
        else:
            return values, [[1.0] * len(row) for row in tokens]
        return mapped, [[math.exp(value) for value in row] for row in mapped]

    @staticmethod
    def _asks_confidence(active: Sequence[GrowingTree]) -> bool:
        return any(g.budget.min_confidence for g in active)

    def _advance(self, g: GrowingTree, first: int) -> None:
        """Make the new nodes that can have children the next frontier."""
        new: Sequence[int] = range(first, len(g.tokens))
        if g.budget.min_survival and self._calibration is not None:
            g.unsure.update(node for node in new if g.scores[node] < math.log(g.budget.min_survival))
        if self._shape.num_best is not None:
            if len(g.tokens) > g.budget.num_nodes:
                kept = set(g.best(g.budget.num_nodes))
                new = [node for node in new if node in kept]
        elif len(g.tokens) == g.budget.num_nodes:
            new = ()
        g.frontier = [node for node in new if node not in g.unsure]
        most = self._shape.num_extended
        if most is not None and len(g.frontier) > most:
            g.frontier = sorted(sorted(g.frontier, key=lambda node: (-g.scores[node], node))[:most])

    def _tree(self, g: GrowingTree) -> TokenTree:
        distributions = torch.stack(g.distributions) if g.distributions else None
        tree = TokenTree(tuple(g.tokens), tuple(g.parents), tuple(g.scores), self._draw, distributions)
        if self._shape.num_best is None or len(tree) <= g.budget.num_nodes:
            return tree
        nodes = NodeMap.keeping(tree.parents, g.best(g.budget.num_nodes))
        g.state.fed = nodes.carry(g.state.fed)
        return nodes.cut(tree)


def _log_probs(logits: Tensor, chosen: Tensor) -> Tensor:
    """Return log-probabilities of the chosen columns only: a whole row costs far more than its sum."""
    return logits.gather(-1, chosen) - log_total(logits)


class TreeBuildingDrafter(Drafter[Any]):
    """Drafter that grows trees of the shape in its configuration.

    A method sets `_builder`, such as by `_build`, and `_note` if there is a message.
    """

    _builder: TreeBuilder
    _corrections: HeadCorrections | None = None
    """What is learned from verified tokens."""

    def _build(
        self,
        stepper: Stepper[Any],
        shape: Shape,
        context: DraftContext,
        vocabulary: DraftVocabulary | None = None,
        **options: Any,
    ) -> None:
        """Set the builder, with corrections of logits of this vocabulary if they are learned."""
        corrector = None
        if self._corrections is not None:
            assert vocabulary is not None, "what learns has a vocabulary"
            corrector = LogitCorrector(self._corrections, vocabulary)
        self._builder = TreeBuilder(
            stepper,
            shape=shape,
            draw=context.draw,
            shares_noise=context.shares_noise,
            place=context.place,
            corrector=corrector,
            **options,
        )

    @classmethod
    def describe(cls, config: Any) -> DraftTraits:
        shape: Shape = config.shape
        return DraftTraits(
            draws=shape.draws,
            depth=shape.depth,
            nodes=shape.num_nodes,
            branches=not shape.is_chain,
            gives_confidence=True,
            runs_model=True,
        )

    def reserve(self, num_sequences: int, length: int) -> None:
        self._builder.reserve(num_sequences, length)

    def open(self, sequence: SequenceView) -> Any:
        return self._builder.stepper.open(sequence)

    def draft(self, states: Sequence[Any], budgets: Sequence[Budget]) -> list[TokenTree]:
        return self._builder.grow(states, budgets)

    def observe(self, observations: Sequence[Observation[Any]]) -> None:
        judged = [(o.state, o.verdict) for o in observations if o.verdict is not None]
        if judged:
            self._builder.observe([state for state, _ in judged], [verdict for _, verdict in judged])
        chunks = [o for o in observations if o.verdict is None]
        if chunks:
            with torch.inference_mode():
                self._builder.stepper.read([o.state for o in chunks], [o.tokens_read for o in chunks])

    def fork(self, state: Any, sequence: SequenceView, length: int) -> Any:
        return self._builder.stepper.fork(state, sequence)

    def detach(self, state: Any, length: int) -> Any:
        return self._builder.stepper.detach(state)

    def attach(self, state: Any, sequence: SequenceView, length: int) -> Any:
        return self._builder.stepper.attach(state, sequence)

    def forget(self) -> None:
        if self._corrections is not None:
            self._corrections.forget()

    def check_integrity(self, states: Sequence[Any]) -> None:
        self._builder.stepper.check_integrity(states)

    def close(self, state: Any) -> None:
        """Free the slot unless it is the target's."""
        self._builder.stepper.close(state)
