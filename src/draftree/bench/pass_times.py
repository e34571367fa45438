"""Cost of a model's pass by number of rows, compared with the lower bound from memory bandwidth.

A pass over a few tokens reads all weights once, independent of their number: the lower bound is their bytes divided by
the measured bandwidth. The possible gain of drafting depends on how slowly the cost grows from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftree.bench.provenance import load_average, machine, model_facts, now, versions
from draftree.bench.records import FORMAT, PassRecord, TreeRecord
from draftree.bench.runner import collector_off
from draftree.bench.settings import load_for, require_positive
from draftree.bench.speeds import read_bandwidth
from draftree.bench.timing import WARM_UP_PASSES, pass_seconds, slot_behind
from draftree.bench.trees import scored_shape, time_drafting, time_scoring
from draftree.core.errors import ConfigurationError
from draftree.drafters.growing.shapes import parse_shape
from draftree.loading.resolve import resolve_model
from draftree.models.base import LanguageModel

QUANTIZED_BYTES = {"int8": 1}


@dataclass(frozen=True, slots=True)
class PassSettings:
    """The passes to time.

    Attributes:
        model: name of the model, in any supported form.
        rows: numbers of tokens per pass; 1 is always included.
        prefix: committed tokens before them.
        repeats: recorded passes of each kind.
        trees: shapes of trees that are scored, as trees and path by path.
        drafts: shapes of trees that the model drafts.
        dtype: dtype of the model.
        device: device of the model.
        kernels: kernels: "auto", "native", "torch" or "graphs".
        quantization: of the weights; None for no quantization.
        threads: CPU threads; None keeps torch's own choice.
        trust_remote_code: whether Python code in the model's folder may run.
    """

    model: str
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    prefix: int = 256
    repeats: int = 20
    trees: tuple[str, ...] = ()
    drafts: tuple[str, ...] = ()
    dtype: str = "auto"
    device: str = "auto"
    kernels: str = "auto"
    quantization: str | None = None
    threads: int | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        require_positive(self, "prefix", "repeats", "threads")
        if any(row < 1 for row in self.rows) or not self.rows:
            raise ConfigurationError(f"rows are {list(self.rows)}: each must be at least 1")
        object.__setattr__(self, "rows", tuple(sorted({1, *self.rows})))

    @property
    def most_rows(self) -> int:
        """Maximum number of tokens after the prefix."""
        scored = [scored_shape(text).num_nodes for text in self.trees]
        # a drafter's slot holds the tokens that it read, and the text grows during the timing
        drafted = [parse_shape(text, None).num_fed + self.repeats + WARM_UP_PASSES for text in self.drafts]
        return max([*self.rows, *scored, *drafted])


def measure(
    settings: PassSettings, *, fetch: Callable[[str], object] = resolve_model
) -> tuple[dict[str, Any], list[PassRecord], list[TreeRecord]]:
    """Load the model and time its passes; returns the header and the records of passes and of trees.

    Args:
        settings: the passes to time.
        fetch: called with the model's name before it is loaded.

    Raises:
        ConfigurationError: the prefix and the widest pass do not fit into the model's context.
        ModelError: the model cannot be found or used.
    """
    shapes = [scored_shape(text) for text in settings.trees]
    fetch(settings.model)
    loaded = load_for(settings)
    assert loaded.folder is not None
    model = loaded.model
    most = settings.most_rows
    if settings.prefix + most > model.max_length:
        raise ConfigurationError(
            f"a prefix of {settings.prefix} and {most} rows do not fit into the model's context of "
            f"{model.max_length}: lower one of them"
        )
    if any(not shape.is_chain for shape in shapes) and not model.supports_trees:
        raise ConfigurationError(f"trees were requested, but '{settings.model}' scores chains only: leave them out")
    weight_bytes = weight_bytes_read(
        loaded.folder, model.dtype, loaded.quantization, trust_remote_code=loaded.runs_code
    )
    load_before = load_average()
    bandwidth = read_bandwidth(model.device)
    records = time_passes(model, settings.rows, prefix=settings.prefix, repeats=settings.repeats)
    trees = time_scoring(model, settings.trees, prefix=settings.prefix, repeats=settings.repeats) if shapes else []
    trees += time_drafting(model, settings.drafts, prefix=settings.prefix, repeats=settings.repeats)
    header = {
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
        "read_bytes_per_second": bandwidth,
        "load_average": load_before,
    }
    return header, records, trees


def time_passes(model: LanguageModel, rows: Sequence[int], *, prefix: int, repeats: int) -> list[PassRecord]:
    """Time one pass for each number of rows after a prefix, interleaved; all rows give logits, as in verification."""
    model.reserve(1, prefix + max(rows))
    milliseconds: dict[int, list[float]] = {count: [] for count in rows}
    slot = slot_behind(model, prefix)
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


def weight_bytes_read(
    folder: Path, dtype: torch.dtype, quantization: str | None = None, *, trust_remote_code: bool = False
) -> int:
    """Return the bytes of all weights that a pass reads."""
    size = dtype.itemsize if quantization is None else QUANTIZED_BYTES[quantization]
    return weights_of_pass(folder, trust_remote_code=trust_remote_code) * size


def weights_of_pass(folder: Path, *, trust_remote_code: bool = False) -> int:
    """Return the number of weights that a pass reads: all except an embedding that is not also the head."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    count = sum(parameter.numel() for parameter in model.parameters())
    if head is not None and head.weight is not embedding.weight:
        count -= embedding.weight.numel()
    return int(count)
