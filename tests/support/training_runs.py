"""Training runs of small heads, and their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from draftree.train.head_trainee import HeadTrainee
from draftree.train.loop import TrainingRun
from draftree.train.preparing import Processes
from draftree.train.settings import TrainSettings

CPU = torch.device("cpu")


def started(own: HeadTrainee, chosen: TrainSettings, folder: Path, **more: Any) -> TrainingRun:
    return TrainingRun(own, chosen, folder, Processes(CPU), **more)


def weights_of(own: HeadTrainee) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in own.module.state_dict().items()}
