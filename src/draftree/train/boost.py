"""Boosting: the next head is trained on what earlier heads miss, so that both together propose the target's pick.

The weight of a prediction is the product over earlier heads of the probability that they miss it, at least a floor: a
head that saw misses only would forget fluent text, since tokens that no drafter predicts are mostly noise. The baseline
costs no training: as many best tokens of the first head as there are heads, which verify as many tokens.

Source: SpecInfer, arXiv 2305.09781, which drops whole prompts; weights per token and the floor are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftree.core.errors import ConfigurationError
from draftree.core.files import read_json, write_json
from draftree.train.batches import Batch
from draftree.train.evaluate import CANDIDATES, DepthCounts, judge, runs_of
from draftree.train.finishing import RECIPE, TrainingResult
from draftree.train.head import HeadOptions, start, train_prepared
from draftree.train.head_trainee import HeadTrainee
from draftree.train.losses import acceptance_of
from draftree.train.preparing import Note, Prepared, Report, TrainingJob, ignore, prepare
from draftree.train.settings import TrainSettings

CHUNK_ROWS = 512


@torch.no_grad()
def miss_weights(earlier: Sequence[HeadTrainee], floor: float, batch: Batch, numbers: Sequence[int]) -> Tensor:
    """Return the weights of the chains' first predictions by the misses of earlier heads; mean 1, shape (chains,)."""
    weights = torch.ones(batch.num_chains, device=batch.chains.device)
    for trainee in earlier:
        earlier_batch = trainee.batch(numbers)
        teacher = trainee.teacher(earlier_batch, numbers)
        (states,) = trainee.states_of(earlier_batch, 1)
        for part in torch.arange(earlier_batch.num_chains, device=weights.device).split(CHUNK_ROWS):
            rows = teacher.part(part).rows(trainee.module.logits(states[part]))
            weights[part] *= (1 - acceptance_of(rows)).clamp(0, 1).to(weights.dtype)
    weights = weights.clamp_min(floor)
    return weights / weights.mean()


def train_boosted(
    job: TrainingJob,
    settings: TrainSettings,
    options: HeadOptions,
    earlier: Sequence[Path],
    *,
    floor: float = 0.05,
    report: Report = ignore,
    note: Note = ignore,
) -> tuple[TrainingResult, dict[str, Any]]:
    """Train the next head and compare the union with the baseline.

    `earlier`: folders of earlier heads, the best one first. `floor`: least weight of a prediction. Returns the
    result, and the union by temperature of the texts, which is part of the recipe.
    """
    if not earlier:
        raise ConfigurationError("boosting needs an earlier head: give its folder with --earlier")
    if len(earlier) >= CANDIDATES:
        raise ConfigurationError(f"{len(earlier)} earlier heads are given: at most {CANDIDATES - 1}")
    if not 0 <= floor <= 1:
        raise ConfigurationError(f"floor is {floor}: it must be from 0 to 1")
    prepared = prepare(job, settings, report, note)
    trainees = [trainee_of(prepared, folder) for folder in earlier]
    if prepared.processes.count == 1:
        for trainee in trainees:
            trainee.keep_rows(prepared.data)
    facts = {"boosting": {"earlier": list(map(str, earlier)), "floor": floor}}
    weights = partial(miss_weights, trainees, floor)
    result = train_prepared(prepared, options, "Boosted EAGLE-3 head", facts, weights)
    if prepared.processes.index:
        return result, {}
    union = union_of([*trainees, trainee_of(prepared, job.output)], settings.depth)
    path = job.output / RECIPE
    write_json(path, read_json(path) | {"union": union}, indent=1)
    return result, union


def trainee_of(prepared: Prepared, folder: Path) -> HeadTrainee:
    """Return a finished head as a trainee, which evaluates it."""
    return HeadTrainee.of(prepared, *start(prepared, HeadOptions(start=folder)))


@torch.no_grad()
def union_of(heads: Sequence[HeadTrainee], depth: int) -> dict[str, Any]:
    """Return the survival of drafts along the unseen texts, by temperature, at equal numbers of verified tokens.

    A level of the union has the best token of each head; a level of the baseline has as many best tokens of the first.
    """
    num_heads = len(heads)
    counts: dict[float, dict[str, DepthCounts]] = {}
    for numbers in heads[0].unseen_batches(None):
        by_temperature: dict[float, list[int]] = {}
        for number in numbers:
            by_temperature.setdefault(heads[0].text(number).temperature, []).append(number)
        for temperature, chosen in by_temperature.items():
            ranks = []
            for head in heads:
                batch = head.batch(chosen)
                steps = judge(batch, head.steps_of(batch, depth), head.vocabulary)
                ranks.append(torch.stack([step.match for step in steps], dim=-1)[batch.room >= depth])
            named = counts.setdefault(temperature, {})
            for name, hits in (
                ("first head", ranks[0] == 0),
                (f"first head, best {num_heads}", (ranks[0] >= 0) & (ranks[0] < num_heads)),
                ("last head", ranks[-1] == 0),
                (f"best of {num_heads} heads", torch.stack(ranks).eq(0).any(dim=0)),
            ):
                named.setdefault(name, DepthCounts(depth)).add(runs_of(hits.tolist()))
    return {
        f"{temperature:g}": {name: drafts.facts() for name, drafts in named.items()}
        for temperature, named in sorted(counts.items())
    }
