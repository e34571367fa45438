"""Loading of a target that is larger than memory: its packed weights in a file, or modules placed by accelerate."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from draftree.core.errors import ConfigurationError
from draftree.models.memory import free_memory
from draftree.models.native.streaming.model import parse_size
from draftree.weights.cache import Cache

logger = logging.getLogger(__name__)

NO_STREAM = "passes through torch were requested, or passes in C are not available here"


@dataclass(frozen=True, slots=True)
class Offload:
    """Options of a target whose weights are read in every pass.

    Attributes:
        memory: memory for its weights, such as "8GB".
        kernels: as for `load_model`.
        quantization: as for `load_model`.
        trust_remote_code: as for `load_model`.

    Raises:
        ConfigurationError: malformed memory, or kernels that cannot read weights in a pass.
    """

    memory: str | int
    kernels: str
    quantization: str | None
    trust_remote_code: bool

    def __post_init__(self) -> None:
        parse_size(self.memory)
        if self.kernels == "graphs":
            raise ConfigurationError(
                "kernels 'graphs' replay fixed addresses, and offloaded weights move: use 'auto', or leave offload out"
            )


def torch_placement(device: torch.device, offload: str | int, folder: Path) -> Mapping[str, Any]:
    """Return the arguments of `from_pretrained` with which accelerate places the modules of a model.

    Args:
        device: device of the passes.
        offload: memory for weights on it, such as "8GB".
        folder: an existing folder for weights that fit nowhere else and are in no safetensors file.

    Raises:
        ConfigurationError: malformed memory, or accelerate is not installed.
    """
    budget = parse_size(offload)
    if find_spec("accelerate") is None:
        raise ConfigurationError(
            f"offload is {offload!r}, and passes run through torch, which needs the package 'accelerate': install it, "
            "or use a model and a device with passes in C"
        )
    memory: dict[Any, int] = {"cpu": budget}
    if device.type == "cuda":
        memory = {device.index or 0: budget, "cpu": free_memory(torch.device("cpu")) or budget}
    return {"device_map": "auto", "max_memory": memory, "offload_folder": str(folder)}


def offload_folder() -> Path:
    """Return the folder of the cache in which accelerate may write weights; creates it."""
    place = Cache().root / "offloaded"
    place.mkdir(parents=True, exist_ok=True)
    return place
