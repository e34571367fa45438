"""What figures compute from traces: replays of smaller trees, estimates over texts, notes below titles. No torch.

Under a rule that keeps the text, a smaller tree accepts those nodes of the accepted path that it contains. So one
recorded run gives the rounds of every tree that can be cut from the recorded ones: chains, k-ary trees, expansions, the
best nodes, and the trees of some of the merged drafters. Cut trees equal those that the drafter makes itself only where
it ranks children independently of the size of the tree; all model drafters here do.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from draftree.core.errors import ConfigurationError
from draftree.core.tree import EMPTY, ROOT, TokenTree, depths, follow
from draftree.engine.trace import Step, Trace
from draftree.lab.analysis.simulation import Script, is_by, scripts_of
from draftree.lab.figures.base import Material

BARS = "; bars: 95% over texts"
"""Note on the error bars of a drawing."""
DRAWS = 2000
LEVEL = 0.95
SEED = 1


@dataclass(frozen=True, slots=True)
class Estimate:
    """A ratio of sums over texts (NaN over 0), with the 95% percentile interval of the bootstrap over texts."""

    value: float
    low: float
    high: float

    def row(self, name: str) -> dict[str, float]:
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Return the sum of the numerators by the sum of the denominators, one of each per text.

    Texts are resampled with replacement, because tokens of one text are not independent. With one text the interval
    is the value itself, which says nothing about other texts. Source: Efron and Tibshirani, 1993, percentile interval.
    """
    above = np.asarray(numerators, float)
    below = np.asarray(denominators, float)
    if below.sum() == 0:
        return Estimate(float("nan"), float("nan"), float("nan"))
    chosen = np.random.default_rng(SEED).integers(0, len(above), (DRAWS, len(above)))
    sums = below[chosen].sum(1)
    drawn = above[chosen].sum(1)[sums > 0] / sums[sums > 0]
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(float(above.sum() / below.sum()), float(low), float(high))


def mean(values: Sequence[float]) -> Estimate:
    return ratio(values, [1.0] * len(values))


Cut = Callable[["Position"], Collection[int]]
"""Chooses the nodes of a position's tree that are drafted."""


@dataclass(frozen=True, slots=True)
class Position:
    """A place in a text.

    Attributes:
        ranks: place of each node among its siblings in draft order, from 1.
        path: nodes of the text that the tree contains, from the root down.
    """

    tree: TokenTree
    levels: tuple[int, ...]
    ranks: tuple[int, ...]
    path: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Text:
    """One recorded text: a position for each of its tokens, and the text of the tokens."""

    name: str
    positions: tuple[Position, ...]
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Replayed:
    """Counts of one text: rounds, written tokens, drafted nodes, and accepted nodes of every round."""

    rounds: int
    tokens: int
    nodes: int
    accepted: tuple[int, ...]


_KEPT: dict[int, tuple[Trace, tuple[Text, ...]]] = {}
"""Texts of the last traces by the identity of the trace, which is kept so that the identity stays its own."""
MAX_KEPT = 8


def texts_of(trace: Trace) -> tuple[Text, ...]:
    """Return the texts of a trace of the planner `watch`, in order."""
    if trace.header.verify.split(",")[0] not in ("coupled", "match"):
        raise ConfigurationError(
            f"a trace verified by '{trace.header.verify}' cannot be replayed: record it with coupled or match"
        )
    if id(trace) not in _KEPT:
        if len(_KEPT) >= MAX_KEPT:
            _KEPT.clear()
        _KEPT[id(trace)] = trace, tuple(map(_text, scripts_of(trace)))
    return _KEPT[id(trace)][1]


def _text(script: Script) -> Text:
    positions = []
    while not script.is_done:
        step = script.steps.get(script.place)
        if step is None:
            raise ConfigurationError(
                f"'{script.name}' has no draft at position {script.place}: record with --plan watch"
            )
        tree = step.tree if len(step.tree) else EMPTY
        children = [itertools.count(1) for _ in range(len(tree) + 1)]
        ranks = tuple([next(children[parent + 1]) for parent in tree.parents])
        positions.append(Position(tree, tuple(depths(tree.parents)), ranks, tuple(follow(tree, script.coming()[:-1]))))
        script.place += 1
    return Text(script.name, tuple(positions), tuple(script.text))


def watched(material: Material) -> tuple[Trace, tuple[Text, ...]]:
    """Return the trace of the run `watch`, and its texts."""
    trace = material.one("watch")
    return trace, texts_of(trace)


def replay(text: Text, cut: Cut) -> Replayed:
    """Return the counts of a text whose rounds draft what `cut` chooses."""
    at = 0
    nodes = 0
    accepted = list[int]()
    while at < len(text.positions):
        position = text.positions[at]
        kept = set(cut(position))
        count = 0
        while count < len(position.path) and position.path[count] in kept:
            count += 1
        count = min(count, len(text.positions) - at - 1)
        nodes += len(kept)
        accepted.append(count)
        at += count + 1
    return Replayed(len(accepted), len(text.positions), nodes, tuple(accepted))


def expansion(*widths: int) -> Cut:
    """Return a cut to the first children of each node, as many as the width of their level."""

    def cut(position: Position) -> Collection[int]:
        kept = {ROOT}
        for node, (parent, level, rank) in enumerate(
            zip(position.tree.parents, position.levels, position.ranks, strict=True)
        ):
            if parent in kept and level <= len(widths) and rank <= widths[level - 1]:
                kept.add(node)
        return kept - {ROOT}

    return cut


def chain(length: int) -> Cut:
    return expansion(*[1] * length)


def k_ary(width: int, depth: int) -> Cut:
    return expansion(*[width] * depth)


def best_first(num_nodes: int) -> Cut:
    """Return a cut to the nodes with the best scores; trees without scores are cut in their own order."""

    def cut(position: Position) -> Collection[int]:
        scores = position.tree.scores or [-float(node) for node in range(len(position.tree))]
        kept = {ROOT}
        for node in sorted(range(len(position.tree)), key=lambda node: (-scores[node], node)):
            if len(kept) <= num_nodes and position.tree.parents[node] in kept:
                kept.add(node)
        return kept - {ROOT}

    return cut


def by_drafters(names: Sequence[str] | None, depth: int) -> Cut:
    """Return a cut to the nodes that one of these drafters proposed (None: any), down to a depth."""

    def cut(position: Position) -> Collection[int]:
        sources = position.tree.sources if names is not None else ()
        return [
            node
            for node, level in enumerate(position.levels)
            if level <= depth and (not sources or any(is_by(sources[node], name) for name in names or ()))
        ]

    return cut


def measured_on(trace: Trace, *, what: str) -> str:
    """Return a sentence: what was measured, on which model, drafter, texts and processor."""
    header, about = trace.header, trace.header.about
    by_sequence = steps_by_sequence(trace)
    texts = len(by_sequence)
    tokens = sum(step.num_written for steps in by_sequence.values() for step in steps)
    facts = [f"{what}: {header.model}", f"drafter {header.draft}", f"{texts} texts, {tokens} tokens"]
    if "temperature" in about:
        facts.append(f"temperature {about['temperature']:g}")
    facts += [str(about[name]) for name in ("dtype", "cpu") if about.get(name)]
    if about.get("threads"):
        facts.append(f"{about['threads']} thread{'s' if about['threads'] > 1 else ''}")
    return ", ".join(facts)


def tokens_per_pass(runs: Sequence[Replayed]) -> Estimate:
    return ratio([run.tokens for run in runs], [run.rounds for run in runs])


def worst_text(texts: Sequence[Text], cut: Cut, name: str, *, text_of: Callable[[int], str]) -> str:
    """Return a sentence on the text with the fewest tokens per pass under a cut."""
    runs = [replay(text, cut) for text in texts]
    least = min(range(len(runs)), key=lambda number: runs[number].tokens / runs[number].rounds)
    words = " ".join("".join(text_of(token) for token in texts[least].tokens[:24]).split())[:48]
    value = runs[least].tokens / runs[least].rounds
    return f"{name} writes only {value:.2f} tokens per pass in text {least + 1} (“{words}…”)"


def decode_rounds(trace: Trace) -> list[tuple[str, dict[str, float], int]]:
    """Return sequence, seconds by phase and written tokens of every round of one sequence that does not prefill.

    Rounds of several sequences are divided evenly among them.
    """
    rounds = []
    met = set[str]()
    for traced in trace.rounds:
        names = {step.sequence for step in traced.steps}
        if names <= met:
            share = {phase: seconds / len(traced.steps) for phase, seconds in traced.seconds.items()}
            rounds += [(step.sequence, share, step.num_written) for step in traced.steps]
        met |= names
    return rounds


def per_text_seconds(trace: Trace) -> tuple[list[float], list[float]]:
    """Return decode seconds and tokens of every text, first rounds excluded."""
    seconds = defaultdict[str, float](float)
    tokens = defaultdict[str, float](float)
    for name, phases, written in decode_rounds(trace):
        seconds[name] += phases["total"]
        tokens[name] += written
    return list(seconds.values()), list(tokens.values())


@dataclass(frozen=True, slots=True)
class Guess:
    """A drafted node whose parent is on the text: its level, rank, confidence, and whether it is on the text.

    The confidence is the drafter's probability of the node given its parent; NaN if trees have no scores.
    """

    level: int
    rank: int
    confidence: float
    is_accepted: bool


def guesses(position: Position) -> Iterator[Guess]:
    """Yield the nodes whose parents are on the text."""
    on_text = {ROOT, *position.path}
    tree = position.tree
    for node, parent in enumerate(tree.parents):
        if parent not in on_text:
            continue
        confidence = math.nan
        if tree.scores:
            before = 0.0 if parent == ROOT else tree.scores[parent]
            confidence = math.exp(min(0.0, tree.scores[node] - before))
        yield Guess(position.levels[node], position.ranks[node], confidence, node in position.path)


def acceptances(texts: Sequence[Text]) -> list[tuple[int, int]]:
    """Return for every text how often the first drafted token was the next one, and the number of its positions.

    The last position of a text is left out: nothing that is drafted there can be accepted.
    """
    places = [text.positions[:-1] for text in texts]
    return [(sum(bool(p.path) and p.ranks[p.path[0]] == 1 for p in each), len(each)) for each in places]


def acceptance(texts: Sequence[Text]) -> Estimate:
    """Return the acceptance α of the first drafted token over all positions."""
    hits, counts = zip(*acceptances(texts), strict=True)
    return ratio(hits, counts)


def deepest(texts: Sequence[Text]) -> int:
    return max((level for text in texts for p in text.positions for level in p.levels), default=0)


def widest(texts: Sequence[Text]) -> int:
    """Return the largest number of children of a root."""
    return max((p.tree.parents.count(ROOT) for text in texts for p in text.positions), default=0)


def steps_by_sequence(trace: Trace) -> dict[str, list[Step]]:
    """Return the rounds of each text, in order."""
    steps: dict[str, list[Step]] = defaultdict(list)
    for traced in trace.rounds:
        for step in traced.steps:
            steps[step.sequence].append(step)
    return steps


def tokens_per_round(trace: Trace) -> Estimate:
    texts = steps_by_sequence(trace).values()
    return ratio([sum(step.num_written for step in steps) for steps in texts], [len(steps) for steps in texts])
