"""Settings of a training run that all drafters share: budget, optimizer, losses, evaluation."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field

from draftree.build import require_positive
from draftree.core.errors import ConfigurationError, suggestion
from draftree.train.losses import loss_named
from draftree.train.unroll import StepWeights

ADAMW, MUON = "adamw", "muon"
OPTIMIZERS = (MUON, ADAMW)  # names of optimizers


@dataclass(frozen=True, slots=True)
class Limits:
    """Budget of a run; it ends at the first limit. Progress is the largest share of a limit that is used."""

    steps: int | None = None  # updates of the weights
    tokens: int | None = None  # tokens that predictions were trained on, repeated ones included
    minutes: float | None = None  # duration without evaluations before and after

    def __post_init__(self) -> None:
        limits = {name: value for name, value in asdict(self).items() if value is not None}
        for name, value in limits.items():
            if not value > 0:
                raise ConfigurationError(f"{name} is {value}: it must be positive")
        if not limits:
            raise ConfigurationError("a run needs a limit: give steps, tokens or minutes")

    def progress(self, steps: int, tokens: int, minutes: float) -> float:
        """Return the share of the budget that is used, from 0 to 1."""
        used = ((steps, self.steps), (tokens, self.tokens), (minutes, self.minutes))
        return min(1.0, max(value / limit for value, limit in used if limit is not None))


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """Settings of a run."""

    limits: Limits  # the budget
    batch_tokens: int = 2048  # tokens of a batch; a longer text is a batch of its own
    max_length: int | None = None  # longest text in tokens; longer ones are cut; None for no limit
    optimizer: str = MUON
    learning_rate: float = 1e-3  # highest learning rate, after the warm-up; it falls to 0 along a cosine
    warm_up: int = 50  # updates until the highest learning rate
    weight_decay: float = 0.0  # of matrices
    loss: str = "coupled"
    first_loss: str = "kl"  # loss of the first part of the run; `loss` is that of the rest
    first_share: float = 0.5  # share of the budget of the first part
    temperature: float = 0.8  # at which distributions are compared
    levels: int = 3  # levels of multi-step training: how often the drafter reads its own states, plus one
    levels_from: float = 0.5  # share of the budget from which more than one level is trained
    weights: StepWeights = field(default_factory=StepWeights)
    evaluate_every: int = 100  # updates between evaluations and checkpoints
    patience: int | None = 8  # evaluations without a better score before the run stops early; None to run to the end
    depth: int = 4  # length of drafts in evaluations
    seed: int = 0  # of initial weights and of the order of texts
    # dtype of computation, "auto", "float32" or "bfloat16"; weights are updated in float32 in any case
    dtype: str = "auto"

    def __post_init__(self) -> None:
        require_positive(self, "batch_tokens", "max_length", "levels", "evaluate_every", "patience", "depth")
        for name in ("learning_rate", "temperature"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)}: it must be positive")
        for name in ("first_share", "levels_from"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)}: it must be from 0 to 1")
        for name in ("warm_up", "weight_decay"):
            if getattr(self, name) < 0:
                raise ConfigurationError(f"{name} is {getattr(self, name)}: it must not be negative")
        if self.optimizer not in OPTIMIZERS:
            raise ConfigurationError(f"unknown optimizer '{self.optimizer}': {suggestion(self.optimizer, OPTIMIZERS)}")
        loss_named(self.loss)
        loss_named(self.first_loss)

    def digest(self) -> str:
        """Return a hash of what must be equal when a run is resumed: all but the budget and the reports."""
        spared = ("limits", "patience")
        facts = {name: value for name, value in asdict(self).items() if name not in spared}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
