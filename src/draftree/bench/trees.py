"""What trees cost: to score in one pass and leaf by leaf, and to draft level by level.

Scoring is compared with a plain pass over as many tokens, and with sequence-based decoding, in which every leaf is a
sequence of its own. Drafting is compared with the passes in it: what is left is not the model's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import final

from draftree.bench.records import TreeRecord
from draftree.bench.runner import collector_off
from draftree.bench.timing import WARM_UP_PASSES, pass_seconds, slot_behind, some_tokens
from draftree.core.errors import ConfigurationError
from draftree.core.tree import ROOT, Draw
from draftree.core.types import Budget, Verdict
from draftree.drafters.base import SequenceView
from draftree.drafters.growing.shapes import Shape, parse_shape
from draftree.drafters.growing.tree_growth import Growth
from draftree.models.base import Edit, LanguageModel, Pass, PassResult, Slot
from draftree.models.sequential import SequentialModel
from draftree.sampling.controls import build_controls
from draftree.sampling.history import History
from draftree.sampling.params import SamplingParams

TEMPERATURES = (0.0, 0.8)
DRAWS = (Draw.FREE, Draw.IID, Draw.WITHOUT_REPLACEMENT)


def scored_shape(text: str) -> Shape:
    """The shape of a tree that can be scored without a drafter.

    Raises:
        ConfigurationError: no shape, or one whose nodes only a drafter can place.
    """
    shape = parse_shape(text, None)
    if shape.num_best is not None:
        raise ConfigurationError(
            f"tree '{text}' was asked for, but where its nodes stand depends on a drafter: name levels, such as 2-2-1"
        )
    return shape


def parents_of(shape: Shape) -> list[int]:
    """Parents of the full tree of a shape, level by level."""
    parents: list[int] = []
    level = [ROOT]
    for width in shape.widths:
        first = len(parents)
        parents.extend(node for node in level for _ in range(width))
        level = list(range(first, len(parents)))
    return parents


def time_scoring(model: LanguageModel, shapes: Sequence[str], *, prefix: int, repeats: int) -> list[TreeRecord]:
    """Time every shape as a tree, as a chain of as many nodes, and leaf by leaf, all in turns.

    Args:
        model: scores trees.
        shapes: levels, as in a draft spec.
        prefix: committed tokens before each tree.
        repeats: passes of each kind that count.
    """
    ways = {
        "tree": model,
        "chain": model,
        "batched": SequentialModel(model),
        "one by one": SequentialModel(model, batched=False),
    }
    trees = {text: parents_of(scored_shape(text)) for text in shapes}
    most = max(len(parents) for parents in trees.values())
    model.reserve(len(ways) + max(_num_leaves(parents) for parents in trees.values()), prefix + most)
    slots = {how: slot_behind(way, prefix) for how, way in ways.items()}
    found: dict[tuple[str, str], list[float]] = {(text, how): [] for text in trees for how in ways}
    with collector_off():
        for turn in range(-WARM_UP_PASSES, repeats):
            for text, how in found:
                nodes = len(trees[text])
                parents = range(-1, nodes - 1) if how == "chain" else trees[text]
                seconds = pass_seconds(ways[how], slots[how], parents)
                if turn >= 0:
                    found[text, how].append(1e3 * seconds)
    for how, slot in slots.items():
        ways[how].close(slot)
    return [
        TreeRecord(text, how, len(trees[text]), _num_leaves(trees[text]), prefix, tuple(milliseconds))
        for (text, how), milliseconds in found.items()
    ]


def time_drafting(model: LanguageModel, shapes: Sequence[str], *, prefix: int, repeats: int) -> list[TreeRecord]:
    """Time the growing of trees by a model, and the passes in it.

    Args:
        model: the drafter.
        shapes: as in a draft spec; `rows` of the records are the nodes asked for.
        prefix: tokens before each tree.
        repeats: trees of each kind that count.
    """
    timed = TimedModel(model)
    records = []
    for text in shapes:
        shape = parse_shape(text, None)
        draw = next(draw for draw in DRAWS if draw in shape.draws)
        for temperature in TEMPERATURES:
            growth = Growth(timed, shape=shape, draw=draw, shares_noise=True)
            growth.reserve(1, prefix + WARM_UP_PASSES + repeats + 1)
            grown, inside = _grow(growth, timed, shape, prefix=prefix, repeats=repeats, temperature=temperature)
            for how, milliseconds in (("drafted", grown), ("passes of drafting", inside)):
                name = f"{how}, temperature {temperature:g}"
                records.append(TreeRecord(text, name, shape.num_nodes, 0, prefix, tuple(milliseconds)))
    return records


def _grow(
    growth: Growth, timed: TimedModel, shape: Shape, *, prefix: int, repeats: int, temperature: float
) -> tuple[list[float], list[float]]:
    """Milliseconds of whole trees, and of the passes in each."""
    history = History(some_tokens(timed, prefix))
    controls = build_controls(SamplingParams(temperature=temperature), vocab_size=timed.vocab_size, seed=1)
    state = growth.open(SequenceView(history, controls))
    grown, inside = [], []
    with collector_off():
        for turn in range(-WARM_UP_PASSES, repeats):
            timed.seconds = 0.0
            start = time.perf_counter()
            growth.grow([state], [Budget(shape.num_nodes, shape.depth)])
            seconds = time.perf_counter() - start
            if turn >= 0:
                grown.append(1e3 * seconds)
                inside.append(1e3 * timed.seconds)
            history.append([turn % timed.vocab_size])
            growth.observe([state], [Verdict((), 0)])
    growth.close(state)
    return grown, inside


def _num_leaves(parents: Sequence[int]) -> int:
    return len(parents) - len(set(parents) - {ROOT})


@final
class TimedModel(LanguageModel):
    """A model that counts the seconds of its passes.

    Args:
        model: does the work.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self.vocab_size, self.max_length = model.vocab_size, model.max_length
        self.supports_trees = model.supports_trees
        self.device, self.dtype = model.device, model.dtype
        self.seconds = 0.0

    def run(self, pass_: Pass) -> PassResult:
        """The model's pass, timed."""
        start = time.perf_counter()
        result = self._model.run(pass_)
        self.seconds += time.perf_counter() - start
        return result

    def reserve(self, num_slots: int, length: int) -> None:
        """As the model."""
        self._model.reserve(num_slots, length)

    def open(self) -> Slot:
        """As the model."""
        return self._model.open()

    def apply(self, edits: Sequence[Edit]) -> list[Slot]:
        """As the model."""
        return self._model.apply(edits)
