"""Times passes and decoding of a random model in a real model's shape: pass times do not depend on the weights.

    python benchmarks/gpu_passes.py --shape 8b [--device cuda] [--kernels graphs,torch,exact] [--output FILE]

Three tables, one JSON line per row after a header: passes over 1 to 64 new tokens of 1 to 64 sequences, as multiples
of the floor (bytes of weights, keys and values over measured bandwidth); plain decoding compared with transformers'
`generate` with its compiled static cache; and the drafter `synthetic`, an instrument whose guesses are right as often
as configured, with the share that it reaches of the speed-up that its acceptance and the measured passes predict.
Kernels `exact` are graphs whose rows have the same bits in every pass; they need a GPU. A model of shape `tiny` runs on
a CPU and shows that the script works. No card was at hand so far: it has timed nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from random_models import SHAPES, build, ids, weight_bytes

from draftree import LLM, SamplingParams
from draftree.core.tensors import runs_triton, synchronize
from draftree.lab.bench.benchmark import without_collector
from draftree.lab.bench.passes import read_bandwidth
from draftree.loading.loaded import LoadedModel
from draftree.loading.provenance import load_average, machine, now, versions
from draftree.loading.transformers_model import wrap_model
from draftree.models.base import Commit, Extend, LanguageModel, Pass
from draftree.models.torch.static import Shapes

WARM_UP = 3


@dataclass(frozen=True)
class PassTime:
    """One kind of pass: new tokens of each of `batch` sequences after a prefix."""

    kernels: str
    batch: int
    rows: int
    prefix: int
    milliseconds: float
    spread: float
    floor_milliseconds: float
    times_floor: float


@dataclass(frozen=True)
class DecodeTime:
    """Plain decoding of a batch; tokens per second of all sequences together."""

    how: str
    batch: int
    tokens_per_second: float
    times_floor: float


@dataclass(frozen=True)
class SyntheticTime:
    """Drafting with known acceptance."""

    kernels: str
    batch: int
    k: int
    accept: float
    tokens_per_round: float
    speedup: float
    predicted: float
    share: float


def seconds_of(work: Callable[[], object], repeats: int, device: torch.device) -> list[float]:
    """Seconds of each run after the warm-up, each synchronized."""
    found = []
    with without_collector():
        for turn in range(-WARM_UP, repeats):
            synchronize(device)
            start = time.perf_counter()
            work()
            synchronize(device)
            if turn >= 0:
                found.append(time.perf_counter() - start)
    return found


@torch.inference_mode()
def time_passes(
    loaded: LoadedModel,
    *,
    batches: Sequence[int],
    rows: Sequence[int],
    prefix: int,
    repeats: int,
    floor: Callable[[int], float],
) -> list[PassTime]:
    """Medians of passes with logits at all rows, as in verification."""
    model, found = loaded.model, []
    model.reserve(max(batches), prefix + max(rows))
    slots = [model.open() for _ in range(max(batches))]
    for index, slot in enumerate(slots):
        model.run(Pass([Extend(slot, ids(prefix, model.vocab_size, index), range(-1, prefix - 1), logits_at=())]))
        model.commit(slot, range(prefix))
    for batch in batches:
        for count in rows:
            work = one_pass(model, slots[:batch], ids(count, model.vocab_size))
            seconds = seconds_of(work, repeats, model.device)
            middle = statistics.median(seconds)
            spread = (max(seconds) - min(seconds)) / middle
            least = floor(batch)
            times = (1e3 * middle, spread, 1e3 * least, middle / least)
            found.append(PassTime(loaded.kernels, batch, count, prefix, *times))
    for slot in slots:
        model.close(slot)
    return found


def one_pass(model: LanguageModel, slots: Sequence[Any], tokens: Sequence[int]) -> Callable[[], object]:
    parents = range(-1, len(tokens) - 1)

    def work() -> None:
        model.run(Pass([Extend(slot, tokens, parents) for slot in slots]))
        model.apply([Commit(slot, ()) for slot in slots])

    return work


def time_decoding(loaded: LoadedModel, draft: str | None, *, batch: int, prefix: int, tokens: int) -> tuple[float, Any]:
    """Tokens per second of a batch after its first round, and the statistics of one text; the second of two runs."""
    llm = LLM(loaded, draft, plan=None if draft is None else "fixed", max_batch_size=batch, prefix_cache_size=0)
    prompts = [ids(prefix, loaded.model.vocab_size, index) for index in range(batch)]
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    for _ in range(2):
        done = llm.generate(prompts, params)
    return sum(d.stats.tokens_per_second for d in done), done[0].stats


def time_peer(model: Any, *, batch: int, prefix: int, tokens: int) -> float:
    """Tokens a second of transformers' `generate` with its static cache, compiled on cards; prefill taken off."""
    vocab_size = int(model.config.vocab_size)
    prompts = torch.tensor([ids(prefix, vocab_size, index) for index in range(batch)], device=model.device)

    def write(count: int) -> None:
        model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            cache_implementation="static",
        )

    for count in (tokens, 1, tokens):
        write(count)
    long = min(seconds_of(lambda: write(tokens), 1, model.device))
    short = min(seconds_of(lambda: write(1), 1, model.device))
    return batch * (tokens - 1) / max(long - short, 1e-9)


def measure(options: argparse.Namespace, say: Callable[[str, Any], None]) -> None:
    """All three tables; `say` is called with a header and each row."""
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    shape, prefix, tokens = SHAPES[options.shape], options.prefix, options.tokens
    context = prefix + max(*options.rows, tokens) + 2 * options.k + 16
    model = build(shape, context=context, device=device, dtype=dtype)
    read = weight_bytes(model)
    token = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * dtype.itemsize
    bandwidth = read_bandwidth(device, num_bytes=options.bandwidth_bytes)

    def floor(batch: int) -> float:
        return (read + batch * prefix * token) / bandwidth

    say(
        "header",
        {
            "job": "random-passes",
            "date": now(),
            "machine": machine(device),
            "versions": versions(),
            "shape": options.shape,
            "dtype": options.dtype,
            "weight_bytes": read,
            "token_bytes": token,
            "read_bytes_per_second": bandwidth,
            "repeats": options.repeats,
            "load_average": load_average(),
        },
    )
    plain: dict[tuple[str, int], float] = {}
    for batch in options.batches if options.peer else ():
        speed = time_peer(model, batch=batch, prefix=prefix, tokens=tokens)  # before the attention is exchanged
        say("decode", DecodeTime("transformers, static cache", batch, speed, batch / speed / floor(batch)))
    for kernels in options.kernels:
        shapes = None if kernels == "torch" else Shapes(exact=kernels == "exact")
        loaded = wrap_model(model, name=options.shape, shapes=shapes)
        if kernels == "exact":
            loaded = replace(loaded, kernels=f"exact {loaded.kernels}")
        passes = time_passes(
            loaded, batches=options.batches, rows=options.rows, prefix=prefix, repeats=options.repeats, floor=floor
        )
        for one in passes:
            say("pass", one)
        for batch in options.batches:
            speed, _ = time_decoding(loaded, None, batch=batch, prefix=prefix, tokens=tokens)
            plain[kernels, batch] = speed
            say("decode", DecodeTime(f"plain, {loaded.kernels}", batch, speed, batch / speed / floor(batch)))
            say("synthetic", time_synthetic(loaded, passes, plain=speed, batch=batch, options=options))


def time_synthetic(
    loaded: LoadedModel, passes: Sequence[PassTime], *, plain: float, batch: int, options: argparse.Namespace
) -> SyntheticTime:
    """Speed-up over plain, and its prediction from tokens per round and the two passes' costs."""
    draft = f"synthetic,accept={options.accept},k={options.k}"
    speed, stats = time_decoding(loaded, draft, batch=batch, prefix=options.prefix, tokens=options.tokens)
    cost = {one.rows: one.milliseconds for one in passes if one.batch == batch}
    predicted = stats.acceptance_length * cost[1] / cost[options.k + 1]
    gain = speed / plain
    return SyntheticTime(
        loaded.kernels, batch, options.k, options.accept, stats.acceptance_length, gain, predicted, gain / predicted
    )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    def numbers(text: str) -> tuple[int, ...]:
        return tuple(sorted({1, *map(int, text.split(","))}))

    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="1b")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kernels", type=lambda text: text.split(","))
    parser.add_argument("--rows", type=numbers, default=numbers("1,2,4,8,16,32,64"))
    parser.add_argument("--batches", type=numbers, default=numbers("1,2,4,8,16,32,64"))
    parser.add_argument("--prefix", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--accept", type=float, default=0.8)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--no-peer", dest="peer", action="store_false")
    parser.add_argument("--bandwidth-bytes", type=int, default=1 << 29)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    options.rows = tuple(sorted({*options.rows, options.k + 1}))
    if options.kernels is None:
        options.kernels = ["torch", "graphs", *["exact"] * runs_triton(torch.device(options.device))]
    return options


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    lines = []

    def say(kind: str, row: Any) -> None:
        fields = row if isinstance(row, dict) else asdict(row)
        lines.append(json.dumps({"type": kind, **fields}))
        print(lines[-1], flush=True)

    measure(options, say)
    if options.output is not None:
        options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
