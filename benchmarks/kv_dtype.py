"""Time of passes after long texts with keys and values of 16 or 32 bits and of 8 bits, in turns in one process.

Slots are filled with random keys and values, which take as long as those of a text.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from draftree.loading.load import load_model
from draftree.loading.provenance import machine, now, versions
from draftree.models.base import Extend, Pass
from draftree.models.kv.slots import KVSlot
from draftree.models.native.model import NativeModel

ROWS = (1, 8)


def filled(model: NativeModel, length: int, rows: int) -> KVSlot:
    """Return a slot with random keys and values for `length` tokens."""
    model.reserve(1, length + rows)
    slot = model.open()
    memory = model._pool.memory
    for stores in memory._stores:
        for store in stores:
            if store.dtype == torch.int8:
                dim = model.blueprint.head_dim
                store.random_(-127, 128)
                store[..., dim:] = torch.full((1,), 0.01).view(torch.int8)
            else:
                store.normal_()
    slot.copy_prefix(length)
    return slot


def one_pass(model: NativeModel, slot: KVSlot, rows: int) -> float:
    """Return the seconds of a pass over rows after the slot's tokens."""
    length, tokens = slot.length, list(range(5, 5 + rows))
    start = time.perf_counter()
    model.run(Pass([Extend(slot, tokens, range(-1, rows - 1))]))
    seconds = time.perf_counter() - start
    model.truncate(slot, length)
    return seconds


def measured(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the medians by length and rows."""
    kinds: dict[str, NativeModel] = {}
    for kind in given.kinds:
        dtype, _, kv = kind.partition("+kv-")
        model = load_model(given.model, dtype=dtype, quantization=given.quantization, kv_dtype=kv or None).model
        assert isinstance(model, NativeModel), "passes run in C"
        kinds[kind] = model
    records = []
    for length in given.lengths:
        slots = {kind: filled(model, length, max(ROWS)) for kind, model in kinds.items()}
        for rows in ROWS:
            times: dict[str, list[float]] = {kind: [] for kind in kinds}
            for _ in range(given.repeats):
                for kind, model in kinds.items():
                    times[kind].append(one_pass(model, slots[kind], rows))
            for kind, model in kinds.items():
                records.append(
                    {
                        "kind": "kv",
                        "keys": kind,
                        "length": length,
                        "rows": rows,
                        "milliseconds": round(1e3 * statistics.median(times[kind]), 3),
                        "token_bytes": model.footprint.token,
                    }
                )
        for kind, model in kinds.items():
            model.close(slots[kind])
    return records


def main() -> None:
    """Measure and write records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--quantization")
    parser.add_argument("--kinds", nargs="+", default=["bfloat16", "bfloat16+kv-int8"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[256, 1024, 4096, 8000])
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    head = {"job": "kv_dtype", "date": now(), "machine": machine(torch.device("cpu")), "versions": versions()}
    head |= {"model": given.model, "quantization": given.quantization, "threads": torch.get_num_threads()}
    lines = [json.dumps(one) for one in (head, *measured(given))]
    if given.output is not None:
        given.output.write_text("\n".join(lines) + "\n", "utf-8")
    print("\n".join(lines[1:]))


if __name__ == "__main__":
    main()
