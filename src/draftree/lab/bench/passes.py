"""Cost of a model's pass by number of rows, and the machine's speeds as its lower bound.

A pass over a few tokens reads the weights once, independent of their number: the lower bound is their bytes divided by
the measured bandwidth. The possible gain of drafting depends on how slowly the cost grows from there. With native
kernels, bandwidth and arithmetic peak are measured by loops of the instructions that passes use, on as many threads;
otherwise by torch's own sums and products.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftree.build import load_for, require_positive
from draftree.core.errors import ConfigurationError
from draftree.lab.bench.benchmark import run_header, without_collector
from draftree.lab.bench.records import PassRecord
from draftree.loading.loaded import LoadedModel
from draftree.loading.resolve import prepared_folder
from draftree.models.base import Extend, LanguageModel, Pass, Slot
from draftree.models.memory import free_memory
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.library import library
from draftree.models.native.model import NativeModel
from draftree.models.native.packed import huge_pages
from draftree.options import ModelOptions

TORCH_FORMATS = ("float32", "bfloat16", "int8")
FORMATS = (*TORCH_FORMATS, "int4")
"""Formats of weights with peaks of their own; int4 stands for all weights in groups, also those of GGUF files."""
LEAST_BYTES = 1 << 28
BANDWIDTH_BYTES = 1 << 29
FREE_SHARE = 4
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
LINE = 512
READS = 8
ROUNDS = 5
PRODUCT_SECONDS = 0.02
PRODUCT_SIZE = 1024


@dataclass(frozen=True, slots=True)
class Speeds:
    """The measured speeds.

    Attributes:
        read_bytes_per_second: bandwidth on a buffer of `buffer_bytes`, the fastest of several reads.
        buffer_bytes: at least twice the largest cache, if the memory allows it.
        operations_per_second: multiplications and additions of weights by format, with the inputs of passes: for int8
            of 8 bits where passes round them so, otherwise of 16 bits. None if such products are not supported.
    """

    read_bytes_per_second: float
    buffer_bytes: int
    operations_per_second: Mapping[str, float | None]
    threads: int
    how: str

    def floor_seconds(self, *, read_bytes: int, operations: float, kind: str) -> float:
        """Return the larger of reading and computing time; reading time alone if the peak was not measured."""
        peak = self.operations_per_second.get(kind)
        return max(read_bytes / self.read_bytes_per_second, 0.0 if peak is None else operations / peak)


def measure_speeds(device: torch.device, *, threads: int) -> Speeds:
    """Measure on the given number of CPU threads, or on a GPU."""
    num_bytes = buffer_bytes(device)
    probe = None
    if device.type == "cpu":
        with contextlib.suppress(NativeUnavailableError):
            probe = _probe()
    if probe is None:
        products = {kind: _torch_operations(kind, device) for kind in TORCH_FORMATS}
        return Speeds(read_bandwidth(device, num_bytes=num_bytes), num_bytes, products, threads, "torch")
    with ThreadPoolExecutor(threads) as pool:
        read = _read(probe, pool, num_bytes, threads)
        operations = {kind: _operations(getattr(probe, f"draftree_probe_{kind}"), pool, threads) for kind in FORMATS}
    return Speeds(read, num_bytes, operations, threads, "C")


def buffer_bytes(device: torch.device) -> int:
    """Return the size of a buffer that exceeds all caches and leaves most of the free memory unused."""
    wanted = max(LEAST_BYTES, 2 * max(cache_sizes(), default=0))
    free = free_memory(device)
    return wanted if free is None else max(LEAST_BYTES, min(wanted, free // FREE_SHARE))


def cache_sizes() -> list[int]:
    """Return the bytes of the processor's caches, nearest first; empty if the system does not report them."""
    units = {"K": 1 << 10, "M": 1 << 20}
    sizes: dict[str, int] = {}
    try:
        for index in sorted(CACHES.glob("index*")):
            if (index / "type").read_text("utf-8").strip() != "Instruction":
                text = (index / "size").read_text("utf-8").strip()
                sizes[(index / "level").read_text("utf-8").strip()] = int(text[:-1]) * units[text[-1]]
    except (OSError, ValueError, KeyError):
        return []
    return [sizes[level] for level in sorted(sizes)]


@functools.cache
def _probe() -> Any:
    functions: Any = ctypes.CDLL(str(library().path))
    for name in ("read", *FORMATS):
        function = getattr(functions, f"draftree_probe_{name}")
        function.argtypes = [ctypes.c_void_p, ctypes.c_int64] if name == "read" else [ctypes.c_int64]
        function.restype = ctypes.c_int64
    return functions


def _read(probe: Any, pool: ThreadPoolExecutor, num_bytes: int, threads: int) -> float:
    buffer = huge_pages(num_bytes).fill_(1)  # untouched memory has no physical pages
    share = num_bytes // threads // LINE * LINE
    starts = [buffer.data_ptr() + share * thread for thread in range(threads)]

    def read() -> None:
        list(pool.map(lambda start: probe.draftree_probe_read(start, share), starts))

    return share * threads / min(_seconds(read) for _ in range(READS))


def _operations(function: Callable[[int], int], pool: ThreadPoolExecutor, threads: int) -> float | None:
    rounds = 1 << 10
    total = 0

    def multiply() -> None:
        nonlocal total
        total = sum(pool.map(function, [rounds] * threads))

    while _seconds(multiply) < PRODUCT_SECONDS:
        if not total:
            return None
        rounds *= 2
    best = min(_seconds(multiply) for _ in range(ROUNDS))
    return total / best


def read_bandwidth(device: torch.device, *, num_bytes: int = BANDWIDTH_BYTES) -> float:
    """Return the bytes per second of torch reading a large array: the best of sums and matrix-vector products."""
    columns = 4096
    matrix = torch.ones(num_bytes // 4 // columns, columns, device=device)
    vector = torch.ones(columns, device=device)
    reads: list[Callable[[], Tensor]] = [matrix.sum, lambda: torch.mv(matrix, vector)[0]]
    best = min(_seconds(lambda read=read: float(read())) for _ in range(READS) for read in reads)  # type: ignore[misc]
    return matrix.numel() * 4 / best


def _torch_operations(kind: str, device: torch.device) -> float | None:
    size = PRODUCT_SIZE if device.type == "cpu" else 8 * PRODUCT_SIZE
    dtype = getattr(torch, kind)
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    product: Callable[[Tensor, Tensor], Tensor] = torch._int_mm if kind == "int8" else torch.mm
    try:
        best = min(_seconds(lambda: float(product(matrix, matrix)[0, 0])) for _ in range(ROUNDS))
    except (RuntimeError, NotImplementedError):
        return None
    return 2 * size**3 / best


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


WARM_UP_PASSES = 2


def some_tokens(model: LanguageModel, count: int) -> list[int]:
    return [(7 + 31 * place) % model.vocab_size for place in range(count)]


def slot_after(model: LanguageModel, prefix: int) -> Slot:
    """Open a slot with `prefix` committed tokens."""
    slot = model.open_probe()
    tokens = some_tokens(model, prefix)
    model.run(Pass([Extend(slot, tokens, range(-1, prefix - 1), logits_at=[prefix - 1], settled=prefix)]))
    model.commit(slot, range(prefix))
    return slot


def pass_seconds(model: LanguageModel, slot: Slot, parents: Sequence[int]) -> float:
    """Time a pass over the nodes of a tree, all of which give logits; the slot is unchanged afterwards."""
    job = Extend(slot, some_tokens(model, len(parents)), parents)
    start = time.perf_counter()
    logits = model.run(Pass([job])).logits.tensor()
    float(logits[-1, 0])  # reading a value waits for the GPU
    seconds = time.perf_counter() - start
    model.commit(slot, ())
    return seconds


USUAL_PREFIX = 256
EXPERTS = "experts"
"""Name of the modules that have the experts of a layer, without a shared one."""
NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_OF_ROW = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k")
"""Names in the configurations of models."""


@dataclass(frozen=True, slots=True)
class PassSettings:
    """The passes to time.

    Attributes:
        prefix: committed tokens before them; None for 256, or as many as fit into a shorter context.
    """

    options: ModelOptions
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    prefix: int | None = None
    repeats: int = 20

    def __post_init__(self) -> None:
        require_positive(self, "prefix", "repeats")
        if any(row < 1 for row in self.rows) or not self.rows:
            raise ConfigurationError(f"rows are {list(self.rows)}: each must be at least 1")
        object.__setattr__(self, "rows", tuple(sorted({1, *self.rows})))


def measure(
    settings: PassSettings, *, fetch: Callable[[str], object] = prepared_folder
) -> tuple[dict[str, Any], list[PassRecord]]:
    """Load the model and time its passes; the header, and a record for each number of rows."""
    fetch(settings.options.model)
    loaded = load_fitting(settings, max(settings.rows))
    prefix = settings.prefix or min(USUAL_PREFIX, loaded.model.max_length - max(settings.rows))
    header = header_of(settings, loaded)
    return header, time_passes(loaded.model, settings.rows, prefix=prefix, repeats=settings.repeats)


def load_fitting(settings: PassSettings, num_rows: int) -> LoadedModel:
    """Load the model, into whose context the prefix and `num_rows` more tokens fit."""
    loaded = load_for(settings.options)
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
    return {
        **run_header("passes", loaded, settings.options.model),
        "repeats": settings.repeats,
        "warm_up": {"rounds": WARM_UP_PASSES},
        "weight_bytes": bytes_of_pass(loaded),
        "read_bytes_per_second": read_bandwidth(loaded.model.device),
    }


def time_passes(model: LanguageModel, rows: Sequence[int], *, prefix: int, repeats: int) -> list[PassRecord]:
    """Time one pass for each number of rows after a prefix, interleaved; all rows give logits, as in verification."""
    model.reserve(1, prefix + max(rows))
    milliseconds: dict[int, list[float]] = {count: [] for count in rows}
    slot = slot_after(model, prefix)
    try:
        with without_collector():
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
    size = 1 if loaded.quantization == "int8" else loaded.model.dtype.itemsize
    return weights_of_pass(loaded.folder, trust_remote_code=loaded.runs_code) * size


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
    weights = [
        (name.split("."), parameter.numel())
        for name, parameter in model.named_parameters()
        if id(parameter) not in embeddings or parameter is head.weight
    ]
    of_experts = sum(count for path, count in weights if EXPERTS in path)
    others = sum(count for _, count in weights) - of_experts
    every, used = (
        next((value for name in names if isinstance(value := getattr(config.get_text_config(), name, None), int)), None)
        for names in (NUM_EXPERTS, EXPERTS_OF_ROW)
    )
    return others + (of_experts * min(used, every) // every if every and used else of_experts)
