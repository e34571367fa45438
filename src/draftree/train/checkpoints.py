"""Checkpoints of a run, one file that is written whole or not at all, and the error of training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from draftree.core.errors import DraftreeError
from draftree.core.files import MALFORMED, parse_json
from draftree.train.data.shards import write_atomically

CHECKPOINT = "checkpoint.safetensors"


class TrainingError(DraftreeError, RuntimeError):
    """Training cannot start or continue: damaged data, a loss that is not finite, or too little memory."""


def save_checkpoint(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write tensors and JSON facts; an interruption leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    copies = {name: value.detach().contiguous().clone() for name, value in tensors.items()}
    metadata = {"facts": json.dumps(dict(facts))}
    write_atomically(path, lambda unfinished: save_file(copies, unfinished, metadata=metadata))


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safe_open(path, framework="pt") as file:
            facts: dict[str, Any] = dict(parse_json((file.metadata() or {})["facts"]))
            return {name: file.get_tensor(name) for name in file.keys()}, facts  # noqa: SIM118
    except FileNotFoundError:
        raise TrainingError(f"{path} does not exist: there is no run to resume") from None
    except (OSError, SafetensorError, *MALFORMED) as error:
        raise TrainingError(f"{path} is not a checkpoint or is damaged ({error}): start a new run") from None
