"""Cost of a model's pass by number of rows, compared with the lower bound from memory bandwidth.

A pass over a few tokens reads the weights once, independent of their number: the lower bound is their bytes divided by
the measured bandwidth. The possible gain of drafting depends on how slowly the cost grows from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftree.bench.provenance import load_average, machine, model_facts, now, versions
from draftree.bench.records import FORMAT, PassRecord
from draftree.bench.runner import collector_off
from draftree.bench.settings import ExecutionSettings, load_for, require_positive
from draftree.bench.speeds import read_bandwidth
from draftree.bench.timing import WARM_UP_PASSES, pass_seconds, slot_after
from draftree.core.errors import ConfigurationError
from draftree.loading.load import LoadedModel
from draftree.loading.prepared import prepared_folder
from draftree.models.base import LanguageModel
from draftree.models.native.model import NativeModel

USUAL_PREFIX = 256
EXPERTS = "experts"
"""Name of the modules that have the experts of a layer, without a shared one."""
NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_OF_ROW = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k")
"""Names in the configurations of models."""


@dataclass(frozen=True, slots=True)
class PassSettings(ExecutionSettings):
    """The passes to time.

    Attributes:
        model: name of the model, in any supported form.
        rows: numbers of tokens per pass; 1 is always included.
        prefix: committed tokens before them; None for 256, or as many as fit into a shorter context.
        repeats: passes of each kind that count.
    """

    model: str
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    prefix: int | None = None
    repeats: int = 20

    def __post_init__(self) -> None:
        require_positive(self, "prefix", "repeats", "threads")
        if any(row < 1 for row in self.rows) or not self.rows:
            raise ConfigurationError(f"rows are {list(self.rows)}: each must be at least 1")
        object.__setattr__(self, "rows", tuple(sorted({1, *self.rows})))


def measure(
    settings: PassSettings, *, fetch: Callable[[str], object] = prepared_folder
) -> tuple[dict[str, Any], list[PassRecord]]:
    """Load the model and time its passes; the header, and a record for each number of rows.

    Args:
        settings: the passes to time.
        fetch: called with the model's name before it is loaded.

    Raises:
        ConfigurationError: the prefix and the widest pass do not fit into the model's context.
        ModelError: the model cannot be found or used.
    """
    fetch(settings.model)
    loaded = load_fitting(settings, max(settings.rows))
    prefix = settings.prefix or min(USUAL_PREFIX, loaded.model.max_length - max(settings.rows))
    header = header_of(settings, loaded)
    return header, time_passes(loaded.model, settings.rows, prefix=prefix, repeats=settings.repeats)


def load_fitting(settings: PassSettings, num_rows: int) -> LoadedModel:
    """Load the model, into whose context the prefix and `num_rows` more tokens fit.

    Raises:
        ConfigurationError: they do not fit.
        ModelError: the model cannot be had or used.
    """
    loaded = load_for(settings)
    context = loaded.model.max_length
    prefix = settings.prefix or 1
    if prefix + num_rows > context:
        raise ConfigurationError(
            f"a prefix of {prefix} and {num_rows} rows do not fit into the model's context of "
            f"{context}: lower one of them"
        )
    return loaded


def header_of(settings: PassSettings, loaded: LoadedModel) -> dict[str, Any]:
    """Return the header of a results file; measures the bandwidth of memory."""
    assert loaded.folder is not None
    model = loaded.model
    weight_bytes = bytes_of_pass(loaded)
    load_before = load_average()
    return {
        "format": FORMAT,
        "job": "passes",
        "date": now(),
        "machine": machine(model.device),
        "versions": versions(),
        "model": model_facts(settings.model, loaded.folder),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "kernels": loaded.kernels,
        "kernels_reason": loaded.why_torch,
        "quantization": loaded.quantization,
        "threads": torch.get_num_threads(),
        "repeats": settings.repeats,
        "warm_up": {"rounds": WARM_UP_PASSES},
        "weight_bytes": weight_bytes,
        "read_bytes_per_second": read_bandwidth(model.device),
        "load_average": load_before,
    }


def time_passes(model: LanguageModel, rows: Sequence[int], *, prefix: int, repeats: int) -> list[PassRecord]:
    """Time one pass for each number of rows after a prefix, interleaved; all rows give logits, as in verification."""
    model.reserve(1, prefix + max(rows))
    milliseconds: dict[int, list[float]] = {count: [] for count in rows}
    slot = slot_after(model, prefix)
    try:
        with collector_off():
            for turn in range(-WARM_UP_PASSES, repeats):
                for count in rows:
                    seconds = pass_seconds(model, slot, range(-1, count - 1))
                    if turn >= 0:
                        milliseconds[count].append(1e3 * seconds)
    finally:
        model.close(slot)
    return [PassRecord(count, prefix, tuple(milliseconds[count])) for count in rows]


def bytes_of_pass(loaded: LoadedModel) -> int:
    """Return the bytes of the weights that a pass reads at least, see `weights_of_pass`; with groups, their scales."""
    assert loaded.folder is not None
    if loaded.quantization not in (None, "int8"):
        model = loaded.model
        return model.decoder.read_bytes if isinstance(model, NativeModel) else int(model.footprint.weights)
    size = torch.int8 if loaded.quantization == "int8" else loaded.model.dtype
    return weight_bytes_read(loaded.folder, size, trust_remote_code=loaded.runs_code)


def weight_bytes_read(folder: Path, dtype: torch.dtype, *, trust_remote_code: bool = False) -> int:
    """Return the bytes of the weights that a pass reads at least in a dtype."""
    return weights_of_pass(folder, trust_remote_code=trust_remote_code) * dtype.itemsize


def weights_of_pass(folder: Path, *, trust_remote_code: bool = False) -> int:
    """Return the number of weights that a pass reads at least, which are those that one row is multiplied with.

    Embeddings are not among them, except one that is also the head: only the rows of the pass's tokens are read. Of the
    experts of a layer, those of one row are.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    head = model.get_output_embeddings() or model.get_input_embeddings()
    embeddings = {id(part.weight) for part in model.modules() if isinstance(part, torch.nn.Embedding)}
    count, of_experts = 0, 0
    for name, parameter in model.named_parameters():
        if id(parameter) in embeddings and parameter is not head.weight:
            continue
        if EXPERTS in name.split("."):
            of_experts += parameter.numel()
        else:
            count += parameter.numel()
    return count + (_weights_of_row(config.get_text_config(), of_experts) if of_experts else 0)


def _weights_of_row(config: Any, of_experts: int) -> int:
    """Return how many weights of all experts one row uses."""
    every, used = (
        next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)
        for names in (NUM_EXPERTS, EXPERTS_OF_ROW)
    )
    return of_experts if not every or not used else of_experts * min(used, every) // every
