"""What `draftree train auto` makes: kind and size of a drafter for a target on this machine, by a model of cost.

Rates of acceptance are those of the lab note on training; speeds and costs of rounds are measured here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import inf, log2
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftree.core.errors import ConfigurationError
from draftree.core.files import MALFORMED, read_json, write_json
from draftree.train.costs import LONGEST, Costs

HEAD, STUDENT = "head", "student"
"""Kinds: a head on the target's hidden states; a small chat model that gets the target's tokens."""
MEASURED = 0.1  # share of the time that is left for the measurement of the result
EFFICIENCY = 0.2
"""Share of the speed of large products that training reaches: 2,670 predictions per second of a SmolLM2-135M head at
one level and 1,330 at three, by a thread with 435 billion operations per second."""
STUDENT_RATE = 0.65
"""Acceptance of each drafted token of a student: SmolLM2-135M for TinyLlama, open prompts, with 75,000 as with 640,000
predictions."""
FIRST_PREDICTIONS, FIRST_RATE, RATE_BY_DOUBLING, HIGHEST_RATE = 200_000, 0.34, 0.036, 0.62
"""Acceptance of each drafted token of a head, by predictions that it was trained on (SmolLM2-135M)."""
VOCABULARIES = (4_096, 8_192, 16_384, 32_768)
TOKENS_BY_DOUBLING = 0.028
"""Relative gain in acceptance of a draft vocabulary of twice the size; 8,192 tokens are the base."""
PROBE_SIZE, PROBE_SECONDS = 1024, 0.5


@dataclass(frozen=True, slots=True)
class Machine:
    """What limits data and training."""

    tokens: float  # measured new tokens of data per second
    operations: float  # measured floating-point operations per second of large products
    most_tokens: int  # tokens of data that the prompts give at most


@dataclass(frozen=True, slots=True)
class TargetSize:
    fingerprint: str  # of the target itself
    hidden: int
    inner: int  # inner width of its perceptrons
    vocab: int


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """What is trained, and what that should bring."""

    target: str  # fingerprint of the model that it is for
    hours: float  # of data, training and measurement together
    kind: str
    start: str | None  # model that a student starts from; None for a head
    draft_vocab: int | None  # draft vocabulary of a head; None for a student
    data_tokens: int  # tokens of data, prompts included
    minutes: float  # of training
    predictions: int  # that fit into the time
    tokens_per_round: float  # expected, with drafts of the best length
    speedup: float  # expected, relative to plain decoding

    def __str__(self) -> str:
        what = f"a head with {self.draft_vocab:,} tokens" if self.start is None else f"a student from {self.start}"
        minutes = f"{self.minutes:,.1f}" if self.minutes < 10 else f"{self.minutes:,.0f}"
        return (
            f"{what}: {self.data_tokens:,} tokens of data, {minutes} minutes of training, about "
            f"{self.predictions:,} predictions; {self.tokens_per_round:.2f} tokens per round and {self.speedup:.2f} "
            "times plain decoding are expected"
        )

    def write(self, path: Path) -> None:
        write_json(path, asdict(self), indent=1)

    @classmethod
    def read(cls, path: Path) -> TrainingPlan:
        try:
            plan = cls(**read_json(path))
            is_head = plan.start is None and plan.draft_vocab > 0  # type: ignore[operator]
            if not (plan.kind == HEAD if is_head else plan.kind == STUDENT and isinstance(plan.start, str)):
                raise ValueError(plan.kind)
            if not (0 < plan.minutes < inf and plan.data_tokens > 0 and plan.hours > 0):
                raise ValueError("no time or no data")
            str(plan)  # formats every number
        except MALFORMED as error:
            raise ConfigurationError(f"'{path}' is damaged: delete it, and the plan is made again") from error
        return plan


def operations_per_second(dtype: torch.dtype, device: torch.device) -> float:
    """Return the measured speed of large products."""
    matrix = torch.ones(PROBE_SIZE, PROBE_SIZE, dtype=dtype, device=device)
    start, count, seconds = time.perf_counter(), 0, 0.0
    while count < 2 or seconds < PROBE_SECONDS:
        float((matrix @ matrix)[0, 0])  # waits for the product
        if count == 0:
            start = time.perf_counter()  # the first product is slower
        count += 1
        seconds = time.perf_counter() - start
    return (count - 1) * 2 * PROBE_SIZE**3 / seconds


@dataclass(frozen=True, slots=True)
class Student:
    """The model that a student would start from."""

    name: str
    num_parameters: int
    costs: Costs


def vocabularies_for(vocab: int) -> tuple[int, ...]:
    """Return the draft vocabularies to compare for a target with so many tokens."""
    return tuple(size for size in VOCABULARIES if size < vocab) or (vocab,)


def plan_training(
    target: TargetSize, machine: Machine, hours: float, heads: Mapping[int, Costs], student: Student | None
) -> TrainingPlan:
    """Return the plan with the highest expected speed.

    Args:
        hours: of data, training and measurement together.
        heads: costs of heads by their draft vocabularies.
        student: None for a head only.
    """
    plans = [_plan(target, machine, hours, costs, vocab, None) for vocab, costs in heads.items()]
    if student is not None:
        plans.append(_plan(target, machine, hours, student.costs, None, student))
    return max(plans, key=lambda plan: plan.speedup)


def _plan(
    target: TargetSize, machine: Machine, hours: float, costs: Costs, vocab: int | None, student: Student | None
) -> TrainingPlan:
    if student is None:
        assert vocab is not None, "a head has a draft vocabulary"
        layer = 9 * target.hidden**2 + 3 * target.hidden * target.inner
        output = vocab * target.hidden
        operations = 6 * layer + 4 * output  # the output head is frozen
    else:
        operations = 6 * student.num_parameters
    trained = machine.operations * EFFICIENCY / operations
    seconds = 3600 * hours * (1 - MEASURED)
    # as many predictions as tokens if data are made faster than they are learned, otherwise half of the time for each
    share = min(0.5, trained / (trained + machine.tokens))
    data_seconds = min(share * seconds, machine.most_tokens / machine.tokens)
    predictions = round(trained * (seconds - data_seconds))
    if vocab is None:
        rate = STUDENT_RATE
    else:
        learned = FIRST_RATE + RATE_BY_DOUBLING * log2(max(1, predictions) / FIRST_PREDICTIONS)
        rate = max(0.0, min(HIGHEST_RATE, learned)) * (1 + TOKENS_BY_DOUBLING * log2(vocab / VOCABULARIES[1]))
    tokens = [sum(rate**depth for depth in range(length + 1)) for length in range(LONGEST + 1)]
    cost = np.interp(range(LONGEST + 1), [0, *costs], [1.0, *costs.values()])
    length = max(range(1, LONGEST + 1), key=lambda length: tokens[length] / cost[length])
    return TrainingPlan(
        target.fingerprint,
        hours,
        STUDENT if student else HEAD,
        student.name if student else None,
        vocab,
        max(1, round(data_seconds * machine.tokens)),
        (seconds - data_seconds) / 60,
        predictions,
        tokens[length],
        float(tokens[length] / cost[length]),
    )


def recipe_of(kind: str) -> dict[str, Any]:
    """Return the values of `TrainSettings` for a kind, as the lab note on training found them on CPUs."""
    if kind == HEAD:
        return {"batch_tokens": 6144, "learning_rate": 2e-3, "levels_from": 0.4, "evaluate_every": 50}
    # Muon needs seconds for an update of matrices of this width on a CPU, and trained weights need a low rate
    rate = {"optimizer": "adamw", "learning_rate": 2e-4, "warm_up": 10, "weight_decay": 0.1}
    return {"batch_tokens": 2048, "levels": 1, "evaluate_every": 50, **rate}
