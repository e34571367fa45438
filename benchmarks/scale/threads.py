"""Time of a pass over one row with more threads than this machine has: measured for few, simulated for more.

A pass is a sequence of phases that end with a barrier. A phase reads its weights in pieces, which threads take one by
one. Its simulated time is the larger one of its bytes at the bandwidth of all threads, and of the pieces of the busiest
thread at the bandwidth of one; to this comes the barrier, whose cost grows with every thread. Bandwidth of one thread
and both costs are measured, by passes of the model and of one whose weights fit into the caches.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftree.loading.load import load_model
from draftree.loading.lowering import lower_model
from draftree.loading.provenance import machine, now, versions
from draftree.models.base import Extend, Pass
from draftree.models.native.blueprint import Blueprint
from draftree.models.native.model import NativeModel

OUTPUTS_OF_PIECE = 64
"""A thread takes four blocks of 16 outputs at once (csrc/vectors.h and products.h)."""
SMALL_PHASES = 5
"""Phases of a layer without weights: two norms, places, attention, and the input of the output projection."""
FIXED_PHASES = 3
"""Phases of a pass besides those of the layers and the head."""


@dataclass(frozen=True)
class Product:
    """A phase that reads weights."""

    num_bytes: int
    pieces: int


def products_of(plan: Blueprint, weight_bytes: float) -> list[Product]:
    """Return the phases of a pass with their shares of the weights."""
    found = []
    for layer in plan.layers:
        for parts in (layer.qkv, (layer.output,), layer.gate_up, (layer.down,)):
            found.append((sum(part.outputs for part in parts), parts[0].inputs))
    found.append((plan.head.outputs, plan.head.inputs))
    total = sum(outputs * inputs for outputs, inputs in found)
    return [
        Product(int(weight_bytes * outputs * inputs / total), -(-outputs // OUTPUTS_OF_PIECE))
        for outputs, inputs in found
    ]


def seconds_of(model: NativeModel, threads: int, repeats: int) -> float:
    """Return the least time of a pass over one row after a short text: other programs only add to it."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    slot = model.open()
    model.run(Pass([Extend(slot, list(range(5, 37)), range(-1, 31), logits_at=())]))
    model.commit(slot, range(32))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        model.run(Pass([Extend(slot, [5], [-1])]))
        times.append(time.perf_counter() - start)
        model.truncate(slot, 32)
    model.close(slot)
    torch.set_num_threads(before)
    return min(times)


def tiny_model() -> NativeModel:
    """Return a model whose passes consist of barriers: 32 layers whose weights fit into the caches."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 64}
    config = LlamaConfig(**sizes, num_hidden_layers=32, num_attention_heads=4, num_key_value_heads=4)
    found = lower_model(LlamaForCausalLM(config).to(torch.bfloat16)).model
    assert isinstance(found, NativeModel), "passes run in C"
    return found


def simulated(
    products: list[Product], phases: int, *, threads: int, one: float, limit: float, barrier: tuple[float, float]
) -> float:
    """Return the seconds of a pass.

    Args:
        products: phases that read weights.
        phases: number of all phases.
        threads: number of threads.
        one: bandwidth of a thread in bytes/s.
        limit: bandwidth of all threads in bytes/s.
        barrier: cost of a phase for one thread, and for every further one, in seconds.
    """
    total = phases * (barrier[0] + (threads - 1) * barrier[1])
    for product in products:
        busiest = -(-product.pieces // threads) / product.pieces
        total += max(product.num_bytes / min(threads * one, limit), busiest * product.num_bytes / one)
    return total


def main() -> None:
    """Measure, simulate and write records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--bandwidths", nargs="+", type=float, default=[50, 100, 200, 400], help="GB/s of all threads")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    model, tiny = load_model(given.model, dtype=given.dtype, quantization=given.quantization).model, tiny_model()
    assert isinstance(model, NativeModel), "passes run in C"
    plan, layers = model.blueprint, len(model.blueprint.layers)
    products = products_of(plan, model.footprint.weights)
    phases = len(products) + SMALL_PHASES * layers + FIXED_PHASES
    tiny_phases = (4 + SMALL_PHASES) * 32 + 1 + FIXED_PHASES
    own = [seconds_of(model, threads, given.repeats) for threads in (1, 2)]
    empty = [seconds_of(tiny, threads, 4 * given.repeats) / tiny_phases for threads in (1, 2)]
    barrier = (empty[0], max(0.0, empty[1] - empty[0]))
    one = model.footprint.weights / (own[0] - phases * barrier[0])
    records: list[dict[str, Any]] = [
        {"job": "threads", "date": now(), "machine": machine(torch.device("cpu")), "versions": versions()}
        | {"model": given.model, "dtype": given.dtype, "quantization": given.quantization}
        | {"phases": phases, "pieces": sorted({product.pieces for product in products})}
        | {"weight_bytes": model.footprint.weights, "bytes_per_second_of_one": round(one)}
        | {"phase_seconds": [round(x, 9) for x in barrier]}
    ]
    records += [{"kind": "measured", "threads": n, "milliseconds": round(1e3 * own[n - 1], 3)} for n in (1, 2)]
    for limit in given.bandwidths:
        for threads in given.threads:
            how: dict[str, Any] = {"threads": threads, "one": one, "limit": 1e9 * limit, "barrier": barrier}
            seconds = simulated(products, phases, **how)
            records.append(
                {"kind": "simulated", "threads": threads, "gigabytes_per_second": limit}
                | {"milliseconds": round(1e3 * seconds, 3)}
            )
    lines = [json.dumps(record) for record in records]
    if given.output is not None:
        given.output.write_text("\n".join(lines) + "\n", "utf-8")
    print("\n".join(lines[1:]))


if __name__ == "__main__":
    main()
