"""Acceptance of a drafter on texts that training has not seen: by depth, for greedy and sampled texts, by category.

The texts are those that the target wrote, so its picks are known. Drafts start at every token of an answer and read
the text's own tokens. Counts over the drafts that decoding would make (`walk`) are those of the engine with drafts of
a fixed length; counts over all starts have a smaller deviation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftree.heads.vocabulary import DraftVocabulary
from draftree.train.batches import Batch
from draftree.train.counts import DepthCounts, runs_of, walk
from draftree.train.judging import CANDIDATES, JudgedStep, StepLogits, judge

__all__ = ["ALL", "Evaluation", "ModeCounts", "evaluate"]

ALL = "all"
"""Key of the counts over all categories."""


@dataclass(slots=True)
class ModeCounts:
    """Counts over texts of one temperature.

    Attributes:
        depth: length of a draft.
        starts: drafts from every token of an answer that has room for one.
        rounds: by category, the drafts that decoding would make; those with `ALL` are of all texts.
        hits: number of first tokens of drafts at each rank, from 0; the best `CANDIDATES` ranks.
        first: number of first tokens of drafts.
        covered: number of target's picks that the draft vocabulary has, of `first`.
        texts: number of texts.
    """

    depth: int
    starts: DepthCounts = field(init=False)
    rounds: dict[str, DepthCounts] = field(default_factory=dict)
    hits: list[int] = field(default_factory=lambda: [0] * CANDIDATES)
    first: int = 0
    covered: int = 0
    texts: int = 0

    def __post_init__(self) -> None:
        self.starts = DepthCounts(self.depth)

    def facts(self) -> dict[str, Any]:
        """Return the rates as JSON values, after the check of survival against the acceptance length."""
        for counts in (self.starts, *self.rounds.values()):
            counts.check()
        return {
            "texts": self.texts,
            "starts": _facts(self.starts),
            "rounds": {category: _facts(counts) for category, counts in sorted(self.rounds.items())},
            "coverage": self.covered / max(1, self.first),
            "top": {str(k): sum(self.hits[:k]) / max(1, self.first) for k in (1, 2, CANDIDATES)},
        }


@dataclass(slots=True)
class Evaluation:
    """Result of an evaluation.

    Attributes:
        modes: counts by temperature of the texts.
    """

    modes: dict[float, ModeCounts] = field(default_factory=dict)

    @property
    def score(self) -> float:
        """Mean over temperatures of the acceptance length from all starts: what early stopping maximizes."""
        lengths = [mode.starts.acceptance_length for mode in self.modes.values() if mode.starts.drafts]
        return sum(lengths) / len(lengths) if lengths else 1.0

    def facts(self) -> dict[str, Any]:
        """Return the rates as JSON values, by temperature."""
        return {f"{temperature:g}": mode.facts() for temperature, mode in sorted(self.modes.items())}


@torch.no_grad()
def evaluate(
    batches: Iterable[tuple[Batch, Sequence[str]]],
    steps_of: Callable[[Batch, int], Iterator[StepLogits]],
    vocabulary: DraftVocabulary,
    depth: int,
    *,
    watch: Callable[[Batch, list[JudgedStep]], None] | None = None,
) -> Evaluation:
    """Return the acceptance of a drafter.

    Args:
        batches: batches, and the category of each of their texts; empty for none.
        steps_of: logits of all steps of a batch for a number of levels.
        vocabulary: the draft vocabulary.
        depth: length of drafts.
        watch: called with every judged batch, as the fit of the confidence does.
    """
    found = Evaluation()
    for batch, categories in batches:
        judged = list(judge(batch, steps_of(batch, depth), vocabulary))
        if watch is not None:
            watch(batch, judged)
        matches = torch.stack([step.match == 0 for step in judged], dim=-1)
        start = 0
        for text, category in zip(batch.texts, categories, strict=True):
            stop = start + int(batch.room[start])
            mode = found.modes.setdefault(text.temperature, ModeCounts(depth))
            _count(mode, category, matches[start:stop], judged[0], slice(start, stop))
            start = stop
    return found


def _count(mode: ModeCounts, category: str, matches: Tensor, first: JudgedStep, chains: slice) -> None:
    """Add the drafts of one text. Drafts near its end have less room and are not counted."""
    count = len(matches)
    mode.texts += 1
    mode.first += count
    mode.covered += int(first.is_covered[chains].sum())
    for rank in range(CANDIDATES):
        mode.hits[rank] += int((first.match[chains] == rank).sum())
    runs = [min(run, count - place) for place, run in enumerate(runs_of(matches.tolist()))]
    has_room = max(0, count - mode.depth + 1)
    mode.starts.add(runs[:has_room])
    # the first round of decoding reads the prompt, so that drafts start after the first token of the answer
    visited = [1 + place for place in walk(runs[1:])]
    for name in (ALL, category) if category else (ALL,):
        mode.rounds.setdefault(name, DepthCounts(mode.depth)).add(
            [runs[place] for place in visited if place < has_room]
        )


def _facts(counts: DepthCounts) -> dict[str, Any]:
    return {
        "drafts": counts.drafts,
        "acceptance_length": counts.acceptance_length,
        "conditional": counts.conditional,
        "reached": counts.reached,
        "survival": counts.survival,
    }


def table(facts: Mapping[str, Any]) -> list[str]:
    """Return lines of a table in Markdown: conditional acceptance and survival by depth for each temperature."""
    lines = ["| temperature | texts | depth | reached | accepted | survival |", "| --- | --- | --- | --- | --- | --- |"]
    for temperature, mode in facts.items():
        rounds = mode["rounds"][ALL]
        for depth, (reached, rate, survival) in enumerate(
            zip(rounds["reached"], rounds["conditional"], rounds["survival"], strict=True)
        ):
            lines.append(f"| {temperature} | {mode['texts']} | {depth + 1} | {reached} | {rate:.3f} | {survival:.3f} |")
    return lines
