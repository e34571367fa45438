"""Measured memory bandwidth and arithmetic peak of this machine: the lower bounds of every pass.

With native kernels, both are measured by loops of the instructions that passes use, on as many threads; otherwise by
torch's own sums and products.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftree.models.memory import free_memory
from draftree.models.native.build import NativeUnavailableError
from draftree.models.native.huge_pages import huge_pages
from draftree.models.native.library import library

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
        threads: number of concurrent threads.
        how: "C" or "torch".
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
    try:
        probe = None if device.type != "cpu" else _probe()
    except NativeUnavailableError:
        probe = None
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
    functions.draftree_probe_read.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    functions.draftree_probe_read.restype = ctypes.c_int64
    for kind in FORMATS:
        function = getattr(functions, f"draftree_probe_{kind}")
        function.argtypes, function.restype = [ctypes.c_int64], ctypes.c_int64
    return functions


def _read(probe: Any, pool: ThreadPoolExecutor, num_bytes: int, threads: int) -> float:
    buffer = huge_pages(num_bytes).fill_(1)  # untouched memory has no physical pages
    share = num_bytes // threads // LINE * LINE
    starts = [buffer.data_ptr() + share * thread for thread in range(threads)]

    def read() -> None:
        list(pool.map(lambda start: probe.draftree_probe_read(start, share), starts))

    return share * threads / min(_seconds(read) for _ in range(READS))


def _operations(function: Callable[[int], int], pool: ThreadPoolExecutor, threads: int) -> float | None:
    rounds, total = 1 << 10, 0

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
    one = torch.ones(size, size, dtype=dtype, device=device)
    product: Callable[[Tensor, Tensor], Tensor] = torch._int_mm if kind == "int8" else torch.mm
    try:
        best = min(_seconds(lambda: float(product(one, one)[0, 0])) for _ in range(ROUNDS))
    except (RuntimeError, NotImplementedError):
        return None
    return 2 * size**3 / best


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
