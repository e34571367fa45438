"""Times trees: scored in one pass and leaf by leaf, and drafted level by level.

    python benchmarks/trees.py MODEL --trees 2-2-2,4-2-1 --drafts 1-1-1,best-32 [--output FILE]

Scoring is compared with a plain pass over as many tokens, and with sequence-based decoding, in which every leaf is a
separate sequence. Drafting is compared with the passes in it: the rest is overhead.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, final

import typer

from draftree.cli.bench import write_and_show
from draftree.cli.options import require_new
from draftree.cli.render import resolve_with_bar
from draftree.core.errors import ConfigurationError, DraftreeError
from draftree.core.tree import ROOT, Draw
from draftree.core.types import Budget, Verdict
from draftree.drafters.base import SequenceView
from draftree.drafters.tree_builder.builder import Shape, TreeBuilder, parse_shape
from draftree.drafters.tree_builder.model_stepper import ModelStepper, SameReader
from draftree.lab.bench.benchmark import without_collector
from draftree.lab.bench.passes import (
    WARM_UP_PASSES,
    PassSettings,
    header_of,
    load_fitting,
    pass_seconds,
    slot_after,
    some_tokens,
)
from draftree.lab.bench.records import TreeRecord
from draftree.models.base import Edit, LanguageModel, Pass, PassResult, Slot
from draftree.options import ModelOptions
from draftree.sampling.controls import build_controls
from draftree.sampling.history import History
from draftree.sampling.params import SamplingParams

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from sequential import SequentialModel

TEMPERATURES = (0.0, 0.8)
DRAWS = (Draw.FREE, Draw.IID, Draw.WITHOUT_REPLACEMENT)


def scored_shape(text: str) -> Shape:
    """Return the shape of a tree that can be scored without a drafter.

    Raises:
        ConfigurationError: not a shape, or one whose nodes only a drafter can place.
    """
    shape = parse_shape(text, None)
    if shape.num_best is not None:
        raise ConfigurationError(
            f"tree '{text}' cannot be scored, because the places of its nodes depend on a drafter: "
            "name levels, such as 2-2-1"
        )
    return shape


def parents_of(shape: Shape) -> list[int]:
    """Return the parents of the full tree of a shape, level by level."""
    parents: list[int] = []
    level = [ROOT]
    for width in shape.widths:
        first = len(parents)
        parents.extend(node for node in level for _ in range(width))
        level = list(range(first, len(parents)))
    return parents


def time_scoring(model: LanguageModel, shapes: Sequence[str], *, prefix: int, repeats: int) -> list[TreeRecord]:
    """Time every shape as a tree, as a chain of as many nodes, and path by path, interleaved.

    Args:
        model: a model that scores trees.
        shapes: levels, as in a draft spec.
        prefix: committed tokens before each tree.
        repeats: recorded passes of each kind.
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
    slots = {how: slot_after(way, prefix) for how, way in ways.items()}
    found: dict[tuple[str, str], list[float]] = {(text, how): [] for text in trees for how in ways}
    with without_collector():
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
    """Time the growth of trees by a model, and the passes in it.

    Args:
        model: the drafter.
        shapes: shapes as in a draft spec; `rows` of the records are the requested nodes.
        prefix: tokens before each tree.
        repeats: recorded trees of each kind.
    """
    timed = TimedModel(model)
    records = []
    for text in shapes:
        shape = parse_shape(text, None)
        draw = next(draw for draw in DRAWS if draw in shape.draws)
        for temperature in TEMPERATURES:
            stepper = ModelStepper(timed, SameReader(timed.vocab_size, timed.vocab_size))
            growth = TreeBuilder(stepper, shape=shape, draw=draw, shares_noise=True)
            growth.reserve(1, prefix + WARM_UP_PASSES + repeats + 1)
            grown, inside = _grow(growth, timed, shape, prefix=prefix, repeats=repeats, temperature=temperature)
            for how, milliseconds in (("drafted", grown), ("passes of drafting", inside)):
                name = f"{how}, temperature {temperature:g}"
                records.append(TreeRecord(text, name, shape.num_nodes, 0, prefix, tuple(milliseconds)))
    return records


def _grow(
    growth: TreeBuilder, timed: TimedModel, shape: Shape, *, prefix: int, repeats: int, temperature: float
) -> tuple[list[float], list[float]]:
    """Return the milliseconds of whole trees, and of the passes in each."""
    history = History(some_tokens(timed, prefix))
    controls = build_controls(SamplingParams(temperature=temperature), vocab_size=timed.vocab_size, seed=1)
    state = growth.stepper.open(SequenceView(history, controls))
    grown, inside = [], []
    with without_collector():
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
    growth.stepper.close(state)
    return grown, inside


def _num_leaves(parents: Sequence[int]) -> int:
    return len(parents) - len(set(parents) - {ROOT})


@final
class TimedModel(LanguageModel):
    """A model that sums the seconds of its passes.

    Args:
        model: the wrapped model.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self.vocab_size, self.max_length = model.vocab_size, model.max_length
        self.supports_trees = model.supports_trees
        self.device, self.dtype = model.device, model.dtype
        self.seconds = 0.0

    def run(self, pass_: Pass) -> PassResult:
        """Run the model's pass and time it."""
        start = time.perf_counter()
        result = self._model.run(pass_)
        self.seconds += time.perf_counter() - start
        return result

    def reserve(self, num_slots: int, length: int) -> None:
        """Delegate to the model."""
        self._model.reserve(num_slots, length)

    def open(self) -> Slot:
        """Delegate to the model."""
        return self._model.open()

    def apply(self, edits: Sequence[Edit]) -> list[Slot]:
        """Delegate to the model."""
        return self._model.apply(edits)


def measure(settings: PassSettings, trees: Sequence[str], drafts: Sequence[str]) -> tuple[Any, list[TreeRecord]]:
    """Load the model and time trees; the header and the records.

    Args:
        settings: of the model and its passes; `rows` is of no effect.
        trees: shapes that are scored.
        drafts: shapes that are drafted.

    Raises:
        ConfigurationError: a shape that needs a drafter to be placed, no fit into the context, or chains only.
    """
    shapes = [scored_shape(text) for text in trees]
    # a drafter's slot holds what it read, and while it is timed the text grows
    drafted = [parse_shape(text, None).num_fed + settings.repeats + WARM_UP_PASSES for text in drafts]
    loaded = load_fitting(settings, max([*(shape.num_nodes for shape in shapes), *drafted, 1]))
    if any(not shape.is_chain for shape in shapes) and not loaded.model.supports_trees:
        raise ConfigurationError(f"trees were asked for, but '{settings.model}' scores chains only: leave them out")
    how = {"prefix": settings.prefix, "repeats": settings.repeats}
    records = time_scoring(loaded.model, trees, **how) if trees else []
    return header_of(settings, loaded), [*records, *time_drafting(loaded.model, drafts, **how)]


def main(
    model: str,
    *,
    trees: Annotated[str, typer.Option(help="Trees to score: as trees, as chains, and leaf by leaf.")] = "",
    drafts: Annotated[str, typer.Option(help="Trees that the model drafts, and the passes in it.")] = "",
    prefix: Annotated[int, typer.Option(help="Tokens before the tree.")] = 256,
    repeats: Annotated[int, typer.Option(help="Passes of each kind.")] = 20,
    dtype: str = "auto",
    device: str = "auto",
    kernels: str = "auto",
    quantization: str | None = None,
    threads: int | None = None,
    output: Annotated[Path | None, typer.Option(help="JSON lines, read by 'draftree bench report'.")] = None,
) -> None:
    """Time trees of a model."""
    try:
        require_new(output)
        resolve_with_bar(model)
        options = ModelOptions(
            model, dtype=dtype, device=device, kernels=kernels, quantization=quantization, threads=threads
        )
        settings = PassSettings(options, prefix=prefix, repeats=repeats)
        header, records = measure(settings, *(text.split(",") if text else [] for text in (trees, drafts)))
        write_and_show(output, header, (("tree", record) for record in records))
    except DraftreeError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    typer.run(main)
